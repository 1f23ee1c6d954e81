"""`llmsched profiles`: list, show and compare what `tune` and `calibrate` have written."""

from __future__ import annotations

from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.profiles import differences, listing
from llmsched.cli.profiles import show as one
from llmsched.engine.errors import LlmschedError

profiles = typer.Typer(
    help="""List, show and compare profiles.

    \b
    Examples:
      llmsched profiles
      llmsched profiles show demo
      llmsched profiles diff demo night-shift --json
    """,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@profiles.callback(invoke_without_command=True)
def _list(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        if as_json:
            raise LlmschedError(f"--json belongs behind {context.invoked_subcommand}, whose output it is about")
        return
    found = listing.everything()
    if as_json:
        render.emit_json(listing.as_json(found))
    else:
        listing.show(found)


@profiles.command("show")
def _show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A profile by name or path, or a calibration.")],
    as_json: Json = False,
) -> None:
    """Show one: its settings, what they are good for, and the curve that they were chosen from."""
    found = one.load(name)
    if as_json:
        render.emit_json(found)
    else:
        one.show(name, found)


@profiles.command("diff")
def _diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A profile by name or path.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Compare two: settings, SLOs, load, model, device, versions and what the chosen setting gave."""
    found = differences.between(first, second)
    if as_json:
        render.emit_json(found)
    else:
        differences.show(first, second, found)
