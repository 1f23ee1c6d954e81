"""How KV memory was used in every step of an engine that this process can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.engine.kv.pool import KVUsage


@dataclass(slots=True)
class Meter:
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

    def take(self) -> Meter:
        """What was added up so far; it begins anew."""
        taken = Meter(self.steps, self.held_steps, self.shares, self.peak, self.total)
        self.steps = self.held_steps = self.peak = 0
        self.shares = 0.0
        return taken


def kv_waste(meters: Sequence[Meter]) -> float | None:
    """Share of the held KV memory that had no KV in it, on average over the steps; None if nothing was ever held."""
    held_steps = sum(meter.held_steps for meter in meters)
    return sum(meter.shares for meter in meters) / held_steps if held_steps else None
