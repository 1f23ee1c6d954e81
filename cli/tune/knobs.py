"""What is searched: a setting, its knobs, and the values of a knob that can make a difference. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo

_DEFAULT = EngineConfig()

#: Shares of blocks kept free that are tried where KV is scarce.
HEADROOMS = (0.02, 0.05, 0.1, 0.2)
#: KV may be scarce when more than this share of what headroom leaves was in use: whole requests are let in or not.
SCARCE = 0.75
#: Gaps that steps are sized to, as shares of the SLO: its P99 lies above what a step aims at.
TARGETS = (1.0, 0.6)


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the search; the fields are knobs of EngineConfig that an engine can change while it lives."""

    max_num_batched_tokens: int
    max_num_seqs: int
    headroom: float = _DEFAULT.headroom
    target_itl: float | None = _DEFAULT.target_itl

    def limits(self) -> Limits:
        """The setting for `Engine.reconfigure`."""
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            headroom=self.headroom,
            target_itl=self.target_itl,
        )

    def known(self) -> dict[str, int | float]:
        """The knobs that are set, for a profile."""
        return {name: value for name, value in asdict(self).items() if value is not None}


#: The knobs in the order in which they are searched.
KNOBS = tuple(f.name for f in fields(Setting))


@dataclass(frozen=True, slots=True)
class PeakDemand:
    """What the load asked of the engine at its peak: running requests, and the share of KV blocks in use."""

    running: int
    kv_share: float
    preempted: bool = False


def parse_knobs(text: str) -> tuple[str, ...]:
    """The knobs of a list with commas, in the order of KNOBS. Raises LlmschedError naming the one that is none."""
    given = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    if unknown := [name for name in given if name not in KNOBS]:
        raise LlmschedError(f"--knobs: {unknown[0]!r} is none of {', '.join(KNOBS)}")
    if not given:
        raise LlmschedError(f"--knobs names no knob; choose from {', '.join(KNOBS)}")
    return tuple(name for name in KNOBS if name in given)


def powers_of_two(low: int, high: int) -> list[int]:
    """Both bounds and the powers of two between them, ascending, each once.

    Raises LlmschedError unless 1 <= low <= high.
    """
    if not 1 <= low <= high:
        raise LlmschedError(f"the sweep from {low} to {high} is empty; the lower bound is 1 or more, the upper no less")
    between = (1 << power for power in range(low.bit_length(), high.bit_length()))
    return sorted({low, *between, high})


def largest_useful(concurrency: int, input_len: int) -> int:
    """The power of two that holds all prompts of a load at once: a larger step would find nothing to fill it with."""
    return 1 << (concurrency * input_len - 1).bit_length()


def neighbours(setting: Setting, knob: str, values: list[Any]) -> list[Setting]:
    """`setting` itself, then the same with each other value of one knob."""
    others = [replace(setting, **{knob: value}) for value in values]
    return [setting, *(other for other in others if other != setting)]


def seqs_settings(setting: Setting, demand: PeakDemand, most: int) -> list[Setting]:
    """Other caps of running requests: powers of two from an eighth of what ran at the peak to below it.

    More than the peak changes nothing, unless it was the cap that ended it: then up to `most`.
    """
    capped = demand.running >= setting.max_num_seqs
    highest = most if capped else demand.running - 1
    powers = [1 << power for power in range(highest.bit_length()) if demand.running // 8 <= 1 << power <= highest]
    return neighbours(setting, "max_num_seqs", sorted({*powers, *([most] if capped else [])}, reverse=True))


def headroom_settings(setting: Setting, demand: PeakDemand, most: float) -> list[Setting]:
    """Other shares of blocks kept free, up to `most`, if admission ever came near them."""
    scarce = demand.preempted or demand.kv_share > SCARCE * (1 - setting.headroom)
    return neighbours(setting, "headroom", [share for share in HEADROOMS if share <= most] if scarce else [])


def target_settings(setting: Setting, slo: Slo, largest: int) -> list[Setting]:
    """Steps sized to the gap that the SLOs allow between tokens, under this token budget and under the largest.

    The largest as well because with a target the budget is only the ceiling of what steps are sized to. Where there is
    a target already, none is tried too.
    """
    limits = [limit for name, limit in slo.given().items() if name in ("itl", "tpot")]
    allowed = EngineConfig.knob_rule("target_itl")
    targets = [share * min(limits) for share in TARGETS] if limits else []
    targets = [target for target in targets if allowed["low"] <= target <= allowed["high"]]
    budgets = sorted({setting.max_num_batched_tokens, largest})
    aimed = [replace(setting, max_num_batched_tokens=tokens, target_itl=itl) for itl in targets for tokens in budgets]
    aimed.append(replace(setting, target_itl=None))
    return [setting, *(other for other in aimed if other != setting)]


def describe(setting: Setting, others: list[Setting]) -> str:
    """The setting in words: its token budget, and what else is not the same in all of `others`."""
    parts = [f"max_num_batched_tokens {setting.max_num_batched_tokens}"]
    for knob in KNOBS[1:]:
        if len({getattr(other, knob) for other in others}) > 1:
            value = getattr(setting, knob)
            parts.append(f"{knob} {knob_in_words(knob, value)}")
    return ", ".join(parts)


def knob_in_words(knob: str, value: int | float | None) -> str:
    """A knob's value for a person."""
    if value is None:
        return "off"
    return f"{value * 1e3:g} ms" if knob == "target_itl" else f"{value:g}"
