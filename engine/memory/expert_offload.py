"""Plan for experts that stay in host memory: which layers' experts, and how many bytes each step copies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.errors import ConfigError
from llmsched.engine.units import human_bytes
from llmsched.profiles.gpus import gpus

_MIB = 1 << 20


class ExpertOffload(NamedTuple):
    layers: tuple[int, ...]  # whose experts stay in host memory
    host_bytes: int  # of these experts
    device_bytes: int  # on the device, for the experts of one layer at a time
    num_experts: int  # of a layer
    chosen: int  # experts that one token uses

    @property
    def saved_bytes(self) -> int:
        return self.host_bytes - self.device_bytes

    def copied_bytes(self, tokens: int) -> int:
        """Return the bytes that a step of `tokens` tokens copies to the device, if tokens choose experts at random."""
        used = 1 - (1 - self.chosen / self.num_experts) ** tokens
        return round(self.host_bytes * used)

    def cost(self, tokens: int, device: str) -> str:
        """Return the bytes that a step of `tokens` tokens copies to the GPU `device`, and the time if it is known."""
        copied = self.copied_bytes(tokens)
        host_bandwidth = next((gpu.host_bandwidth for gpu in gpus().values() if gpu.name == device), None)
        time = "" if host_bandwidth is None else f" ({1e3 * copied / host_bandwidth:.0f} ms)"
        return f"{human_bytes(copied)}{time}"

    def describe(self, tokens: int, device: str) -> str:
        """Describe the plan, and the bytes that decodes and a step of `tokens` tokens copy to the GPU `device`."""
        steps = (("a decode of 1 sequence", 1), ("of 8", 8), (f"a step of {tokens:,} tokens", tokens))
        costs = [f"{what} {self.cost(count, device)}" for what, count in steps]
        layers = f"of {len(self.layers)} layers ({human_bytes(self.host_bytes)}) in host memory"
        return f"{layers}, {human_bytes(self.device_bytes)} on the GPU for copies; copied: {', '.join(costs)}"


def smallest_offload(shape: ModelShape, suffices: Callable[[int], bool]) -> int | None:
    """Return the smallest expert_offload in bytes, in whole MiB, for which `suffices(...)` is true.

    Returns None if no value suffices, or if the model has no routed experts whose sizes are known.
    """
    sizes = shape.weights.experts
    if not shape.num_experts or not shape.experts_per_token:
        return None
    totals = accumulate(sizes[layer] for layer in sorted(sizes, reverse=True))
    rooms = [-(-total // _MIB) * _MIB for total in totals][1:]  # experts of one layer alone would save nothing
    place = bisect_left(rooms, True, key=suffices)
    return rooms[place] if place < len(rooms) else None


def plan_offload(shape: ModelShape, room: int) -> ExpertOffload:
    """Choose the last layers whose experts fit into `room` bytes of host memory.

    Raises ConfigError if the model has no routed experts, or if no layer's experts fit.
    """
    sizes = shape.weights.experts
    if not sizes or not shape.num_experts or not shape.experts_per_token:
        raise ConfigError("expert_offload", "needs a model with routed experts whose sizes are known; leave it out")
    layers, total = list[int](), 0
    for layer in sorted(sizes, reverse=True):
        if total + sizes[layer] > room:
            break
        layers.append(layer)
        total += sizes[layer]
    if not layers:
        size = human_bytes(sizes[max(sizes)])
        raise ConfigError(
            "expert_offload", f"{human_bytes(room)} is less than the {size} of one layer's experts; set more"
        )
    largest = max(sizes[layer] for layer in layers)
    return ExpertOffload(tuple(sorted(layers)), total, largest, shape.num_experts, shape.experts_per_token)
