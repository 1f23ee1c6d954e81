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


@dataclass(slots=True)
class Meter:
    """Adds up what an engine tells after each step; `shares` over the `held_steps`, those in which any was held."""

    steps: int = 0
    held_steps: int = 0
    shares: float = 0.0
    peak: int = 0

    def __call__(self, use: KVUse) -> None:
        self.steps += 1
        self.peak = max(self.peak, use.held)
        if use.held:
            self.held_steps += 1
            self.shares += use.empty / use.held

    def forget(self) -> None:
        """Begin anew."""
        self.steps = self.held_steps = self.peak = 0
        self.shares = 0.0


def usage(plan: MemoryPlan, meters: Sequence[Meter]) -> Usage:
    """What the runs on engines with this plan come to."""
    held_steps = sum(meter.held_steps for meter in meters)
    blocks = max(meter.peak for meter in meters) // plan.block_size
    measured = plan.measured
    activations = None if measured is None else measured.activations
    return Usage(
        steps=sum(meter.steps for meter in meters),
        kv_waste=sum(meter.shares for meter in meters) / held_steps if held_steps else None,
        peak_kv=blocks * plan.block_bytes,
        weights=plan.weights_bytes if measured is None else measured.weights,
        activations=plan.activation_bytes if activations is None else activations,
        kv=plan.parts.kv,
    )
