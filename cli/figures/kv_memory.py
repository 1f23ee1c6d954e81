from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts

#: Definitions, printed with the figures.
DEFINITIONS = {
    "steps": "forward passes of the engine, however long each took",
    "KV waste": "share of the KV memory allocated to requests that held no KV yet, averaged over steps; for a server, "
    "over samples of its metrics",
    "peak KV": "the most KV memory allocated to requests in any step; for a server, in any sample of its metrics, so "
    "the true peak may be higher",
    "peak memory": "weights, activations and peak KV: what this load needs; the engine reserves more if it can",
}


class TargetState(NamedTuple):
    """State of a target. A value that the target does not report is None."""

    time: float  # seconds
    running: int
    waiting: int
    kv_held: float | None = None  # share of KV memory that requests hold
    kv_empty: float | None = None  # share of KV memory that requests hold but have not filled yet
    kv_cached: float | None = None  # share of KV memory that only the prefix cache holds


def target_state(time: float, running: int, waiting: int, use: KVUsage) -> TargetState:
    total = max(1, use.total)
    return TargetState(time, running, waiting, use.held / total, use.empty / total, use.cached / total)


@dataclass(slots=True)
class KVMeter:
    """Meter of an engine's KV memory, called after each step (see `Engine.on_step`)."""

    steps: int = 0
    held_steps: int = 0  # steps after which requests held KV memory
    empty_shares: float = 0.0  # sum over `held_steps` of the share of held memory that was empty
    peak: int = 0  # most tokens that requests held
    total: int = 0  # capacity in tokens

    def __call__(self, use: KVUsage) -> None:
        self.steps += 1
        self.total = use.total
        self.peak = max(self.peak, use.held)
        if use.held:
            self.held_steps += 1
            self.empty_shares += use.empty / use.held

    def take(self) -> KVMeter:
        """Return a copy of the meter, and reset its counts to 0."""
        taken = KVMeter(self.steps, self.held_steps, self.empty_shares, self.peak, self.total)
        self.steps = self.held_steps = self.peak = 0
        self.empty_shares = 0.0
        return taken

    @property
    def waste(self) -> float | None:
        """Share of held KV memory that was empty, averaged over steps."""
        return self.empty_shares / self.held_steps if self.held_steps else None


def merged(meters: Sequence[KVMeter]) -> KVMeter:
    return KVMeter(
        steps=sum(meter.steps for meter in meters),
        held_steps=sum(meter.held_steps for meter in meters),
        empty_shares=sum(meter.empty_shares for meter in meters),
        peak=max(meter.peak for meter in meters),
        total=max(meter.total for meter in meters),
    )


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory usage of a target during a run. `peak_kv_share` and `mean_kv_share` are shares of all KV memory."""

    steps: int | None  # None if the figures come from `samples` of the target's state
    samples: int
    peak_kv_share: float
    mean_kv_share: float | None
    kv_waste: float | None  # mean share of held KV memory that was empty
    parts: MemoryParts | None  # bytes
    kv_tokens: int | None = None  # tokens for which there is KV memory

    @property
    def peak_kv(self) -> int | None:
        """Most KV memory held by requests, in bytes."""
        return None if self.parts is None else round(self.peak_kv_share * self.parts.kv)

    @property
    def peak(self) -> int | None:
        """Memory that this load needs, in bytes: weights, activations and peak KV."""
        if self.parts is None or self.peak_kv is None:
            return None
        return self.parts.weights + self.parts.activations + self.peak_kv


def memory_usage(
    samples: Sequence[TargetState], parts: MemoryParts | None, meter: KVMeter | None
) -> MemoryUsage | None:
    """Return the memory usage from `meter` if it observed steps, else from `samples`; None without either."""
    held = [sample.kv_held for sample in samples if sample.kv_held is not None]
    mean = sum(held) / len(held) if held else None
    if meter is not None and meter.steps:
        share = meter.peak / max(1, meter.total)
        return MemoryUsage(meter.steps, len(held), share, mean, meter.waste, parts, meter.total)
    if mean is None:
        return None
    wasted = [s.kv_empty / s.kv_held for s in samples if s.kv_held and s.kv_empty is not None]
    waste = sum(wasted) / len(wasted) if wasted else None
    return MemoryUsage(None, len(held), max(held), mean, waste, parts)
