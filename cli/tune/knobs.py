"""Knobs (the engine settings that `llmsched tune` searches) and the values worth trying for each knob."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from llmsched.engine.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo

_DEFAULT = EngineConfig()

#: Largest token budget tried, by kind of device; larger steps only take longer.
LARGEST_BUDGET = {"cpu": 1024, "cuda": 8192}
#: Headroom values tried if KV memory is scarce (shares of blocks that admission keeps free).
HEADROOMS = (0.02, 0.05, 0.1, 0.2)
#: KV memory counts as scarce if more than this share of the blocks outside the headroom was in use. It is below 1
#: because admission takes whole requests, which rarely fill the blocks exactly.
SCARCE = 0.75
#: Values of target_itl tried, as shares of the SLO. The second is below 1 because P99 ITL exceeds target_itl.
TARGETS = (1.0, 0.6)


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of `Engine.reconfigure`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    headroom: float = _DEFAULT.headroom
    target_itl: float | None = _DEFAULT.target_itl  # seconds; None: auto, the default pace


#: Names of the knobs, in search order.
KNOBS = tuple(f.name for f in fields(Setting))


@dataclass(frozen=True, slots=True)
class PeakDemand:
    """Peak demand of a run: the most requests in one step and the largest share (0 to 1) of KV blocks in use."""

    running: int
    kv_share: float
    preempted: bool = False


def parse_knobs(text: str) -> tuple[str, ...]:
    """Return the knobs listed in `text`, in the order of KNOBS. Raises LlmschedError for an unknown or missing name."""
    given = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    if unknown := [name for name in given if name not in KNOBS]:
        raise LlmschedError(f"--knobs: {unknown[0]!r} is not a knob; choose from {', '.join(KNOBS)}")
    if not given:
        raise LlmschedError(f"--knobs names no knob; choose from {', '.join(KNOBS)}")
    return tuple(name for name in KNOBS if name in given)


def powers_of_two(low: int, high: int) -> list[int]:
    """Return both bounds and the powers of two between them. Raises LlmschedError unless 1 <= low <= high."""
    if not 1 <= low <= high:
        raise LlmschedError(
            f"cannot sweep from {low} to {high}: the lower bound must be at least 1 and at most the upper bound"
        )
    between = (1 << power for power in range(low.bit_length(), high.bit_length()))
    return sorted({low, *between, high})


def largest_budget(kind: str, concurrency: int, input_len: int) -> int:
    """Return the largest token budget worth trying on a device of this kind ("cpu" or "cuda").

    A step has at most the prompt tokens of all concurrent requests. The result is this number, rounded up to a power of
    two, but at least the default budget and at most LARGEST_BUDGET.
    """
    useful = 1 << (concurrency * input_len - 1).bit_length()
    return max(DEFAULT_TOKEN_BUDGET[kind], min(LARGEST_BUDGET[kind], useful))


def distance(one: Setting, other: Setting) -> tuple[int, float]:
    """Return how many knobs besides the token budget differ, and the absolute log2 of the ratio of the two budgets."""
    others = sum(getattr(one, knob) != getattr(other, knob) for knob in KNOBS[1:])
    return others, abs(math.log2(one.max_num_batched_tokens / other.max_num_batched_tokens))


def seqs_settings(setting: Setting, demand: PeakDemand, most: int) -> list[Setting]:
    """Return `setting`, then copies with other values of max_num_seqs, largest first.

    The values are powers of two below the peak number of running requests. If max_num_seqs limited this peak, the
    values go up to `most`.
    """
    capped = demand.running >= setting.max_num_seqs
    highest = most if capped else demand.running - 1
    powers = [1 << power for power in range(highest.bit_length()) if demand.running // 8 <= 1 << power <= highest]
    values = sorted({*powers, *([most] if capped else [])}, reverse=True)
    return _first(setting, (replace(setting, max_num_seqs=value) for value in values))


def headroom_settings(setting: Setting, demand: PeakDemand, most: float) -> list[Setting]:
    """Return `setting` and, if KV memory was scarce, copies with other values of headroom, at most `most`."""
    scarce = demand.preempted or demand.kv_share > SCARCE * (1 - setting.headroom)
    return _first(setting, (replace(setting, headroom=share) for share in HEADROOMS if scarce and share <= most))


def target_settings(setting: Setting, slo: Slo, largest: int) -> list[Setting]:
    """Return `setting`, then copies in which target_itl is auto or a share of the stricter SLO on ITL or TPOT.

    Each share is combined with the token budget of `setting` and with the budget `largest`.
    """
    limits = [limit for name, limit in slo.given().items() if name in ("itl", "tpot")]
    allowed = EngineConfig.knob_rule("target_itl")
    targets = [share * min(limits) for share in TARGETS] if limits else []
    targets = [target for target in targets if allowed["low"] <= target <= allowed["high"]]
    budgets = sorted({setting.max_num_batched_tokens, largest})
    aimed = [replace(setting, max_num_batched_tokens=tokens, target_itl=itl) for itl in targets for tokens in budgets]
    return _first(setting, [*aimed, replace(setting, target_itl=None)])


def _first(setting: Setting, others: Iterable[Setting]) -> list[Setting]:
    return [setting, *(other for other in others if other != setting)]


def varied_knobs(settings: Sequence[Setting]) -> list[str]:
    """Return the names of the knobs whose values differ among the settings, and always max_num_batched_tokens."""
    return [knob for knob in KNOBS if knob == KNOBS[0] or len({getattr(each, knob) for each in settings}) > 1]


def describe(setting: Setting, others: Sequence[Setting]) -> str:
    """Return a setting as text: its token budget, and the value of each knob that differs among `others`."""
    return ", ".join(f"{knob} {knob_in_words(knob, getattr(setting, knob))}" for knob in varied_knobs(others))


def knob_in_words(knob: str, value: int | float | None) -> str:
    if value is None:
        return "auto"
    return f"{value * 1e3:g} ms" if knob == "target_itl" else f"{value:g}" if isinstance(value, float) else str(value)
