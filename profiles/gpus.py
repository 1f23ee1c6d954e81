"""GPUs by name, read from gpus.toml, with memory, bandwidth and arithmetic rates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from llmsched.profiles.toml_files import UnknownNameError, shipped_table


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Datasheet of one GPU. Bandwidths are in bytes/s, dense rates in FLOP/s with float32 accumulation."""

    key: str
    name: str
    driver_name: str
    memory: int  # bytes that CUDA can use
    bandwidth: float
    bf16_flops: float
    fp16_flops: float
    architecture: str
    host_bandwidth: float  # to host memory, in one direction
    fp8_flops: float  # 0 without fp8 units
    fp32_flops: float
    sustained: float = 1.0  # share of the tensor cores' rate that the power limit allows in continuous use


@cache
def gpus() -> dict[str, GpuSpec]:
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
    """Return the GPU called `name`, which may be a few words of the GPU's name ("4090", "A100 80G").

    Case, separators and vendor names do not matter. Raises UnknownNameError if no GPU or several GPUs ("a100") fit.
    """
    if (key := re.sub(r"[\s_]", "-", name.strip().lower())) in gpus():
        return gpus()[key]
    wanted = _words(name)
    near = [key for key, words in _spellings().items() if wanted and wanted <= words]
    if len(near) == 1 and ("laptop" in wanted) == ("laptop" in near[0]):
        return gpus()[near[0]]
    near = near or get_close_matches(key, gpus(), cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(gpus())}"
    raise UnknownNameError(f"{name!r} is not a known GPU; {hint}")


@cache
def _spellings() -> dict[str, set[str]]:
    """Return the words by which each GPU may be found, by the GPU's key."""
    # They include the memory as vendors round it ("24gb").
    return {
        spec.key: _words(f"{spec.key} {spec.name} {spec.driver_name} {-(-spec.memory // 2**33) * 8}gb")
        for spec in gpus().values()
    }


def _words(name: str) -> set[str]:
    """Split a GPU's name into words, such as rtx and 4090 for both "RTX4090" and "rtx-4090"."""
    text = re.sub(r"(\d)\s*g(i?b)?\b", r"\1gb", name.lower())  # 80G, 80 GiB
    text = re.sub(r"rtx(?=\w)|(?<=\d)ada\b|sxm(?=\d)", r" \g<0> ", text)
    return set(re.findall(r"[a-z0-9]+", text)) - {"nvidia", "geforce", "tesla", "quadro", "gpu"}
