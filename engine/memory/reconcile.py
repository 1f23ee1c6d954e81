"""What was planned against what was really taken, once the engine has started."""

from __future__ import annotations

from dataclasses import dataclass

from llmsched.engine.memory.plan import MeasuredMemory, MemoryPlan


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One part: bytes as planned and as measured."""

    part: str
    predicted: int
    actual: int | None

    @property
    def ratio(self) -> float | None:
        """actual / predicted; None where either is missing."""
        return None if self.actual is None or not self.predicted else self.actual / self.predicted

    @property
    def exceeds(self) -> bool:
        """Whether more was taken than planned, beyond rounding."""
        return self.ratio is not None and self.ratio > 1.02


def reconcile(plan: MemoryPlan, measured: MeasuredMemory) -> list[Reconciled]:
    """Weights, activations, KV and, on a GPU, the CUDA context."""
    parts = [
        Reconciled("weights", plan.weights_bytes, measured.weights),
        Reconciled("activations", plan.activation_bytes, measured.activations),
        Reconciled("KV", plan.num_blocks * plan.block_bytes, measured.kv),
    ]
    if plan.context_bytes:
        parts.append(Reconciled("CUDA context", plan.context_bytes, measured.context))
    return parts


def ratios(plan: MemoryPlan) -> dict[str, float]:
    """actual / predicted of each part that was measured, as a profile keeps them; nothing before the engine started."""
    if plan.measured is None:
        return {}
    names = {"weights": "weights_ratio", "activations": "activations_ratio", "KV": "kv_ratio"}
    names["CUDA context"] = "context_ratio"
    parts = reconcile(plan, plan.measured)
    return {names[each.part]: round(each.ratio, 4) for each in parts if each.ratio is not None}
