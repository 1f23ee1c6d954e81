"""Typer app of all commands. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from llmsched.cli import render
from llmsched.cli.options.flags import flag
from llmsched.engine.device import prepare_environment
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.toml_files import ProfileError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    module: str
    function: str
    summary: str


COMMANDS = {
    name: CommandEntry(f"llmsched.cli.{module}", name.replace("-", "_"), summary)
    for name, module, summary in (
        ("serve", "serve.command", "Serve a model over an OpenAI-compatible HTTP API."),
        ("bench", "bench.command", "Send a load to a server or a model and measure latency."),
        ("kv-budget", "kv_budget.command", "Work out KV memory and max_num_seqs; needs no GPU."),
        ("tune", "tune.command", "Find the settings that meet your latency targets."),
        ("workload", "workload.command", "Analyse a trace and recommend settings for it."),
        ("calibrate", "calibrate", "Measure how long steps take here, for bench --simulate local."),
        ("profiles", "profiles.command", "List, show and compare profiles written by tune."),
        ("chat", "chat", "Chat with a model, or with the model of a running server."),
        ("top", "top", "Watch the live figures of a running server."),
        ("explain", "explain", "Show how the time of one request was spent."),
        ("doctor", "doctor.command", "Say what is wrong with a server or a run, and what to change."),
        ("verify", "verify", "Compare the engine with plain transformers on your own model."),
    )
}

#: Maximum number of characters shown of a wrong value.
_SHOWN = 80
#: Allowed values of a number, by the type of pydantic's error.
_ALLOWED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_parsing": "a number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
}

HELP = """Serve a language model from one GPU, or from the CPU.

MODEL is a Hugging Face directory, a hub id, a .gguf file, or demo (a small chat model, fetched once).
If MODEL is not given, LLMSCHED_MODEL names it; the default is demo.
"""

EPILOG = """\b
Examples:
  llmsched serve demo
  llmsched chat demo
  llmsched top http://localhost:8000
  llmsched bench http://localhost:8000 --request-rate 4 --num-prompts 200
  llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --max-model-len 8192
  llmsched tune demo --slo-ttft 800ms --slo-itl 50ms
  llmsched workload requests.jsonl
  llmsched calibrate demo
  llmsched doctor
  llmsched verify demo

llmsched COMMAND --help explains a command and its options.
"""


class LazyGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=entry.summary) for name, entry in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def load(name: str) -> Any:
    entry = COMMANDS[name]
    found = getattr(importlib.import_module(entry.module), entry.function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(found)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    epilog=EPILOG,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        render.say(f"llmsched {version('llmsched')}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line.

    Exit codes: 0 for success, 1 for a negative result or a closed pipe (`| head`), 2 for bad input or output that
    cannot be written, 130 for an interrupt.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it (`>&-`): discard the output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open until exit
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
    prepare_environment()
    if os.getpid() == 1:  # in a container; the kernel discards signals for which process 1 has no handler
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except LlmschedError as problem:
        render.error(problem.text(flag))
        sys.exit(2)
    except ProfileError as problem:
        render.error(str(problem))
        sys.exit(2)
    except typer.TyperException as problem:
        render.error(_usage(problem))
        sys.exit(problem.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as problem:
        _drop_output()
        render.error(str(problem))
        sys.exit(2)


def _drop_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            render.discard(stream)


def _usage(problem: typer.TyperException) -> str:
    """Return Typer's error message. For an invalid number, name the value and the allowed range instead."""
    text = problem.format_message()
    errors: list[dict[str, Any]] = getattr(problem.__cause__, "errors", list)()
    if not errors:
        return text
    option, _, reason = text.partition(": ")
    wanted = _ALLOWED.get(errors[0]["type"])
    if wanted is None:
        return f"{option}: {reason.removeprefix('Value error, ')}"
    descriptor = getattr(getattr(problem, "param", None), "type_descriptor", None)
    low, high = (getattr(descriptor and descriptor.parameter_info, name, None) for name in ("min", "max"))
    if low is not None and high is not None:
        wanted = f"{low} to {high}"
    return f"{option}: {str(errors[0]['input'])[:_SHOWN]!r}; allowed is {wanted.format(**errors[0].get('ctx', {}))}"
