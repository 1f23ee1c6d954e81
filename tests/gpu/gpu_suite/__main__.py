"""Entry point: run each part in its own process, print one table and write one JSON file. See tests/gpu/run.sh."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_suite.part import PARTS, SuitePart

Result = dict[str, Any]


def main() -> int:
    """Return 0 if all checks passed or there is no GPU, 1 if a check failed, 2 for wrong arguments."""
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        print("usage: tests/gpu/run.sh [RESULT.json]", file=sys.stderr)
        return 2
    if (reason := why_no_gpu()) is not None:
        return without_gpu(reason)
    started = time.monotonic()
    parts = {name: run_part(name, part) for name, part in PARTS.items()}
    seconds = round(time.monotonic() - started, 1)
    report = machine() | {"ok": all(part["ok"] for part in parts.values()), "seconds": seconds, "parts": parts}
    show(report)
    if (target := result_file()) is not None:
        target.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"written to {target}")
    return 0 if report["ok"] else 1


def result_file() -> Path | None:
    if len(sys.argv) == 2:
        return Path(sys.argv[1])
    return Path(os.environ["OUT"]) / "gpu.json" if "OUT" in os.environ else None


# -- the machine ----------------------------------------------------------------------------------------------


def why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees none"


def without_gpu(reason: str) -> int:
    """Return 0 if there is no GPU, 1 if the driver lists one that torch cannot use."""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and listed.stdout.startswith("GPU"):
            print(f"{reason}, but nvidia-smi lists {listed.stdout.strip()}", file=sys.stderr)
            return 1
    print(f"no CUDA GPU ({reason}): nothing to check")
    return 0


def machine() -> Result:
    """Return the date, GPU, driver and versions."""
    from llmsched.engine.device import _nvml, _visible_gpu

    with _nvml() as nvml:
        driver, name = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetName(_visible_gpu(nvml))
    found: Result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": name,
        "driver": driver,
        "python": platform.python_version(),
    }
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


# -- parts ----------------------------------------------------------------------------------------------------


def run_part(name: str, part: SuitePart, device: str = "cuda") -> Result:
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
    versions = ", ".join(f"{key} {report[key]}" for key in ("driver", "torch", "triton", "transformers"))
    print(f"{report['gpu']}, {versions}, {report['date']}")
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
