"""GPUs by name: memory, bandwidth and arithmetic from gpus.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. `memory` is in bytes, as CUDA offers it; bandwidth in bytes/s, the rest in FLOP/s (dense, fp32 sums).

    `driver_name` is what its driver calls it, `architecture` the generation in lower case ("hopper"), `host_bandwidth`
    that of the link to host memory, in bytes/s one way. fp8_flops is 0 where there are no fp8 units. `sustained` is the
    share of the rates of tensor cores that the card's power allows for long.
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


class UnknownGpuError(LookupError):
    """No GPU of that name is listed; the message names the nearest ones."""


@cache
def gpus() -> dict[str, GpuSpec]:
    """All GPUs of gpus.toml by key."""
    table = tomllib.loads(files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8"))
    return {key: _spec(key, entry) for key, entry in table.items()}


def find_gpu(name: str) -> GpuSpec:
    """The GPU that `name` means: case, blanks and dashes do not matter ("H100", "RTX 4090", "a100-80gb").

    Raises UnknownGpuError, also for a name that could be several ("a100").
    """
    wanted = _bare(name)
    listed = {_bare(key): spec for key, spec in gpus().items()}
    if wanted in listed:
        return listed[wanted]
    begun = [spec.key for bare, spec in listed.items() if wanted and bare.startswith(wanted)]
    if len(begun) == 1:
        return gpus()[begun[0]]
    near = begun or [listed[bare].key for bare in get_close_matches(wanted, listed, cutoff=0.6)]
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(gpus())}"
    raise UnknownGpuError(f"{name!r} is not a known GPU; {hint}?" if near else f"{name!r} is not a known GPU; {hint}")


def same_gpu(one: str, other: str) -> bool:
    """Whether two names of a device are the same, or the listed name of one GPU and its driver's."""
    return one == other or any({one, other} == {spec.name, spec.driver_name} for spec in gpus().values())


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


def _spec(key: str, entry: dict[str, float | str]) -> GpuSpec:
    bf16 = float(entry["bf16_tflops"]) * 1e12
    return GpuSpec(
        key=key,
        name=str(entry["name"]),
        driver_name=str(entry.get("driver_name", entry["name"])),
        memory=round(float(entry["memory_gib"]) * 2**30),
        bandwidth=float(entry["bandwidth_gbps"]) * 1e9,
        bf16_flops=bf16,
        fp16_flops=float(entry.get("fp16_tflops", 0)) * 1e12 or bf16,
        architecture=str(entry["architecture"]),
        host_bandwidth=float(entry["host_gbps"]) * 1e9,
        fp8_flops=float(entry.get("fp8_tflops", 0)) * 1e12,
        fp32_flops=float(entry["fp32_tflops"]) * 1e12,
        sustained=float(entry.get("sustained", 1)),
    )
