"""Flags of the engine: one per knob (setting) of EngineConfig."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from llmsched.cli import render
from llmsched.cli.options.flags import flag, option_parameter, replace_keyword, typed
from llmsched.cli.quantities import AUTO, context_length, duration, fraction, size, size_or_zero, switch
from llmsched.engine.config import EngineConfig, check_knob, check_together
from llmsched.engine.errors import ConfigError, LlmschedError

R = TypeVar("R")

#: Knobs that affect the memory plan or the time of a step. Knobs of scheduling policies are not included.
MEMORY_KNOBS = (
    "dtype",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "expert_offload",
)
#: Knobs of speculative decoding, which cannot be simulated.
DRAFT_KNOBS = ("speculative", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
#: Knobs whose flag accepts AUTO, which stands for None.
_TAKES_AUTO = frozenset({"max_model_len"})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    given: Mapping[str, Any] = field(default_factory=dict)  # values by knob
    automatic: frozenset[str] = frozenset()  # knobs given as "auto", which a profile does not change

    def config(self, model: str, defaults: Mapping[str, Any] | None = None) -> EngineConfig:
        """Return the config for `model`. Knobs without a flag come from `defaults`. Raises ConfigError."""
        profile = {name: value for name, value in (defaults or {}).items() if name not in self.automatic}
        config = EngineConfig(**{**profile, **self.given, "model": model})
        check_together({**self.given, "speculative": config.speculative})
        return config


def with_engine_options(
    exclude: Collection[str] = (),
    only: Collection[str] | None = None,
    uses: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that gives a Typer command an option per knob, and passes the values as `engine_options`.

    `uses` maps a knob to what the command does with it, which follows the knob's own help text.
    """
    types = get_type_hints(EngineConfig)
    wanted = {f.name for f in fields(EngineConfig)} if only is None else set(only)
    knobs = [f for f in fields(EngineConfig) if f.name in wanted - {"model", *exclude}]
    options = []
    for knob in knobs:
        parse, metavar = _parser(knob, types[knob.name])
        parser = None if parse is None else typed(parse)
        kind: Any = list[str] if _is_list(types[knob.name]) else types[knob.name]
        option = typer.Option(help=_help(knob, uses.get(knob.name)), parser=parser, metavar=metavar, show_default=False)
        # The default None means "not given".
        options.append(option_parameter(knob.name, Annotated[kind | None, option]))
    return replace_keyword("engine_options", options, _options)


def refuse_engine_options(engine_options: EngineOptions) -> None:
    """Raise LlmschedError if a flag of the engine was given, because the target is a server."""
    if engine_options.given:
        names = ", ".join(map(flag, engine_options.given))
        raise LlmschedError(f"{names}: the settings of a running server cannot be changed from here")


def serve_command(model: str | None, knobs: Mapping[str, Any]) -> str:
    """Return the shell command that serves `model` (None: the default model) with these settings."""
    words = ["llmsched", "serve", *([] if model is None else [model])]
    for name, value in knobs.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, tuple):
            words += [word for each in value for word in (flag(name), each)]
        elif value is not None:
            words += [flag(name), str(value)]
    return shlex.join(words)


def _options(flags: Mapping[str, Any]) -> EngineOptions:
    automatic = frozenset(name for name in flags if name in _TAKES_AUTO and flags[name] == AUTO)
    given = {name: value for name, value in flags.items() if value is not None and name not in automatic}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    for name, value in given.items():
        check_knob(name, value, EngineConfig.knob_rule(name))
    check_together(given)
    return EngineOptions(given, automatic)


def _parser(knob: Field[Any], annotation: Any) -> tuple[Callable[[str], Any] | None, str | None]:
    low, high, unit = knob.metadata["low"], knob.metadata["high"], knob.metadata["unit"]
    if knob.name in _TAKES_AUTO:
        return context_length, "TOKENS|auto"
    if _is_list(annotation):
        return None, "NAME=DIR"
    if unit == "bytes":
        return size_or_zero if low == 0 else size, "SIZE"
    if unit == "seconds":
        return duration, "DURATION"
    if annotation is float and low is not None and low >= 0 and high is not None and high <= 1:
        return fraction, "SHARE"
    return None, None


def knob_value(name: str, text: str) -> Any:
    """Parse `text` as the flag of the knob `name` does; "auto" gives None. Raises ConfigError."""
    known = {f.name: f for f in fields(EngineConfig) if f.name != "model"}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the settings are {', '.join(sorted(known))}"
        raise ConfigError(name, f"is not an engine setting; {hint}")
    annotation = get_type_hints(EngineConfig)[name]
    if _is_list(annotation):
        return (text,)
    parse = _parser(known[name], annotation)[0]
    if parse is None and annotation is bool:
        parse = switch
    elif parse is None:
        parse = next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), str)
    try:
        value = parse(text)
    except ValueError:
        whole = "a whole number" if int in (annotation, *get_args(annotation)) else "a number"
        raise ConfigError(name, f"{text!r} is not {whole}") from None
    except LlmschedError as problem:
        raise ConfigError(name, problem.message) from problem
    if value == AUTO and name in _TAKES_AUTO:
        return None
    check_knob(name, value, known[name].metadata)
    return value


def _is_list(annotation: Any) -> bool:
    return any(get_origin(each) is tuple for each in get_args(annotation))


def _help(knob: Field[Any], use: str | None) -> str:
    rule = knob.metadata
    why = str(rule["why"]) if use is None else f"{rule['why']}; {use}"
    low, high = rule["low"], rule["high"]
    facts = []
    if high is not None and rule["unit"] == "bytes":
        facts.append(f"{low} to {render.human_bytes(high)}")
    elif high is not None:
        facts.append(f"{low} to {high} {rule['unit']}".strip())
    elif low is not None:
        facts.append(f"{low} or more {rule['unit']}".strip())
    if isinstance(knob.default, bool):
        facts.append(f"default: {'on' if knob.default else 'off'}")
    elif knob.default is not None:
        facts.append(f"default: {knob.default}")
    return f"{why}  [{'; '.join(facts)}]" if facts else why
