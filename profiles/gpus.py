"""GPUs by name, read from gpus.toml: memory, bandwidth and arithmetic rates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from llmsched.profiles.toml_files import UnknownNameError, shipped_table


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Datasheet of one GPU.

    `memory` is the bytes that CUDA can use. Bandwidths are in bytes/s, `host_bandwidth` to host memory in one
    direction. Fields ending in `_flops` are dense rates in FLOP/s with float32 accumulation; `fp8_flops` is 0 without
    fp8 units. `sustained` is the share of the tensor cores' rate that the power limit allows in continuous use.
    """

    key: str
    name: str
    driver_name: str
    memory: int
    bandwidth: float
    bf16_flops: float
    fp16_flops: float
    architecture: str
    host_bandwidth: float
    fp8_flops: float
    fp32_flops: float
    sustained: float = 1.0


@cache
def gpus() -> dict[str, GpuSpec]:
    """Return all GPUs in gpus.toml by key."""
    found = {}
    for key, entry in shipped_table("gpus.toml").items():
        bf16 = float(entry["bf16_tflops"]) * 1e12
        found[key] = GpuSpec(
            key=key,
            name=entry["name"],
            driver_name=entry.get("driver_name", entry["name"]),
            memory=round(entry["memory_gib"] * 2**30),
            bandwidth=float(entry["bandwidth_gbps"]) * 1e9,
            bf16_flops=bf16,
            fp16_flops=float(entry.get("fp16_tflops", 0)) * 1e12 or bf16,
            architecture=entry["architecture"],
            host_bandwidth=float(entry["host_gbps"]) * 1e9,
            fp8_flops=float(entry.get("fp8_tflops", 0)) * 1e12,
            fp32_flops=float(entry["fp32_tflops"]) * 1e12,
            sustained=float(entry.get("sustained", 1)),
        )
    return found


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU called `name`, ignoring case, blanks and dashes ("H100", "RTX 4090", "a100-80gb").

    The beginning of a name is enough. Raises UnknownNameError if no GPU or several GPUs ("a100") fit.
    """
    wanted = _bare(name)
    listed = {_bare(key): spec for key, spec in gpus().items()}
    if wanted in listed:
        return listed[wanted]
    begun = [spec.key for bare, spec in listed.items() if wanted and bare.startswith(wanted)]
    if len(begun) == 1:
        return gpus()[begun[0]]
    near = begun or [listed[bare].key for bare in get_close_matches(wanted, listed, cutoff=0.6)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(gpus())}"
    raise UnknownNameError(f"{name!r} is not a known GPU; {hint}")


def same_gpu(one: str, other: str) -> bool:
    """Return True if two device names are equal, or are the listed name and the driver's name of one GPU."""
    return one == other or any({one, other} == {spec.name, spec.driver_name} for spec in gpus().values())


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())
