"""Schedulers, one for each scheduling_policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmsched.engine.config import BASELINE, ResolvedConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.scheduler import Demand, Scheduler
from llmsched.engine.scheduler.token_budget import StepBuilder
from llmsched.engine.scheduler.waiting_queue import WaitReason


def make_scheduler(kv: KVManager, config: ResolvedConfig, clock: Callable[[], float]) -> Scheduler:
    """Return the scheduler for `config.scheduling_policy`.

    All policies except fair are baselines without headroom, output prediction, fast lane, priorities and backfill. They
    serve requests in order of arrival (fcfs), the shortest first (sptf), one at a time (serial), or in static batches
    (static).
    """
    if config.scheduling_policy == "fair":
        return Scheduler(kv, config, clock)
    seqs = 1 if config.scheduling_policy == "serial" else config.max_num_seqs
    plain = replace(config, **BASELINE, max_num_seqs=seqs)
    return StaticScheduler(kv, plain, clock) if config.scheduling_policy == "static" else Scheduler(kv, plain, clock)


class StaticScheduler(Scheduler):
    """Scheduler of static batches, a baseline in which a batch runs until its longest request ends.

    Up to max_num_seqs requests form a batch, each with KV reserved for max_model_len tokens. Prompts are not padded,
    and each token is emitted immediately, so the baseline is faster than most real static batching.
    """

    def _secure_memory(self, demand: Demand) -> bool:
        for request in self.running:
            self.kv.blocks.grow(request)
        return False

    def _prefill(self, step: StepBuilder, behind: list[Request], *, admit: bool) -> WaitReason:
        if not self.running:
            reserved = self.kv.layout.num_blocks(self.config.max_model_len)
            size = self.admission.control.max_running
            if reserved:  # a model without attention needs no blocks
                size = min(size, max(1, self.kv.max_request_blocks // reserved))
            for request in list(self.waiting)[:size]:
                self.admission.start(request, self.kv.prefix_cache.find(request))
            for request in self.running:
                self.kv.static_batch.reserve(request, self.config.max_model_len)
            behind = self.running
        for request in behind:
            step.give(request, step.left)
        return WaitReason.MAX_RUNNING

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. Its blocks stay reserved while other requests of the batch run, unless the request failed."""
        if request.status is RequestStatus.RUNNING and len(self.running) > 1 and reason is not FinishReason.ERROR:
            self.kv.static_batch.keep(request)
        super().finish(request, reason)
        if not self.running:
            self.kv.static_batch.release()
