"""Parameter types that commands share, and engine flags generated from EngineConfig.

Quantities are written with their unit ("800ms", "24GiB", "90%") and arrive in base units (seconds, bytes, a fraction).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from llmsched.cli import render
from llmsched.engine.architecture.quantization import QUANTIZATIONS
from llmsched.engine.config import EngineConfig, check_knob, check_together
from llmsched.engine.errors import ConfigError

R = TypeVar("R")
F = TypeVar("F")

#: The MODEL argument of every command; give it the default None and pass it to resolve_model.
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Hugging Face directory, hub id, .gguf file, or demo (a small chat model, fetched once).  "
        "[default: LLMSCHED_MODEL, else demo]",
    ),
]

#: The most tokens a prompt or an answer may have: more is a slip of the keyboard, and would fill the memory.
MOST_TOKENS = 1 << 24

#: What a flag is set to that shall be chosen as if it, and a profile's value for it, were left out.
AUTO = "auto"

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
#: The knobs that steps and a plan of memory depend on, whatever the scheduler does.
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
)
#: What lies outside is a slip of the keyboard, and would leave what a float or a chart can tell.
_SHORTEST_S, _LONGEST_S = 1e-9, 9e8
_MOST_BYTES = 1 << 60
_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
#: Knobs whose flag takes auto for None.
_CHOSEN = frozenset({"max_model_len"})
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


def duration(text: str | float) -> float:
    """Seconds of "800ms", "1.5s", "2min" or "1h", 0 or 1ns to 30 years. A plain number is refused: its unit would be a
    guess.
    """
    if not isinstance(text, str):
        return text
    number, unit = _split(text, "a duration such as 800ms or 1.5s")
    if unit not in _SECONDS:
        raise typer.BadParameter(f"{text!r} needs a unit: us, ms, s, min or h (800ms, 1.5s)")
    if number < 0:
        raise typer.BadParameter(f"{text!r} is negative; a duration is 0 or more")
    seconds = number * _SECONDS[unit]
    if seconds and not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is no duration that can be meant; allowed is 0, or 0.001us to 250000h")
    return seconds


def quantization_option(doing: str) -> typer.models.OptionInfo:
    """--quantization of a command that does so much with a checkpoint that need not exist."""
    option: typer.models.OptionInfo = typer.Option(
        "--quantization",
        metavar="|".join(QUANTIZATIONS),
        show_default=False,
        help=f"{doing} of MODEL with its weights in this form; fp8_block has a scale for each 128 x 128 of them.",
    )
    return option


def size(text: str | int) -> int:
    """Bytes of "24GiB" (1024^3), "24GB" (1000^3), "512MiB" or, where written as a plain whole number, of itself.

    A plain number below one MiB is refused: it is a size whose unit was forgotten.
    """
    if not isinstance(text, str):
        return text
    number, unit = _split(text, "a size such as 24GiB or 512MiB")
    known = {name.lower(): factor for name, factor in _BYTES.items()}
    if number <= 0:
        raise typer.BadParameter(f"{text!r} is not above zero; write a size such as 24GiB")
    if unit.lower() not in known and not (not unit and number.is_integer() and number >= 1 << 20):
        raise typer.BadParameter(f"{text!r} needs a unit: GiB (1024^3 bytes) or GB (1000^3 bytes), likewise K, M, T")
    count = number * known.get(unit.lower(), 1)
    if not 1 <= count <= _MOST_BYTES:
        raise typer.BadParameter(f"{text!r} is no size that can be meant; allowed is 1B to {_MOST_BYTES >> 40}TiB")
    return int(count)


def size_or_none(text: str | int) -> int:
    """A size, or 0 for none of it."""
    return 0 if text == "0" else size(text)


def tokens(text: str | int) -> int:
    """Tokens of "8192" or "8k" (k is 1024, as in the names of models: 8k is 8192, 128k is 131072)."""
    if not isinstance(text, str):
        return text
    number, unit = _split(text, "a number of tokens such as 8192 or 8k")
    count = number * {"": 1, "k": 1024, "m": 1024**2}.get(unit.lower(), math.nan)
    if not 1 <= count <= MOST_TOKENS or not count.is_integer():
        raise typer.BadParameter(
            f"{text!r} is not a whole number of tokens from 1 to {MOST_TOKENS}, such as 8192 or 8k (8 x 1024)"
        )
    return int(count)


def context_length(text: str | int) -> int | str:
    """Tokens, or "auto": what the model and the memory allow."""
    return AUTO if text == AUTO else tokens(text)


def fraction(text: str | float) -> float:
    """A share written as "0.9" or "90%"."""
    if not isinstance(text, str):
        return text
    number, unit = _split(text, "a share such as 0.9 or 90%")
    if unit not in ("", "%"):
        raise typer.BadParameter(f"{text!r} is not a share such as 0.9 or 90%")
    return number / 100 if unit else number


def _split(text: str, wanted: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        raise typer.BadParameter(f"{text!r} is not {wanted}")
    return float(match[1]), match[2]


def flag(name: str) -> str:
    """Return the flag that sets `name`: --max-num-seqs for max_num_seqs. The model is an argument and has none."""
    return name if name == "model" else "--" + name.replace("_", "-")


def resolve_model(argument: str | None) -> str:
    """The model to use: the argument, else LLMSCHED_MODEL, else demo; says which on stderr when it was left out."""
    if argument:
        return argument
    if model := os.environ.get("LLMSCHED_MODEL"):
        render.note(f"model {model} (from LLMSCHED_MODEL)")
        return model
    render.note("model demo (no MODEL given, LLMSCHED_MODEL not set)")
    return "demo"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine flags that were given on the command line; what is not in `given` was left out.

    `automatic` names those that were set to auto: they are chosen whatever a profile says.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    automatic: frozenset[str] = frozenset()

    def config(self, model: str, defaults: Mapping[str, Any] | None = None) -> EngineConfig:
        """Flag, else `defaults` (a profile's), else EngineConfig's default. Raises ConfigError naming the knob."""
        profile = {name: value for name, value in (defaults or {}).items() if name not in self.automatic}
        return EngineConfig(**{**profile, **self.given, "model": model})


def typed_options(context: typer.Context) -> list[str]:
    """The options and arguments that were written on the command line, not left out or from the environment."""
    sources = {option: context.get_parameter_source(option.name or "") for option in context.command.params}
    return [max(option.opts, key=len) for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def with_engine_options(
    exclude: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a Typer command one option per knob of EngineConfig: all but `model` and `exclude`, or just those of `only`.

    The command takes a keyword `engine_options: EngineOptions` in their place.
    """
    types = get_type_hints(EngineConfig)
    wanted = {f.name for f in fields(EngineConfig)} if only is None else set(only)
    knobs = [f for f in fields(EngineConfig) if f.name in wanted - {"model", *exclude}]

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name != "engine_options"]
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag(f, types[f.name]))
            for f in knobs
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> R:
            flags = {f.name: values.pop(f.name, None) for f in knobs}
            automatic = frozenset(name for name in flags if name in _CHOSEN and flags[name] == AUTO)
            given = {name: value for name, value in flags.items() if value is not None and name not in automatic}
            for name, value in given.items():
                check_knob(name, value, EngineConfig.knob_rule(name))
            check_together(given)
            return command(**values, engine_options=EngineOptions(given, automatic))

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def with_options(
    keyword: str,
    flags: type[F],
    make: Callable[[F], Any] = lambda given: given,
    shown: Mapping[str, object] = MappingProxyType({}),
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a Typer command one option per field of the dataclass `flags`, whose annotations hold their typer.Option.

    The command takes a keyword `keyword` in their place: what `make` makes of them. `shown` are the defaults that the
    help states of fields that are None when left out.
    """
    assert is_dataclass(flags)
    types = get_type_hints(flags, include_extras=True)
    options = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default,
            annotation=_showing(types[f.name], shown[f.name]) if f.name in shown else types[f.name],
        )
        for f in fields(flags)
    ]

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name != keyword]
        parameters += options

        @functools.wraps(command)
        def wrapper(**values: Any) -> R:
            given = {option.name: values.pop(option.name) for option in options}
            return command(**values, **{keyword: make(flags(**given))})

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _showing(annotation: Any, default: object) -> Any:
    """The annotation of an option whose help states this default."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.show_default = str(default)
    return Annotated[kind, option]


def _flag(knob: Field[Any], annotation: Any) -> Any:
    """The annotation that makes Typer build the option of a knob; None stands for "not given"."""
    parser, metavar = _parser(knob, annotation)
    option = typer.Option(help=_help(knob), parser=parser, metavar=metavar, show_default=False)
    return Annotated[annotation | None, option]


def _parser(knob: Field[Any], annotation: Any) -> tuple[Callable[[Any], Any] | None, str | None]:
    """What reads the text of a knob and how its help names it; None where Typer knows by the type."""
    rule = knob.metadata
    if knob.name in _CHOSEN:
        return context_length, "TOKENS|auto"
    if rule["unit"] == "bytes":
        return size_or_none if rule["low"] == 0 else size, "SIZE"
    if rule["unit"] == "seconds":
        return duration, "DURATION"
    if annotation is float and _is_share(rule["low"], rule["high"]):
        return fraction, "SHARE"
    return None, None


def knob_value(name: str, text: str) -> Any:
    """The value of a knob as its flag reads `text`; None for auto. Raises ConfigError for what the flag refuses."""
    known = {f.name: f for f in fields(EngineConfig) if f.name != "model"}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)
        raise ConfigError(name, f"is no setting of the engine; settings are {', '.join(near)}")
    annotation = get_type_hints(EngineConfig)[name]
    parser = _parser(known[name], annotation)[0] or _plain_parser(annotation)
    try:
        value = parser(text)
        if value == AUTO and name in _CHOSEN:
            return None
        check_knob(name, value, known[name].metadata)
    except ValueError:
        whole = "a whole number" if int in (annotation, *get_args(annotation)) else "a number"
        raise ConfigError(name, f"{text!r} is not {whole}") from None
    except typer.BadParameter as problem:
        raise ConfigError(name, problem.message) from problem
    return value


def _plain_parser(annotation: Any) -> Callable[[str], Any]:
    if annotation is bool:
        return _switch
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), str)


def _switch(text: str) -> bool:
    words = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise typer.BadParameter(f"{text!r} is neither on nor off")
    return words[text.lower()]


def _is_share(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low >= 0 and high <= 1


def _help(knob: Field[Any]) -> str:
    """The knob's reason, then what it may be and what it is."""
    rule = knob.metadata
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
    return f"{rule['why']}  [{'; '.join(facts)}]" if facts else str(rule["why"])
