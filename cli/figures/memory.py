"""How much memory a run took: from each step where they can be seen, else from looks at the target while it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.targets.meter import Meter, kv_waste
from llmsched.cli.targets.sampling import Sample
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


@dataclass(frozen=True, slots=True)
class MemoryUse:
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


def memory_use(samples: Sequence[Sample], parts: MemoryParts | None, meter: Meter | None) -> MemoryUse | None:
    """What meter and samples come to; None if the target told nothing of its KV memory."""
    held = [sample.kv_held for sample in samples if sample.kv_held is not None]
    mean = sum(held) / len(held) if held else None
    if meter is not None and meter.steps:
        return MemoryUse(meter.steps, len(held), meter.peak / meter.total, mean, kv_waste([meter]), parts)
    if mean is None:
        return None
    wasted = [s.kv_empty / s.kv_held for s in samples if s.kv_held and s.kv_empty is not None]
    waste = sum(wasted) / len(wasted) if wasted else None
    return MemoryUse(None, len(held), max(held), mean, waste, parts)
