"""Devices and their memory, as NVML reports it for GPUs and Linux for CPUs. Most functions work without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmsched.engine.errors import ConfigError
from llmsched.profiles.gpus import GpuSpec

_CGROUPS = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
#: Iterations for which a thread of libgomp spins before it sleeps: about 50 us, longer than torch takes from one op to
#: the next. libgomp's own 300,000 outlast a scheduler's time slice, so that steps beside a busy program take seconds.
SPIN_COUNT = 4000
#: Memory of the CUDA context with kernel code and cuBLAS workspaces; measured 0.3 to 0.5 GiB on cards from L4 to H100.
CONTEXT_BYTES = 400 << 20
#: Lowest compute capabilities with bfloat16 (Ampere) and fp8 (Ada) tensor cores.
_BF16, _FP8 = (8, 0), (8, 9)
#: CPU flags for bfloat16 products in hardware: x86 AVX-512 and AMX, Arm.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class Holder:
    """Process that holds `used` bytes of device memory."""

    pid: int
    name: str
    used: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    kind: Literal["cuda", "cpu"]
    name: str
    total: int
    used_by_others: int = 0  # on a CPU, all memory that is not available without swapping
    holders: tuple[Holder, ...] = ()  # other programs, if the driver reports them
    computes_bf16: bool = True  # True if the device multiplies bfloat16 in hardware
    computes_fp8: bool = True  # True if the GPU multiplies fp8 in hardware; no meaning for a CPU

    @property
    def free(self) -> int:
        return self.total - self.used_by_others


@dataclass(frozen=True, slots=True)
class GpuDriver:
    name: str  # of the first visible GPU
    version: str
    cuda: str  # newest version of CUDA that the driver supports


def prepare_environment() -> None:
    """Set variables that native libraries read when they are loaded, unless the user has set them.

    Call this before torch is imported.
    """
    # CUDA_DEVICE_ORDER makes CUDA number the GPUs as NVML does. GOMP_SPINCOUNT makes idle threads of libgomp sleep
    # after SPIN_COUNT iterations.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def resolve_device(requested: str) -> str:
    """Return cuda or cpu for `requested`: auto becomes cuda if torch sees a GPU, else cpu.

    Raises ConfigError if cuda is requested and torch sees no GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        built = torch.version.cuda
        reason = f"torch {torch.__version__} sees no GPU (check nvidia-smi)" if built else "this torch has no CUDA"
        raise ConfigError("device", f"cuda is not available: {reason}; use auto or cpu")
    return ("cuda" if available else "cpu") if requested == "auto" else requested


def computes_bf16(device: str) -> bool:
    """Return True if `device` (cuda or cpu) multiplies bfloat16 in hardware."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_capability() >= _BF16
    for line in _read(_CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return not _BF16_FLAGS.isdisjoint(value.split())
    return False


def device_memory(device: str = "auto") -> DeviceMemory:
    """Return the memory of this machine's GPU or CPU; `device` is cuda, cpu, or auto for the GPU if there is one.

    Raises ConfigError if cuda is requested without an NVIDIA driver or GPU.
    """
    found = None if device == "cpu" else gpu_memory()
    if found is None and device == "cuda":
        raise ConfigError("device", "cuda is not available: no NVIDIA driver or no visible GPU; use cpu, or name a GPU")
    return found or cpu_memory()


def gpu_device(gpu: GpuSpec) -> DeviceMemory:
    """Return the memory of a GPU in profiles/gpus.toml, as if no other program used it."""
    fp8 = gpu.fp8_flops > 0
    return DeviceMemory("cuda", gpu.name, gpu.memory, computes_bf16=gpu.bf16_flops > 0, computes_fp8=fp8)


def gpu_memory() -> DeviceMemory | None:
    """Return the memory of the first GPU in CUDA_VISIBLE_DEVICES, or None without a visible GPU.

    Raises ConfigError if the driver does not report the GPU's memory.
    """
    with _nvml() as nvml:
        if nvml is None or (handle := _visible_gpu(nvml)) is None:
            return None
        try:
            # Version 2 reports separately the memory reserved by the driver, which CUDA cannot allocate.
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            total, used = int(memory.total) - int(memory.reserved), int(memory.used)
        except nvml.NVMLError as problem:
            raise ConfigError("device", f"the driver does not report the GPU's memory ({problem})") from problem
        holders = _holders(nvml, handle)
        own = next((holder.used for holder in holders if holder.pid == os.getpid()), None)
        if own is None:
            own = _own_memory()
        others = tuple(holder for holder in holders if holder.pid != os.getpid())
        name = nvml.nvmlDeviceGetName(handle)
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
        return DeviceMemory("cuda", name, total, max(0, used - own), others, capability >= _BF16, capability >= _FP8)


def gpu_driver() -> GpuDriver | None:
    """Return the NVIDIA driver of this machine, or None without a driver or a visible GPU."""
    with _nvml() as nvml:
        if nvml is None or (handle := _visible_gpu(nvml)) is None:
            return None
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        name, version = nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()
        return GpuDriver(name, version, f"{cuda // 1000}.{cuda % 1000 // 10}")


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible_gpu(nvml: Any) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    try:
        if first.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(first)
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    except (ValueError, nvml.NVMLError):
        return None


def _own_memory() -> int:
    # NVML cannot tell this in a container, because it lists processes by the host's process ids.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved()) + CONTEXT_BYTES


def _holders(nvml: Any, handle: Any) -> list[Holder]:
    """Return the processes that hold GPU memory, the largest first; an empty list if the driver reports no process."""
    used: dict[int, int] = {}
    for listed in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            used |= {process.pid: int(process.usedGpuMemory) for process in listed(handle) if process.usedGpuMemory}
        except nvml.NVMLError:
            continue  # the other query may still work
    holders = []
    for pid, size in sorted(used.items(), key=lambda each: each[1], reverse=True):
        try:
            name = Path(nvml.nvmlSystemGetProcessName(pid)).name
        except nvml.NVMLError:
            name = "process"
        holders.append(Holder(pid, name, size))
    return holders


def cpu_memory() -> DeviceMemory:
    """Return the memory of this machine, or of its container if the container has less."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in cgroup_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    name = f"CPU with {os.cpu_count()} cores"
    return DeviceMemory("cpu", name, total, total - available, computes_bf16=computes_bf16("cpu"))


def cgroup_limits(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each cgroup (v1 or v2) of this process that has a memory limit.

    `root` is the directory where cgroups are mounted. `membership` is the file that lists the cgroups of the process.
    """
    found = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path is the host's and may not exist here, so try its parents up to the root as well.
        below = base / path.strip("/")
        for group in (below, *(parent for parent in below.parents if parent.is_relative_to(base))):
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60:  # a limit may also be "max"
                stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
                inactive = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                found.append((int(limit), max(0, int(used) - inactive)))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
