from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.csv_report import append_csv, check_csv
from llmsched.cli.bench.report.detailed_file import detailed_lines
from llmsched.cli.bench.report.report_content import Result, result_page, show
from llmsched.cli.output_files import check_file, writing
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
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Print at the end what the figures mean, which --json always states.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def check(self, modes: ModeFlags, read: Path | None) -> None:
        """Raise LlmschedError for contradicting flags and for output files that cannot be written.

        Output must not overwrite `read`, the input file.
        """
        if self.save_detailed is not None and not modes.one_run:
            raise LlmschedError(
                "--save-detailed works only with a single run; drop it, or drop --find-knee/--compare/--self-check"
            )
        if modes.self_check and (self.csv or self.report):
            raise LlmschedError("--csv and --report do not apply to --self-check; use --save or --json")
        files = self._files()
        if len({path.resolve() for path in files.values()}) < len(files):
            raise LlmschedError(f"{', '.join('--' + flag for flag in files)}: two of these flags name the same file")
        for flag, path in files.items():
            check_file(f"--{flag}", path, read)
        if self.csv is not None:
            check_csv(self.csv)

    def give_out(self, result: Result) -> None:
        """Print the report and write the files. Raises LlmschedError if a file cannot be written."""
        if self.as_json:
            render.emit_json(result.report)
        else:
            show(result.content, definitions=self.definitions)
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
