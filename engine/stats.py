"""Statistics of an engine: its totals, its current state, and its metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llmsched.engine.kv.misses import MissKind
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.request import FinishReason
from llmsched.engine.scheduler.ledger import WAITS, SchedulerCounters
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.kernels.dispatch import num_compiled

#: Seconds between two updates of KV usage, which visit every running request.
_USE_INTERVAL_S = 0.1

#: Metrics that follow a counter of the scheduler.
_COUNTED: Mapping[str, str] = {
    "prefix_cache_queries": "prefix_queried_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
    "num_preemptions": "num_preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "num_swapped_out": "num_swapped_out",
    "num_swapped_in": "num_swapped_in",
    "headroom_changes": "num_headroom_changes",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}


@dataclass(slots=True, kw_only=True)
class EngineStats(SchedulerCounters):
    """State of the engine after a step. Counters are totals since the start."""

    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_pinned: int
    max_blocks_pinned: int
    prompt_tokens: int
    generation_tokens: int
    prefix_misses: dict[MissKind, int]  # requests by the reason why their prefix hit ended
    host_blocks_used: int
    host_blocks_total: int
    headroom: float  # share of blocks that admission keeps free
    max_running: int  # concurrency limit
    finished: dict[FinishReason, int]
    steps: int


class StatsRecorder:
    """Recorder of an engine's totals and state, as metrics and as EngineStats.

    The engine increases `prompt_tokens`, `generation_tokens`, `steps` and `finished`.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self.prompt_tokens = self.generation_tokens = self.steps = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._next_use = -math.inf
        self._recorded = replace(scheduler.counters)
        self._recorded_misses: Counter[MissKind] = Counter()
        self._num_compiled = num_compiled()
        self.update()

    def update(self) -> None:
        scheduler, metrics = self._scheduler, self._metrics
        pool, swap, control = scheduler.kv.pool, scheduler.kv.swap, scheduler.admission.control
        metrics.set("num_requests_running", len(scheduler.running))
        metrics.set("num_requests_waiting", len(scheduler.waiting))
        metrics.set("kv_cache_usage_perc", pool.num_used / max(1, pool.num_blocks))
        metrics.set("kv_blocks_cached", pool.num_cached)
        metrics.set("kv_blocks_pinned", scheduler.kv.pins.num_blocks)
        metrics.set("kv_headroom_perc", control.headroom)
        metrics.set("max_running_requests", control.max_running)
        metrics.set("step_token_budget", scheduler.pacer.step_budget)
        metrics.set("swap_space_usage_perc", (swap.num_blocks - swap.num_free) / max(1, swap.num_blocks))
        if not scheduler.running or self._clock() >= self._next_use:
            metrics.kv_usage(scheduler.kv_usage())
            self._next_use = self._clock() + _USE_INTERVAL_S
        if scheduler.counters != self._recorded:
            for metric, counter in _COUNTED.items():
                metrics.add(metric, getattr(scheduler.counters, counter) - getattr(self._recorded, counter))
            earlier = self._recorded.accepted_by_position
            for position, count in enumerate(scheduler.counters.accepted_by_position):
                metrics.accepted(position, count - (earlier[position] if position < len(earlier) else 0))
            for reason, counter in WAITS.items():
                metrics.waited(reason, getattr(scheduler.counters, counter) - getattr(self._recorded, counter))
            self._recorded = replace(scheduler.counters)
        misses = scheduler.kv.prefix_cache.misses.counts
        if misses != self._recorded_misses:
            for kind, count in (misses - self._recorded_misses).items():
                metrics.prefix_miss(kind, count)
            self._recorded_misses = misses.copy()
        if (compiled := num_compiled()) > self._num_compiled:
            metrics.add("late_compilations", compiled - self._num_compiled)
            self._num_compiled = compiled

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        pool, swap = scheduler.kv.pool, scheduler.kv.swap
        return EngineStats(
            **{name: getattr(scheduler.counters, name) for name in SchedulerCounters.__slots__},
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            blocks_pinned=scheduler.kv.pins.num_blocks,
            max_blocks_pinned=scheduler.kv.pins.max_blocks,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_misses={kind: scheduler.kv.prefix_cache.misses.counts[kind] for kind in MissKind},
            host_blocks_used=swap.num_blocks - swap.num_free,
            host_blocks_total=swap.num_blocks,
            headroom=scheduler.admission.control.headroom,
            max_running=scheduler.admission.control.max_running,
            finished=dict(self.finished),
            steps=self.steps,
        )
