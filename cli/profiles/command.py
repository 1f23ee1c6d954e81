from __future__ import annotations

from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.profiles import profile_views
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.tuned import profile_dir

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
            raise LlmschedError(f"put --json after {context.invoked_subcommand}")
        return
    found = profile_views.list_entries()
    if as_json:
        render.emit_json({"directory": str(profile_dir()), "profiles": found})
    else:
        profile_views.show_entries(found)


@profiles.command("show")
def _show(
    name: Annotated[
        str, typer.Argument(metavar="NAME|PATH", help="Name or path of a profile, or name of a calibration.")
    ],
    as_json: Json = False,
) -> None:
    """Show a calibration, or a profile: its settings, all trials, and the load, model and device of the trials."""
    found = profile_views.load_content(name)
    if as_json:
        render.emit_json(found)
    else:
        profile_views.show_content(name, found)


@profiles.command("diff")
def _diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Name or path of a profile.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Name or path of another profile.")],
    as_json: Json = False,
) -> None:
    """Compare two profiles: settings, SLOs, load, model, device, versions and results."""
    found = profile_views.compare_profiles(first, second)
    if as_json:
        render.emit_json(found)
    else:
        profile_views.show_differences(first, second, found)
