"""Running out of memory in spite of the plan, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmsched.engine.errors import ModelError
from llmsched.engine.units import human_bytes

if TYPE_CHECKING:
    from llmsched.engine.memory.plan import MemoryPlan

#: What torch says where it has no error of its own for it: the allocators of the CPU and of pinned memory.
_WORDS = ("DefaultCPUAllocator", "out of memory")


@contextmanager
def within_memory(plan: MemoryPlan, doing: str, remedy: str) -> Iterator[None]:
    """An allocation that fails becomes a ModelError that says what was planned and what to do about it."""
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(word in str(error) for word in _WORDS):
            raise
        parts = {
            "weights": plan.weights_bytes,
            "activations": plan.activation_bytes,
            "KV": plan.kv_bytes,
            "the CUDA context": plan.context_bytes,
        }
        planned = ", ".join(f"{human_bytes(count)} for {part}" for part, count in parts.items() if count)
        raise ModelError(
            f"out of memory while {doing}; planned on {plan.device.name} were {planned}, "
            f"of {human_bytes(plan.budget_bytes)}; {remedy}"
        ) from error
