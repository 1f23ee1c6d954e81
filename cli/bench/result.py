"""What a mode of the bench hands back to be printed, saved and turned into an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmsched.cli.bench.output.tables import Table
from llmsched.cli.chart import Chart
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement


class Measured(NamedTuple):
    """One run: what was measured, and its figures."""

    experiment: Experiment
    figures: Measurement


@dataclass(frozen=True, slots=True)
class Result:
    """The report as JSON, how to `show` it to a person, and whether all went `well` (else exit code 1).

    `rows` are the reports of the single runs, for a table of them. `run` is the one to be shown in detail, if there is
    one; `notes`, `tables` and `charts` are what a page has before it.
    """

    report: Mapping[str, Any]
    show: Callable[[], None]
    well: bool
    rows: Sequence[Mapping[str, Any]]
    run: Measured | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
