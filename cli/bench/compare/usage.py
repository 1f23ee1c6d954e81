"""How many steps and how much memory a run took, from what the engine saw after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.figures.kv_memory import KVMeter, kv_waste
from llmsched.engine.memory.plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Usage:
    """The steps that runs took, and the memory that they needed, in bytes.

    `kv_waste` is the share of the KV memory held by requests that had no KV in it, on average over the steps;
    `peak_kv` the most that was held at once, of `kv` that there was. Weights and activations are those that the engine
    was built with, as measured where the device tells, else as planned.
    """

    steps: int
    kv_waste: float | None
    peak_kv: int
    weights: int
    activations: int
    kv: int

    @property
    def peak(self) -> int:
        """What the work could not have been done without."""
        return self.weights + self.activations + self.peak_kv


def usage(plan: MemoryPlan, meters: Sequence[KVMeter]) -> Usage:
    """What the runs on engines with this plan come to."""
    blocks = max(meter.peak for meter in meters) // plan.block_size
    measured = plan.measured
    activations = None if measured is None else measured.activations
    return Usage(
        steps=sum(meter.steps for meter in meters),
        kv_waste=kv_waste(meters),
        peak_kv=blocks * plan.block_bytes,
        weights=plan.weights_bytes if measured is None else measured.weights,
        activations=plan.activation_bytes if activations is None else activations,
        kv=plan.parts.kv,
    )
