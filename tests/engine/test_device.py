"""Device memory: NVML by a stand-in, containers by made-up cgroup files."""
# ruff: noqa: N802, N815 - the names are NVML's

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmsched.engine import device
from llmsched.engine.device import (
    CONTEXT_BYTES,
    SPIN_COUNT,
    DeviceMemory,
    Holder,
    cgroup_limits,
    cpu_memory,
    device_memory,
    gpu_memory,
    prepare_environment,
)
from llmsched.engine.errors import ConfigError

GIB = 1 << 30


class FakeNvml(ModuleType):
    """One L4 of 24 GiB, 2 of them kept by the driver, 6 used: 1 by this process, 5 by another."""

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.capability = (8, 9)
        self.reports_memory = True
        self.reports_processes = True
        self.draws = False
        self.handles: dict[Any, str] = {0: "first", 1: "second", "GPU-abc": "by uuid"}
        self.asked: list[str] = []
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self._handle(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self._handle(uuid)

    def _handle(self, key: Any) -> str:
        if key not in self.handles:
            raise self.NVMLError("not found")
        self.asked.append(self.handles[key])
        return self.handles[key]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:
        assert version == self.nvmlMemory_v2
        if not self.reports_memory:
            raise self.NVMLError("not supported")
        return SimpleNamespace(total=24 * GIB, reserved=2 * GIB, used=6 * GIB, free=16 * GIB)

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if not self.reports_processes:
            raise self.NVMLError("no permission")
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
        return [mine, SimpleNamespace(pid=77, usedGpuMemory=5 * GIB), SimpleNamespace(pid=78, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if not self.draws:
            raise self.NVMLError("not supported")
        both = SimpleNamespace(pid=77, usedGpuMemory=5 * GIB)
        return [SimpleNamespace(pid=80, usedGpuMemory=GIB // 2), both, SimpleNamespace(pid=81, usedGpuMemory=6 * GIB)]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_gpu_memory_excludes_the_driver_and_this_process(nvml: FakeNvml) -> None:
    found = gpu_memory()
    assert found == DeviceMemory("cuda", "NVIDIA L4", 22 * GIB, 5 * GIB, (Holder(77, "python3", 5 * GIB),))
    assert found.free == 17 * GIB
    assert nvml.open == 0


def test_graphics_processes_hold_memory_too(nvml: FakeNvml) -> None:
    nvml.draws = True
    found = gpu_memory()
    assert [(holder.pid, holder.used) for holder in found.holders] == [(81, 6 * GIB), (77, 5 * GIB), (80, GIB // 2)]


def test_a_driver_that_names_no_processes(nvml: FakeNvml) -> None:
    nvml.reports_processes = False
    found = gpu_memory()
    assert (found.used_by_others, found.holders) == (6 * GIB, ())


def test_a_container_in_which_the_driver_counts_processes_otherwise(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML reports the host's process ids, so the memory of this process is the memory that torch reports."""
    import torch

    listed = nvml.nvmlDeviceGetComputeRunningProcesses("first")
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: listed)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert gpu_memory().used_by_others == 6 * GIB
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: GIB)
    assert gpu_memory().used_by_others == 5 * GIB - CONTEXT_BYTES


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"OMP_WAIT_POLICY": "active"}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_WAIT_POLICY": "active"}),
        (
            {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "GOMP_SPINCOUNT": "5"},
            {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "GOMP_SPINCOUNT": "5"},
        ),
    ],
)
def test_the_environment_is_prepared_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_environment()
    assert os.environ == expected


def test_a_driver_that_does_not_report_memory(nvml: FakeNvml) -> None:
    nvml.reports_memory = False
    with pytest.raises(ConfigError, match="does not report the GPU's memory"):
        gpu_memory()


def test_bfloat16_needs_ampere(nvml: FakeNvml) -> None:
    assert gpu_memory().computes_bf16  # type: ignore[union-attr]
    nvml.capability = (7, 5)
    assert not gpu_memory().computes_bf16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("visible", "handle"), [("1,0", "second"), ("GPU-abc", "by uuid"), ("", None), ("-1", None), ("7", None)]
)
def test_cuda_visible_devices_decides_which_gpu(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, handle: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpu_memory()
    assert (found is None) == (handle is None)
    assert nvml.asked == ([] if handle is None else [handle])


def test_device_choice(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory("auto").kind == device_memory("cuda").kind == "cuda"
    assert device_memory("cpu").kind == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_memory("auto").kind == "cpu"
    with pytest.raises(ConfigError, match="no NVIDIA driver or no visible GPU"):
        device_memory("cuda")


def test_a_container_limits_the_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cgroup_limits", lambda: [(4 << 20, 1 << 20), (64 << 20, 63 << 20)])
    found = cpu_memory()
    assert found.total == 4 << 20
    assert found.free == 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {"me": "0::/pod/container\n", "pod/memory.max": "1000\n", "pod/memory.current": "600\n"}
V2 |= {"pod/memory.stat": "anon 100\ninactive_file 250\n"}
V2 |= {"pod/container/memory.max": "max\n", "pod/container/memory.current": "500\n"}
V1 = {"me": "5:cpu,cpuacct:/x\n4:memory:/not/here\n", "memory/memory.limit_in_bytes": "2000\n"}
V1 |= {"memory/memory.usage_in_bytes": "900\n", "memory/memory.stat": "total_inactive_file 100\n"}


@pytest.mark.parametrize(("files", "limit"), [(V2, (1000, 350)), (V1, (2000, 800))], ids=["version 2", "version 1"])
def test_cgroups_count_without_cache_that_can_be_dropped(
    tmp_path: Path, files: dict[str, str], limit: tuple[int, int]
) -> None:
    """Limits of cgroups v2 apply at every level. In v1, the path may be a path on the host."""
    write(tmp_path, files)
    assert cgroup_limits(tmp_path, tmp_path / "me") == [limit]


def test_no_limit_and_no_cgroups(tmp_path: Path) -> None:
    unlimited = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "9\n"}
    write(tmp_path, {"me": "4:memory:/\n", **unlimited})
    assert cgroup_limits(tmp_path, tmp_path / "me") == []
    assert cgroup_limits(tmp_path, tmp_path / "absent") == []
