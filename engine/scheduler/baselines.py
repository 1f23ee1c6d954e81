"""Schedulers, one for each scheduling_policy. All have the same interface, so that one run can compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmsched.engine.config import BASELINE, ResolvedConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.engine.scheduler.token_budget import StepBuilder
from llmsched.engine.scheduler.waiting_queue import WaitReason


def make_scheduler(kv: KVManager, config: ResolvedConfig, clock: Callable[[], float]) -> Scheduler:
    """Return the scheduler that `config.scheduling_policy` names.

    All policies except fair are baselines. They keep no blocks free (headroom), predict no output lengths, and have no
    fast lane for short requests, priority classes, cache bonus or backfill. They serve requests in order of arrival
    (fcfs), the shortest first (sptf), one at a time (serial), or in static batches (static).
    """
    if config.scheduling_policy == "fair":
        return Scheduler(kv, config, clock)
    seqs = 1 if config.scheduling_policy == "serial" else config.max_num_seqs
    plain = replace(config, **BASELINE, max_num_seqs=seqs)
    return StaticScheduler(kv, plain, clock) if config.scheduling_policy == "static" else Scheduler(kv, plain, clock)


class StaticScheduler(Scheduler):
    """Scheduler of static batches, a baseline in which a batch runs until its longest request ends.

    Up to max_num_seqs requests form a batch, each with KV reserved for max_model_len tokens until the batch ends. The
    baseline is faster than most real static batching: prompts are not padded, and each token is emitted immediately.
    """

    def _secure_memory(self) -> bool:
        """Give each request the blocks that its sliding-window layers need; all other blocks were reserved.

        Returns False, because no request is ever preempted.
        """
        for request in self.running:
            self.kv.grow(request)
        return False

    def _wait_reason(self, step: StepBuilder) -> WaitReason:
        """Return MAX_RUNNING: requests wait for the next batch, even if fewer than max_num_seqs run now."""
        return WaitReason.MAX_RUNNING

    def _prefill(self, step: StepBuilder, behind: list[Request], *, admit: bool) -> None:
        if not self.running:
            reserved = self.kv.layout.num_blocks(self.config.max_model_len)
            size = min(self.admission.control.max_running, max(1, self.kv.max_request_blocks // reserved))
            for request in list(self.waiting)[:size]:
                self.admission.start(request, self.kv.prefix_cache.find(request))
            for request in self.running:
                self.kv.static_batch.reserve(request, self.config.max_model_len)
            behind = self.running
        for request in behind:
            step.give(request, step.left)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. Its blocks stay reserved while other requests of the batch run, unless the request failed.

        A failed request ends in the middle of a step, when its sliding-window groups may hold more blocks than were
        reserved. So its blocks are freed immediately.
        """
        if request.status is RequestStatus.RUNNING and len(self.running) > 1 and reason is not FinishReason.ERROR:
            self.kv.static_batch.keep(request)
        super().finish(request, reason)
        if not self.running:
            self.kv.static_batch.release()
