"""What the scheduler has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens or events."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_headroom_changes: int = 0
