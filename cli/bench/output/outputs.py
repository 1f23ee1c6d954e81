"""Where the results of a bench go: the files that were asked for, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from llmsched.cli import render
from llmsched.cli.bench.modes import Modes
from llmsched.cli.bench.output.csv_file import append_csv, check_csv
from llmsched.cli.bench.output.detailed import detailed_lines
from llmsched.cli.bench.output.run_page import result_page
from llmsched.cli.bench.result import Result
from llmsched.cli.options.flags import with_options
from llmsched.cli.output_files import check_file, writing
from llmsched.engine.errors import LlmschedError

R = TypeVar("R")

_OUTPUT = "Output"


@dataclass(frozen=True, slots=True)
class Outputs:
    """The flags that say where results go."""

    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the JSON report to FILE as well.", rich_help_panel=_OUTPUT),
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Add a row of figures to FILE for each run.", rich_help_panel=_OUTPUT
        ),
    ] = None
    save_detailed: Annotated[
        Path | None,
        typer.Option(
            "--save-detailed",
            metavar="FILE",
            help="Write every request to FILE as a line of JSON: its times, tokens, gaps, failure and, of a model in "
            "this process, the scheduler's decisions. `llmsched explain ID --file FILE` tells its story.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write a page with tables and charts that opens offline: latency over time, distributions, requests, "
            "memory, and with --find-knee rate against latency.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)] = False

    def check(self, modes: Modes, read: Path | None) -> None:
        """Raise LlmschedError, before the work and not after it, for a file that a mode has nothing for, that cannot
        be written, or that is the one to `read`.
        """
        if self.save_detailed is not None and not modes.one_run:
            raise LlmschedError("--save-detailed is of one run of a load; leave it out, or the flag of the other mode")
        if modes.self_check and (self.csv or self.report):
            raise LlmschedError("--csv and --report are of the run of a load; --self-check has --save and --json")
        files = self._files()
        if len({path.resolve() for path in files.values()}) < len(files):
            raise LlmschedError(f"{', '.join('--' + flag for flag in files)}: two of them name the same file")
        for flag, path in files.items():
            check_file(f"--{flag}", path, read)
        if self.csv is not None:
            check_csv(self.csv)

    def give_out(self, result: Result) -> None:
        """Print the report and write the files. Raises LlmschedError for a file that cannot be written."""
        if self.as_json:
            render.emit_json(result.report)
        else:
            result.show()
        for flag, path in self._files().items():
            with writing(f"--{flag}", path):
                self._write(flag, path, result)

    def _files(self) -> dict[str, Path]:
        """The files that were asked for, by their flags."""
        files = {"save": self.save, "csv": self.csv, "save-detailed": self.save_detailed, "report": self.report}
        return {flag: path for flag, path in files.items() if path is not None}

    def _write(self, flag: str, path: Path, result: Result) -> None:
        if flag == "csv":
            append_csv(path, result.rows)
        elif flag == "save-detailed":
            assert result.run is not None
            experiment, figures = result.run
            with path.open("w", encoding="utf-8") as file:
                file.writelines(detailed_lines(result.report, experiment.slo, figures))
        elif flag == "report":
            path.write_text(result_page(result), encoding="utf-8")
        else:
            path.write_text(json.dumps(result.report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def with_output_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a Typer command these options; it takes a keyword `outputs: Outputs` in their place."""
    return with_options("outputs", Outputs)(command)
