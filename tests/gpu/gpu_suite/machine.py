"""Description of the machine, for the report. What cannot be found out is an error in the description, never a failure.

`python -m gpu_suite.machine` prints what torch says, as JSON. It is a process of its own, because an import may crash.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "safetensors", "nvidia-ml-py", "fastapi", "uvicorn")
QUERY = (
    "name,driver_version,memory.total,memory.used,compute_cap,pstate,clocks.sm,clocks.mem,power.limit,mig.mode.current"
)
TIME_LIMIT_S = 90.0


def describe() -> dict[str, Any]:
    """Return date, GPU, driver, versions, CPU, memory and disk."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: guarded(lambda name=name: version(name)) for name in PACKAGES},  # type: ignore[misc]
        "cpu": {"cores": os.cpu_count(), "model": guarded(cpu_model), "load": guarded(os.getloadavg)},
        "memory": guarded(lambda: Path("/proc/meminfo").read_text().splitlines()[0].split(":")[1].strip()),
        "disk_free": guarded(lambda: f"{shutil.disk_usage('.').free / 2**30:.0f} GiB"),
        "compiler": shutil.which("gcc") or shutil.which("clang"),
        "nvidia_smi": guarded(nvidia_smi),
        "torch": guarded(torch_in_a_process),
    }


def guarded(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns, or its error in words."""
    try:
        return ask()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def nvidia_smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=True)
    return dict(zip(QUERY.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=False))


def torch_in_a_process() -> Any:
    command = [sys.executable, "-P", "-m", "gpu_suite.machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-200:] or f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.is_available()}
    if facts["gpu"]:
        found = torch.cuda.get_device_properties(0)
        facts |= {"name": found.name, "processors": found.multi_processor_count, "bytes": found.total_memory}
        facts |= {"capability": [found.major, found.minor], "free_bytes": guarded(lambda: torch.cuda.mem_get_info()[0])}
        facts["l2_bytes"] = getattr(found, "L2_cache_size", None)
    return facts


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
