"""How much memory a run took, from looks at the target while it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.bench.target.sampling import Sample
from llmsched.engine.kv.plan import MemoryParts

#: Said wherever these figures are.
DEFINITIONS = {
    "KV waste": "share of the KV memory held by requests that had no KV in it, on average over the looks",
    "peak KV": "the most KV memory that requests held in any look at the target while the run lasted; between two of "
    "them it may have been more",
    "peak memory": "weights, activations and peak KV: what the work needs; the engine reserves more where there is "
    "more",
}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What `looks` at a target showed. Shares are of all KV memory, sizes in bytes; None is what it does not tell.

    `kv_waste` is the share of the held KV memory that had no KV in it, on average over the looks in which any was held.
    """

    looks: int
    peak_kv_share: float
    mean_kv_share: float
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


def memory_use(samples: Sequence[Sample], parts: MemoryParts | None) -> MemoryUse | None:
    """What the samples come to; None if the target told nothing of its KV memory."""
    held = [sample.kv_held for sample in samples if sample.kv_held is not None]
    if not held:
        return None
    wasted = [s.kv_empty / s.kv_held for s in samples if s.kv_held and s.kv_empty is not None]
    waste = sum(wasted) / len(wasted) if wasted else None
    return MemoryUse(len(held), max(held), sum(held) / len(held), waste, parts)
