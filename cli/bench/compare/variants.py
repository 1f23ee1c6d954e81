from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from llmsched.cli.options.config_flags import knob_value
from llmsched.engine.config import EngineConfig, Policy, check_together
from llmsched.engine.errors import LlmschedError

#: Other names of scheduling policies.
_ALIASES = {"continuous": "fair"}

SYNTAX = "a policy, engine settings (max_num_batched_tokens=512), or both separated by spaces"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str  # as the user typed it
    knobs: Mapping[str, Any]  # settings that the variant changes


def parse_variants(text: str) -> list[Variant]:
    """Parse variants such as "static, continuous" or "fair; fair headroom=20%". Raises LlmschedError if invalid."""
    parts = [" ".join(part.split()) for part in re.split(r"[,;]", text)]
    if "" in parts or len(parts) < 2:
        raise LlmschedError(f"--compare {text!r}: name two or more variants separated by commas, each {SYNTAX}")
    return [Variant(part, _knobs(part)) for part in parts]


def configure(base: EngineConfig, variants: Sequence[Variant]) -> dict[str, EngineConfig]:
    """Return the engine configuration of each variant, by name. Raises LlmschedError for two equal variants."""
    configs: dict[str, EngineConfig] = {}
    for variant in variants:
        config = replace(base, **variant.knobs)
        same = next((name for name, other in configs.items() if other == config), None)
        if same is not None or variant.name in configs:
            raise LlmschedError(f"--compare: {(same or variant.name)!r} and {variant.name!r} are the same settings")
        configs[variant.name] = config
    return configs


def check_given(variants: Sequence[Variant], given: Mapping[str, Any]) -> None:
    """Raise LlmschedError if a setting in `given`, from a flag, has no effect because every variant sets it."""
    for name in given:
        if all(name in variant.knobs for variant in variants):
            flag = "--" + name.replace("_", "-")
            raise LlmschedError(f"{flag} has no effect: every variant of --compare sets {name}; leave the flag out")


def _knobs(part: str) -> dict[str, Any]:
    knobs: dict[str, Any] = {}
    for word in part.split(" "):
        name, equals, value = word.partition("=")
        name = name.replace("-", "_").strip("_")
        if not equals:
            name, value = "scheduling_policy", _ALIASES.get(word, word)
            if value not in (known := get_args(Policy)):
                names = ", ".join((*known, *_ALIASES))
                raise LlmschedError(f"--compare: {word!r} must be a scheduling policy ({names}) or NAME=VALUE")
        if name == "seed":
            raise LlmschedError("--compare: sampling is greedy, so the engine's seed has no effect; leave it out")
        if name in knobs:
            raise LlmschedError(f"--compare {part!r}: {name} is set twice")
        knobs[name] = knob_value(name, value)
    check_together(knobs)
    return knobs
