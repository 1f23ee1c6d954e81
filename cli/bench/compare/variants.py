"""What `--compare` names: settings of the engine that the same work is done under."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from llmsched.cli.options.engine_flags import knob_value
from llmsched.engine.config import EngineConfig, Policy, check_together
from llmsched.engine.errors import LlmschedError

#: Names that people have for policies, besides the engine's own.
_ALSO_CALLED = {"continuous": "fair"}

SYNTAX = "a policy, settings of the engine (max_num_batched_tokens=512), or both with blanks between them"


@dataclass(frozen=True, slots=True)
class Variant:
    """Engine settings (`knobs`) under the name that the user gave them."""

    name: str
    knobs: Mapping[str, Any]


def parse_variants(text: str) -> list[Variant]:
    """The variants of "static, continuous" or "fair; fair max_num_batched_tokens=512 headroom=20%".

    Raises LlmschedError for fewer than two, for what is no setting or no value of it, and for a setting that the policy
    beside it does not heed.
    """
    parts = [" ".join(part.split()) for part in re.split(r"[,;]", text)]
    if "" in parts or len(parts) < 2:
        raise LlmschedError(f"--compare {text!r}: write two or more variants with commas between them, each {SYNTAX}")
    return [Variant(part, _knobs(part)) for part in parts]


def configure(base: EngineConfig, variants: Sequence[Variant]) -> dict[str, EngineConfig]:
    """The settings of each variant, by its name; what it does not name is as in `base`.

    Raises ConfigError where settings do not go together, LlmschedError for two variants that are the same.
    """
    configs: dict[str, EngineConfig] = {}
    for variant in variants:
        config = replace(base, **variant.knobs)
        same = next((name for name, other in configs.items() if other == config), None)
        if same is not None or variant.name in configs:
            raise LlmschedError(f"--compare: {(same or variant.name)!r} and {variant.name!r} are the same settings")
        configs[variant.name] = config
    return configs


def check_given(variants: Sequence[Variant], given: Mapping[str, Any]) -> None:
    """Raise LlmschedError for a flag that no variant would leave in force."""
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
            name, value = "scheduling_policy", _policy(word)
        if name == "seed":
            raise LlmschedError("--compare: requests are greedy, so a seed of the engine changes nothing; leave it out")
        if name in knobs:
            raise LlmschedError(f"--compare {part!r}: {name} is set twice")
        knobs[name] = knob_value(name, value)
    check_together(knobs)
    return knobs


def _policy(word: str) -> str:
    known = get_args(Policy)
    policy = _ALSO_CALLED.get(word, word)
    if policy not in known:
        names = ", ".join((*known, *_ALSO_CALLED))
        raise LlmschedError(f"--compare: {word!r} is no scheduling policy ({names}) and no NAME=VALUE")
    return policy
