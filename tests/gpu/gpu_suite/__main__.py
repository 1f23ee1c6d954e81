"""Entry point: run each part in its own process, print one table and write one JSON file. See tests/gpu/run.sh."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_suite.machine import describe, guarded
from gpu_suite.part import PARTS, SuitePart

Result = dict[str, Any]


USAGE = "usage: tests/gpu/run.sh [--dry-run] [--parts NAME,NAME] [RESULT.json]"


def main() -> int:
    """Return 0 if all checks passed or there is no GPU, 1 if a check failed, 2 for wrong arguments."""
    arguments = argparse.ArgumentParser(usage=USAGE.removeprefix("usage: "), add_help=False)
    arguments.add_argument("--dry-run", action="store_true")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("result", nargs="?", type=Path)
    given = arguments.parse_args()
    chosen = given.parts.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        arguments.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    machine = describe()
    facts = machine["torch"] if isinstance(machine["torch"], dict) else {}
    if not given.dry_run and not facts.get("gpu"):
        return without_gpu(f"torch {facts['version']} sees none" if facts else f"torch cannot tell: {machine['torch']}")
    target = given.result or (Path(os.environ["OUT"]) / "gpu.json" if "OUT" in os.environ else None)
    started = time.monotonic()
    report: Result = machine | {"dry_run": given.dry_run, "ok": False, "parts": {}}
    for name in chosen:
        report["parts"][name] = run_part(name, PARTS[name], "cpu" if given.dry_run else "cuda")
        report["ok"] = all(part["ok"] for part in report["parts"].values())
        report["seconds"] = round(time.monotonic() - started, 1)
        if target is not None:  # after every part, because the machine may be taken away
            write(target, report)
    show(report)
    if target is not None:
        print(f"written to {target}")
    return 0 if report["ok"] else 1


def write(target: Path, report: Result) -> None:
    unfinished = target.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(target)


def without_gpu(reason: str) -> int:
    """Return 0 if there is no GPU, 1 if the driver lists one that torch cannot use."""
    listed = guarded(
        lambda: subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    )
    if listed.startswith("GPU"):
        print(f"{reason}, but nvidia-smi lists {listed.strip()}", file=sys.stderr)
        return 1
    print(f"no CUDA GPU ({reason}): nothing to check")
    return 0


# -- parts ----------------------------------------------------------------------------------------------------


def run_part(name: str, part: SuitePart, device: str) -> Result:
    """Run a part; return its rows and whether no check failed and it finished within its time."""
    print(f"{part.title} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [sys.executable, "-P", "-m", "gpu_suite.part", name, device, str(rows)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            problem = wait(process, part.budget_s)
        found = list(read_rows(rows))
        if problem is not None:
            problem = f"{problem}: {last_words(log)}"
    ok = problem is None and bool(found) and all(row["ok"] is not False for row in found)
    return {"ok": ok, "seconds": round(time.monotonic() - started, 1), "problem": problem, "rows": found}


def wait(process: subprocess.Popen[bytes], budget_s: float) -> str | None:
    """Wait for the process; return what went wrong with it, if anything."""
    try:
        code = process.wait(budget_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {budget_s:.0f} s"
    return f"ended with exit code {code}" if code else None


def read_rows(file: Path) -> Iterator[Result]:
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the process was killed while writing this line
                return


def last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:] or "it said nothing"


# -- the table ------------------------------------------------------------------------------------------------


def show(report: Result) -> None:
    """Print all measurements and failed checks; print passed checks as one line per group."""
    lines = [("part", "check", "", "found", "expected")]
    for name, part in report["parts"].items():
        rows = summed_up(part["rows"]) if name == "kernels" else part["rows"]
        lines += [(name, row["name"], verdict(row["ok"]), row["found"], row["expected"]) for row in rows]
        if part["problem"]:
            lines.append((name, "ran to its end", "FAILED", part["problem"], ""))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    gpu = report["torch"].get("name", "no GPU") if isinstance(report["torch"], dict) else "unknown GPU"
    versions = ", ".join(f"{key} {report['packages'][key]}" for key in ("torch", "triton", "transformers"))
    print(f"{gpu}, {versions}, {report['date']}{', DRY RUN on the CPU' if report['dry_run'] else ''}")
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join((*cells, line[4])).rstrip())
    print(f"{'all passed' if report['ok'] else 'FAILED'} in {report['seconds']:.0f} s")


def verdict(ok: bool | None) -> str:
    return {True: "ok", False: "FAILED", None: ""}[ok]


def summed_up(rows: list[Result]) -> Iterator[Result]:
    """Merge the passed rows whose name begins with the same word into one; keep each failed row."""
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(row["name"].split()[0], []).append(row)
    for word, group in groups.items():
        passed = [row for row in group if row["ok"]]
        if passed:
            worst = max(passed, key=lambda row: row["data"].get("difference", 0.0))
            yield worst | {"name": f"{word}, {len(passed)} of {len(group)}", "found": f"{worst['found']} at most"}
        yield from (row for row in group if not row["ok"])


if __name__ == "__main__":
    sys.exit(main())
