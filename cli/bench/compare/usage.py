"""How many steps and how much memory a run took, from what the engine saw after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.use import KVUse


@dataclass(frozen=True, slots=True)
class Usage:
    """The steps that runs took, and the memory that they needed, in bytes.

    `kv_waste` is the share of the KV memory held by requests that had no KV in it, on average over the steps;
    `peak_kv` the most that was held at once. Weights and activations are those that the engine was built with, as
    measured where the device tells, else as planned.
    """

    steps: int
    kv_waste: float | None
    peak_kv: int
    weights: int
    activations: int

    @property
    def peak(self) -> int:
        """What the work could not have been done without."""
        return self.weights + self.activations + self.peak_kv


def usage(plan: MemoryPlan, seen: Sequence[KVUse]) -> Usage:
    """What the steps of all runs on an engine with this plan come to."""
    held = [use for use in seen if use.held]
    waste = sum(use.empty / use.held for use in held) / len(held) if held else None
    blocks = max((use.held for use in seen), default=0) // plan.block_size
    measured = plan.measured
    weights = plan.weights_bytes if measured is None else measured.weights
    activations = measured.activations if measured is not None else None
    return Usage(
        len(seen),
        waste,
        blocks * plan.block_bytes,
        weights,
        plan.activation_bytes if activations is None else activations,
    )
