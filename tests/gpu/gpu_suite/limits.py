"""What the device can do at most, and how measurements are timed and compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gpu_suite.rows import CheckRow, failure
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.toml_files import UnknownNameError


@dataclass(frozen=True)
class DeviceLimits:
    """Bytes/s and FLOP/s of the device, and their source."""

    bandwidth: float
    flops: float
    source: str


def attempt(name: str, make: Callable[[], CheckRow]) -> CheckRow:
    """Run one measurement; report its failure as a row, so that the others still run."""
    try:
        return make()
    except Exception as error:
        return failure(name, error)


def limits_of(device: str, bandwidth: float, flops: float) -> DeviceLimits:
    """Return the datasheet's limits, or measured ones for a GPU that is not listed."""
    if device == "cuda":
        try:
            spec = find_gpu(torch.cuda.get_device_name())
        except UnknownNameError:
            return DeviceLimits(bandwidth, flops, "measured, not listed")
        return DeviceLimits(spec.bandwidth, spec.bf16_flops or flops, f"datasheet, {spec.key}")
    return DeviceLimits(bandwidth, flops, "measured")


def measured_limits(device: str, *, small: bool) -> DeviceLimits:
    return limits_of(device, copy_bandwidth(device, small), product_flops(device, small))


def timed(run: Callable[[], Any], device: str, *, warmup: int, repeats: int) -> float:
    """Return the median seconds of one call, by the device's clock if it has one."""
    for _ in range(warmup):
        run()
    if device != "cuda":
        return median(wall(run) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in marks) / 1e3


def wall(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def copy_bandwidth(device: str, small: bool) -> float:
    """Return the bytes read and written per second by a copy much larger than any cache."""
    source = torch.ones((1 << 22) if small else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device, warmup=3, repeats=10)
    return 2 * source.nbytes / seconds


def product_flops(device: str, small: bool) -> float:
    """Return the FLOP/s of a large square bf16 product."""
    width = 128 if small else 8192
    one = torch.randn(width, width, device=device).to(torch.bfloat16)
    seconds = timed(lambda: one @ one, device, warmup=3, repeats=10)
    return 2.0 * width**3 / seconds


def beside(name: str, seconds: float, floor: float, data: dict[str, Any]) -> CheckRow:
    found = f"{1e3 * seconds:.3g} ms, {seconds / floor:.2f} x the floor"
    return CheckRow(name, found, f"floor {1e3 * floor:.3g} ms", data=data | {"seconds": seconds, "floor_s": floor})
