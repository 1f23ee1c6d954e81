"""The Typer app: registers the commands and nothing else. A command's module is imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
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
from llmsched.engine.errors import LlmschedError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives: `function` of `module`, or an app with commands of its own; `summary` is for the help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "serve": Entry("llmsched.cli.serve.command", "serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "bench": Entry("llmsched.cli.bench.command", "bench", "Load a server or a model and measure latency and goodput."),
    "kv-budget": Entry(
        "llmsched.cli.kv_budget.command", "kv_budget", "Work out KV memory and max_num_seqs; needs no GPU."
    ),
    "tune": Entry("llmsched.cli.tune.command", "tune", "Find the token budget that meets your latency targets."),
    "workload": Entry(
        "llmsched.cli.workload.command", "workload", "Analyse a trace: lengths, arrivals, shared prefixes, settings."
    ),
    "calibrate": Entry(
        "llmsched.cli.calibrate", "calibrate", "Measure what steps cost here, for bench --simulate local."
    ),
    "profiles": Entry("llmsched.cli.profiles.command", "profiles", "List, show and compare what tune has written."),
    "explain": Entry("llmsched.cli.explain", "explain", "Tell where the time of one request went."),
    "verify": Entry("llmsched.cli.verify", "verify", "Compare the engine with plain transformers on your own model."),
}

#: Characters of a wrong value that are shown.
_SHOWN = 80
#: What pydantic's errors about a number say is allowed.
_ALLOWED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_parsing": "a number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
}

HELP = """Serve a language model well from one GPU, or without one from the CPU.

MODEL is a Hugging Face directory, a hub id, a .gguf file, or demo (a small real chat model, fetched once).
Where it is left out it comes from LLMSCHED_MODEL, else it is demo.
"""

EPILOG = """\b
Examples:
  llmsched serve demo
  llmsched bench http://localhost:8000 --request-rate 4 --num-prompts 200
  llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --max-model-len 8192
  llmsched tune demo --slo-ttft 800ms --slo-itl 50ms
  llmsched workload requests.jsonl
  llmsched calibrate demo
  llmsched verify demo

llmsched COMMAND --help explains a command and its options.
"""


class LazyGroup(TyperGroup):
    """Lists the commands by their summaries and imports only the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=entry.summary) for name, entry in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def load(name: str) -> Any:
    """Import the command `name` and build it."""
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
    """Console entry. Exit codes: 0 done, 1 the answer is no, 2 bad input (one line on stderr), 130 interrupted.

    Where nobody reads the output any more (`| head`) the code is 1, as is usual; where it cannot be written, 2.
    """
    _open_streams()
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except LlmschedError as problem:
        render.error(problem.text(flag))
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


def _open_streams() -> None:
    """A stream that the caller has closed (`>&-`) is None, which nothing can write to; it becomes one to nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it is open as long as the process runs


def _drop_output() -> None:
    """Let what is still buffered go nowhere, for the interpreter writes it when it ends, and would fail again."""
    with contextlib.suppress(OSError):  # a stdout without a file number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(problem: typer.TyperException) -> str:
    """Typer's text, in our words and with the value where it is pydantic's about a number."""
    text = problem.format_message()
    errors: list[dict[str, Any]] = getattr(problem.__cause__, "errors", list)()
    if not errors:
        return text
    flag, _, reason = text.partition(": ")
    wanted = _ALLOWED.get(errors[0]["type"])
    if wanted is None:
        return f"{flag}: {reason.removeprefix('Value error, ')}"
    return f"{flag}: {str(errors[0]['input'])[:_SHOWN]!r}; allowed is {wanted.format(**errors[0].get('ctx', {}))}"
