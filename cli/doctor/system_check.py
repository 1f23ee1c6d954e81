"""Check of the machine for `doctor --system`: driver, GPU, libraries, memory, open files, and compiled kernels."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from llmsched.cli.doctor.rules import Finding
from llmsched.engine.device import DeviceMemory, GpuDriver, device_memory, gpu_driver
from llmsched.engine.errors import ConfigError, one_line
from llmsched.engine.units import human_bytes

_PACKAGES = ("llmsched", "torch", "triton", "transformers", "numba")
#: Open files below which `serve` accepts fewer connections than by default.
_FILES = 2048
#: Largest acceptable share of the device's memory that other programs hold.
_HELD = 0.2


class SystemFacts(NamedTuple):
    """State of this machine. A field is None if it is unknown or does not exist."""

    versions: dict[str, str | None]
    driver: GpuDriver | None
    torch_cuda: str | None  # version of CUDA that torch was built for
    torch_sees_gpu: bool
    memory: DeviceMemory
    open_files: tuple[int, int] | None  # soft and hard limit; -1 is no limit
    kernels: str  # backend of the kernels
    kernel_error: str | None  # why a kernel did not compile or gave a wrong result


def system_facts() -> SystemFacts:
    import torch

    from llmsched.kernels.dispatch import backend_name
    from llmsched.kernels.self_test import kernel_fault

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        memory = device_memory()
    except ConfigError:  # the driver does not report the GPU's memory
        memory = device_memory("cpu")
    try:
        fault = kernel_fault(device)
    except Exception as error:  # whatever the compiler raises is the result of this check
        fault = one_line(error)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    sees = torch.cuda.is_available()
    return SystemFacts(
        versions, gpu_driver(), torch.version.cuda, sees, memory, _open_files(), backend_name(device), fault
    )


def system_findings(facts: SystemFacts) -> list[Finding]:
    return [Finding(name, problem, remedy, ()) for name, problem, remedy in _problems(facts)]


def _problems(facts: SystemFacts) -> Iterator[tuple[str, str, str]]:
    """Yield each problem as its name, what is wrong, and what to change."""
    driver, torch = facts.driver, facts.versions["torch"]
    if driver is not None and not facts.torch_sees_gpu:
        if facts.torch_cuda is None:
            yield (
                "torch without CUDA",
                f"the driver reports {driver.name}, but torch {torch} was built without CUDA",
                "install a torch with CUDA (see pytorch.org)",
            )
        else:
            yield (
                "torch sees no GPU",
                f"torch {torch} needs a driver for CUDA {facts.torch_cuda}; driver {driver.version} supports CUDA "
                f"{driver.cuda}",
                "update the driver, or install a torch for an older CUDA; also check CUDA_VISIBLE_DEVICES",
            )
    if facts.torch_sees_gpu and facts.versions["triton"] is None:
        yield "no triton", "the GPU's kernels need triton, which is not installed", "pip install triton"
    if facts.kernel_error is not None:
        yield (
            "kernels fail",
            f"a {facts.kernels} kernel fails on this machine: {facts.kernel_error}",
            "triton needs a C compiler and Python's headers, Numba a cache directory that can be written; "
            "LLMSCHED_KERNELS=reference serves without compiled kernels, but slowly",
        )
    memory = facts.memory
    if memory.kind == "cuda" and memory.used_by_others >= _HELD * memory.total:
        who = (
            ", ".join(f"{one.name} ({one.pid}) {human_bytes(one.used)}" for one in memory.holders)
            or "not known by whom"
        )
        yield (
            "memory held by others",
            f"other programs hold {human_bytes(memory.used_by_others)} of the GPU's {human_bytes(memory.total)}: {who}",
            "end them, or lower --gpu-memory-utilization",
        )
    if facts.open_files is not None and 0 <= facts.open_files[1] < _FILES:
        yield (
            "few open files",
            f"this user may open {facts.open_files[1]} files, so the server accepts fewer connections",
            f"raise the hard limit to {_FILES} or more, in /etc/security/limits.conf or with LimitNOFILE= in systemd",
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _open_files() -> tuple[int, int] | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard
