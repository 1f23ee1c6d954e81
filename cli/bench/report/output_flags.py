from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.csv_report import append_csv, check_csv
from llmsched.cli.bench.report.detailed_file import detailed_lines
from llmsched.cli.bench.report.report_content import Result, result_page, show
from llmsched.cli.bench.report.run_against import TOLERANCE, against_content, check_comparable, compare_runs
from llmsched.cli.bench.report.saved_report import read_report
from llmsched.cli.load.load import Load
from llmsched.cli.options.flags import typed
from llmsched.cli.output_files import check_file, writing
from llmsched.cli.quantities import fraction
from llmsched.engine.errors import LlmschedError


@dataclass(frozen=True, slots=True)
class OutputFlags:
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the JSON report to FILE as well."),
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append a row of figures to FILE for each run."),
    ] = None
    save_detailed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every request to FILE as a line of JSON: its times, tokens, gaps, failure and, if the target "
            "reports them, the scheduler's decisions. `llmsched explain ID --file FILE` shows its timeline.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write an HTML page with tables and charts that opens offline: latency over time, distributions, "
            "requests, memory, and with --find-knee latency by request rate.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the figures with those of a run of the same load that --save has written. The exit code is 1 "
            "if one is worse: if its 95 % confidence interval lies beyond that of the saved run by more than "
            "--tolerance.",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        typer.Option(
            parser=typed(fraction),
            metavar="SHARE",
            show_default=f"{TOLERANCE:.0%}",
            help="With --against: a gap between the intervals of up to this share of the saved interval's bound "
            "counts as no difference.",
        ),
    ] = None
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Print at the end what the figures mean, which --json always states.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def check(self, modes: ModeFlags, read: Path | None) -> None:
        """Raise LlmschedError for contradicting flags and for output files that cannot be written.

        Output must not overwrite `read`, the input file.
        """
        for flag, path in (("--save-detailed", self.save_detailed), ("--against", self.against)):
            if path is not None and not modes.one_run:
                raise LlmschedError(
                    f"{flag} works only with a single run; drop it, or drop --find-knee/--compare/--self-check"
                )
        if self.tolerance is not None and (self.against is None or not 0 <= self.tolerance <= 1):
            raise LlmschedError(
                f"--tolerance {self.tolerance:g}: must be a share from 0 to 1, given with --against FILE"
            )
        if modes.self_check and (self.csv or self.report):
            raise LlmschedError("--csv and --report do not apply to --self-check; use --save or --json")
        files = self._files()
        if len({path.resolve() for path in files.values()}) < len(files):
            raise LlmschedError(f"{', '.join('--' + flag for flag in files)}: two of these flags name the same file")
        for flag, path in files.items():
            check_file(f"--{flag}", path, read)
            if self.against is not None and path.resolve() == self.against.resolve():
                raise LlmschedError(f"--{flag} {path}: is the file of --against; name another file")
        if self.csv is not None:
            check_csv(self.csv)

    def earlier(self, workload: Load, *, measured: bool) -> Mapping[str, Any] | None:
        """Return the report of --against. Raises LlmschedError if this run cannot be compared with it."""
        if self.against is None:
            return None
        report = read_report("--against", self.against)
        check_comparable(report, workload, measured)
        return report

    def give_out(self, result: Result, earlier: Mapping[str, Any] | None = None) -> bool:
        """Print the report and write the files. Return False if a figure is worse than in the report `earlier`.

        Raises LlmschedError if a file cannot be written.
        """
        compared = None
        if earlier is not None and result.run is not None and result.run.figures.requests.completed:
            compared = compare_runs(earlier, result.report, TOLERANCE if self.tolerance is None else self.tolerance)
        if self.as_json:
            both = {} if compared is None else {"against": [one._asdict() for one in compared]}
            render.emit_json({**result.report, **both})
        else:
            show(result.content, definitions=self.definitions)
            if compared is not None and earlier is not None:
                show(against_content(earlier, compared))
        self._write(result)
        return compared is None or all(one.verdict != "worse" for one in compared)

    def _write(self, result: Result) -> None:
        for flag, path in self._files().items():
            with writing(f"--{flag}", path):
                if flag == "csv":
                    append_csv(path, result.rows)
                elif flag == "save-detailed":
                    assert result.run is not None
                    with path.open("w", encoding="utf-8") as file:
                        file.writelines(detailed_lines(result.report, result.run))
                elif flag == "report":
                    path.write_text(result_page(result), encoding="utf-8")
                else:
                    path.write_text(json.dumps(result.report, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def _files(self) -> dict[str, Path]:
        files = {"save": self.save, "csv": self.csv, "save-detailed": self.save_detailed, "report": self.report}
        return {flag: path for flag, path in files.items() if path is not None}
