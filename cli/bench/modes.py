"""The flags for more than one run: a comparison, or the search of the knee."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from llmsched.cli.bench.compare.variants import SYNTAX
from llmsched.cli.options.flags import typed, with_options
from llmsched.cli.values import fraction
from llmsched.engine.errors import LlmschedError

R = TypeVar("R")

_COMPARE = "Comparison"
_KNEE = "Knee"


@dataclass(frozen=True, slots=True)
class Modes:
    """The flags as given; None for what was left out. Raises LlmschedError for those that do not go together."""

    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="VARIANTS",
            show_default=False,
            help="Do the same work under two or more settings, in turn, and print the ratios to the first: variants "
            f"with commas between them, each {SYNTAX}. continuous is another name for fair.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            show_default="2",
            help="How often each variant runs; every round has other requests, the same for all.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    find_knee: Annotated[
        bool,
        typer.Option(
            "--find-knee",
            help="Find the highest rate at which 90 % of requests meet every SLO. Without an SLO: TTFT and TPOT within "
            "5 times those of an idle target. Begins at --request-rate, or at half of what the target does at most.",
            rich_help_panel=_KNEE,
        ),
    ] = False
    max_request_rate: Annotated[
        float | None,
        typer.Option(
            "--max-request-rate",
            metavar="PER_SECOND",
            show_default="4 times what the target does at most",
            help="Highest rate to try; --request-rate is then the lowest.",
            rich_help_panel=_KNEE,
        ),
    ] = None
    knee_attainment: Annotated[
        float | None,
        typer.Option(
            "--knee-attainment",
            parser=typed(fraction),
            metavar="SHARE",
            show_default="90%",
            help="Share of requests that must meet every SLO.",
            rich_help_panel=_KNEE,
        ),
    ] = None
    knee_tolerance: Annotated[
        float | None,
        typer.Option(
            "--knee-tolerance",
            parser=typed(fraction),
            metavar="SHARE",
            show_default="10%",
            help="How far apart the rates around the knee may be.",
            rich_help_panel=_KNEE,
        ),
    ] = None

    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check",
            help="Measure a built-in server whose times are known, and tell whether this machine measures right.",
        ),
    ] = False

    @property
    def one_run(self) -> bool:
        """Whether the load is sent once, and nothing else."""
        return self.compare is None and not self.find_knee and not self.self_check

    def __post_init__(self) -> None:
        if self.self_check and (self.compare is not None or self.find_knee):
            raise LlmschedError(
                "--self-check measures the bench itself; it goes with neither --compare nor --find-knee"
            )
        if self.compare is not None and self.find_knee:
            raise LlmschedError("--compare and --find-knee do not go together: run one after the other")
        if self.compare is None and self.rounds is not None:
            raise LlmschedError("--rounds: only of use with --compare")
        needing = ("max_request_rate", "knee_attainment", "knee_tolerance")
        given = [name for name in needing if getattr(self, name) is not None]
        if given and not self.find_knee:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise LlmschedError(f"{names}: only of use with --find-knee")


def with_mode_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a Typer command these options; it takes a keyword `modes: Modes` in their place."""
    return with_options("modes", Modes)(command)
