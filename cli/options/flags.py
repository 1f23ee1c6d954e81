from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from llmsched.cli import render
from llmsched.cli.quantities import duration
from llmsched.engine.architecture.online_formats import ONLINE_FORMATS
from llmsched.engine.architecture.quantization import QUANTIZATIONS
from llmsched.engine.errors import LlmschedError

R = TypeVar("R")
F = TypeVar("F")
V = TypeVar("V")

_DURATION = "DURATION"

#: The MODEL argument of every command. Give it the default None and pass it to `resolve_model`.
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Hugging Face directory, hub id, .gguf file, or demo (a small chat model, fetched once).  "
        "[default: LLMSCHED_MODEL, else demo]",
    ),
]


def resolve_model(argument: str | None) -> str:
    """Return `argument`. If it is None, choose $LLMSCHED_MODEL or "demo", and print the choice on stderr."""
    if argument:
        return argument
    if model := os.environ.get("LLMSCHED_MODEL"):
        render.note(f"model {model} (from LLMSCHED_MODEL)")
        return model
    render.note("model demo (no MODEL given, LLMSCHED_MODEL not set)")
    return "demo"


def duration_option(help: str, **settings: Any) -> Any:
    """Return an option for a duration such as 800ms, which the command receives in seconds."""
    return typer.Option(parser=typed(duration), metavar=_DURATION, help=help, **settings)


def quantization_option(rounding: str, of_checkpoint: str) -> Any:
    """Return the option --quantization. Its help has a phrase for rounded weights and one for a checkpoint."""
    return typer.Option(
        metavar="|".join(QUANTIZATIONS),
        show_default=False,
        help=f"{rounding}: {', '.join(ONLINE_FORMATS)}. {of_checkpoint} a checkpoint of "
        "MODEL in this format, which need not exist. fp8_block has one scale per block of 128 x 128 weights.",
    )


def simulate_option(doing: str) -> Any:
    """Return the option --simulate. Its help begins with the phrase `doing`."""
    return typer.Option(
        metavar="GPU[:ENGINE]|local",
        show_default=False,
        help=f"{doing} on a virtual clock, without the hardware: on this GPU (l4, h100, ...), on it with another "
        "engine's speed (h100:vllm), or on this machine (local, after `llmsched calibrate`). Only MODEL's config.json "
        "is needed.",
    )


def flag(name: str) -> str:
    """Return the flag of a parameter, such as --max-num-seqs. The argument "model" is returned unchanged."""
    return name if name == "model" else "--" + name.replace("_", "-")


def typed_options(context: typer.Context) -> list[str]:
    """Return the names of options and arguments given on the command line, not by defaults or the environment."""
    sources = {option: context.get_parameter_source(option.name or "") for option in context.command.params}
    return [max(option.opts, key=len) for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def typed(parse: Callable[[str], V]) -> Callable[[str | V], V]:
    """Wrap `parse` for a Typer option, so that errors name the flag. Values that are not text pass unchanged."""

    @functools.wraps(parse)
    def parser(value: str | V) -> V:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except LlmschedError as problem:
            raise typer.BadParameter(str(problem)) from problem

    return parser


def with_options(
    keyword: str,
    flags: type[F],
    make: Callable[[F], Any] = lambda given: given,
    shown: Mapping[str, object] = MappingProxyType({}),
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that gives a Typer command an option per field of the dataclass `flags`.

    The annotation of a field holds its typer.Option. The command receives the result of `make` as its argument
    `keyword`. `shown` maps fields whose default is None to the default that the help states.
    """
    assert is_dataclass(flags)
    types = get_type_hints(flags, include_extras=True)
    for f in fields(flags):
        kind, option = get_args(types[f.name])
        option = copy(option)
        if f.name in shown:
            option.show_default = str(shown[f.name])
        elif option.metavar == _DURATION and isinstance(f.default, float) and option.show_default is True:
            option.show_default = False
            option.help += f"  [default: {f.default:g}s]"
        types[f.name] = Annotated[kind, option]
    options = [option_parameter(f.name, types[f.name], f.default) for f in fields(flags)]
    return replace_keyword(keyword, options, lambda values: make(flags(**values)))


def option_parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def replace_keyword(
    keyword: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that gives a Typer command `options` in place of its parameter `keyword`.

    `make` computes the argument `keyword` from the options' values.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name != keyword]
        parameters += options

        @functools.wraps(command)
        def wrapper(**values: Any) -> R:
            given = {option.name: values.pop(option.name, option.default) for option in options}
            return command(**values, **{keyword: make(given)})

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate
