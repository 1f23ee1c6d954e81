"""Use of KV memory: sampled while a run lasts and, for an engine in this process, summed over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts

#: Said wherever these figures are.
DEFINITIONS = {
    "KV waste": "share of the KV memory held by requests that had no KV in it, on average over the steps; of a server "
    "over the looks at it",
    "peak KV": "the most KV memory that requests held in any step; of a server in any look at it, between two of which "
    "it may have been more",
    "peak memory": "weights, activations and peak KV: what the work needs; the engine reserves more where there is "
    "more",
}


class TargetState(NamedTuple):
    """What a target did at `time` (seconds after the start of the run). None is what it does not tell.

    The last three are shares of all KV memory: in blocks that requests hold, the part of that which is reserved and
    still empty, and what only the prefix cache keeps.
    """

    time: float
    running: int
    waiting: int
    kv_held: float | None = None
    kv_empty: float | None = None
    kv_cached: float | None = None


def target_state(time: float, running: int, waiting: int, use: KVUsage) -> TargetState:
    """A sample of an engine that tells how its KV memory is used."""
    total = max(1, use.total)
    return TargetState(time, running, waiting, use.held / total, use.empty / total, use.cached / total)


@dataclass(slots=True)
class KVMeter:
    """Adds up what an engine tells after each step (see `Engine.on_step`).

    `peak` is the most that was held, in tokens, of `total`; `shares` sums the part of what was held that was empty,
    over the `held_steps`, those in which any was held.
    """

    steps: int = 0
    held_steps: int = 0
    shares: float = 0.0
    peak: int = 0
    total: int = 0

    def __call__(self, use: KVUsage) -> None:
        self.steps += 1
        self.total = use.total
        self.peak = max(self.peak, use.held)
        if use.held:
            self.held_steps += 1
            self.shares += use.empty / use.held

    def take(self) -> KVMeter:
        """What was added up so far; it begins anew."""
        taken = KVMeter(self.steps, self.held_steps, self.shares, self.peak, self.total)
        self.steps = self.held_steps = self.peak = 0
        self.shares = 0.0
        return taken


def kv_waste(meters: Sequence[KVMeter]) -> float | None:
    """Share of the held KV memory that had no KV in it, on average over the steps; None if nothing was ever held."""
    held_steps = sum(meter.held_steps for meter in meters)
    return sum(meter.shares for meter in meters) / held_steps if held_steps else None


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What the steps of an engine or, where `steps` is None, `looks` at a target showed. Shares are of all KV memory,
    sizes in bytes; None is what it does not tell.

    `kv_waste` is the share of the held KV memory that had no KV in it, on average over the steps or looks in which any
    was held; `mean_kv_share` the share that was held on average over the looks.
    """

    steps: int | None
    looks: int
    peak_kv_share: float
    mean_kv_share: float | None
    kv_waste: float | None
    parts: MemoryParts | None

    @property
    def peak_kv(self) -> int | None:
        return None if self.parts is None else round(self.peak_kv_share * self.parts.kv)

    @property
    def peak(self) -> int | None:
        """What the work could not have been done without."""
        if self.parts is None or self.peak_kv is None:
            return None
        return self.parts.weights + self.parts.activations + self.peak_kv


def memory_usage(
    samples: Sequence[TargetState], parts: MemoryParts | None, meter: KVMeter | None
) -> MemoryUsage | None:
    """What meter and samples come to; None if the target told nothing of its KV memory."""
    held = [sample.kv_held for sample in samples if sample.kv_held is not None]
    mean = sum(held) / len(held) if held else None
    if meter is not None and meter.steps:
        return MemoryUsage(meter.steps, len(held), meter.peak / meter.total, mean, kv_waste([meter]), parts)
    if mean is None:
        return None
    wasted = [s.kv_empty / s.kv_held for s in samples if s.kv_held and s.kv_empty is not None]
    waste = sum(wasted) / len(wasted) if wasted else None
    return MemoryUsage(None, len(held), max(held), mean, waste, parts)
