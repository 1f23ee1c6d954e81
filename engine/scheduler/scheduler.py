"""Which tokens are computed in the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.table import table_of
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.waiting import WaitingQueue, rank


@dataclass(slots=True)
class SchedulerLimits:
    """What a step may take. `headroom` is the share of blocks that admission leaves for those that run to grow into."""

    max_num_seqs: int
    max_num_batched_tokens: int
    headroom: float = 0.1


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens or events."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0


class Update(NamedTuple):
    """What a step meant for one request."""

    request: Request
    start: int
    result: RowResult


class Scheduler:
    """Decides, step by step; holds no tensors and no text.

    There are no phases: each step lets num_computed_tokens of the running requests catch up with their num_tokens, and
    prefill, chunked prefill, decode and recovery from preemption differ only in how far behind they are.

    Invariants: a request is in `waiting` or `running` or nowhere; running requests hold blocks for all their tokens;
    the first of the running by rank is never preempted and any single request fits the pool, so each step makes
    progress and everyone ends. At most min(max_num_seqs, max_num_batched_tokens) run, so each decode gets its token
    in every step.
    """

    def __init__(self, kv: KVManager, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self.kv = kv
        self.limits = limits
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._clock = clock
        self._finished: list[str] = []

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool alone (see `fits_alone`)."""
        self.waiting.add(request)

    def fits_alone(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request can ever be served. The last sampled token needs no KV: nothing is computed after it."""
        most = num_prompt_tokens + max(0, max_tokens - 1)
        return self.kv.num_blocks_for(most) <= self.kv.max_request_blocks

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- one step ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide one step: memory for those who run, then decodes, partial prefills, admissions within the budget."""
        self.kv.expire(self._clock())
        preempted = self._secure_memory()
        rows: list[ScheduledRow] = []
        budget = self._schedule_running(rows)
        if not preempted:
            self._admit(rows, budget)
        finished, self._finished = self._finished, []
        return StepPlan(rows, finished, self.kv.take_copies())

    def _secure_memory(self) -> bool:
        """Give each running request blocks for all its tokens, preempting the last by rank until they suffice."""
        missing = sum(self.kv.num_growing(request) for request in self.running)
        preempted = False
        while missing > self.kv.pool.num_available:
            victim = max(self.running, key=rank)
            missing -= self.kv.num_growing(victim)
            self._preempt(victim)
            preempted = True
        for request in self.running:
            self.kv.grow(request)
        return preempted

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.add(request)

    def _schedule_running(self, rows: list[ScheduledRow]) -> int:
        """One token for each decode, then chunks for unfinished prefills by rank; returns the rest of the budget."""
        budget = self.limits.max_num_batched_tokens
        behind = []
        for request in self.running:
            if request.num_tokens - request.num_computed_tokens > 1:
                behind.append(request)
            else:
                rows.append(self._row(request, 1))
                budget -= 1
        for request in sorted(behind, key=rank):
            budget -= self._schedule_chunk(rows, request, budget)
        return budget

    def _schedule_chunk(self, rows: list[ScheduledRow], request: Request, budget: int) -> int:
        """As much of the request as the budget allows; returns the number of tokens."""
        count = min(budget, request.num_tokens - request.num_computed_tokens)
        if count > 0:
            rows.append(self._row(request, count))
        return count

    def _row(self, request: Request, count: int) -> ScheduledRow:
        start = request.num_computed_tokens
        complete = start + count == request.num_tokens
        sample = complete and request.num_output_tokens < request.sampling.max_tokens
        return ScheduledRow(request, start, count, table_of(request).ids, sample)

    def _admit(self, rows: list[ScheduledRow], budget: int) -> None:
        """Let waiting requests in, in order, while budget, slots and memory for their whole prompt last."""
        slots = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        while budget > 0 and len(self.running) < slots and (request := self.waiting.head) is not None:
            hit = self.kv.find_prefix(request)
            if self.kv.num_missing(request, hit) > self._admissible_blocks():
                break
            self.waiting.remove(request)
            self.kv.admit(request, hit)
            self._count_admission(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            budget -= self._schedule_chunk(rows, request, budget)

    def _admissible_blocks(self) -> int:
        """Available blocks less the headroom; with nobody running there is nobody to keep headroom for."""
        headroom = int(self.limits.headroom * self.kv.pool.num_blocks) if self.running else 0
        return self.kv.pool.num_available - headroom

    def _count_admission(self, request: Request) -> None:
        """Prefix hits are counted once, on first admission; work that preemption makes us do again is kept apart."""
        if request.num_preemptions:
            self.counters.recomputed_tokens += request.num_tokens - request.num_computed_tokens
            return
        request.first_scheduled_time = self._clock()
        request.num_cached_tokens = request.num_computed_tokens
        self.counters.prefix_queried_tokens += request.num_prompt_tokens
        self.counters.prefix_hit_tokens += request.num_computed_tokens

    # -- after the step ---------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Book what a step computed. Requests that ended with it have their `finish_reason`, and no blocks."""
        updates = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = row.sequence
            assert isinstance(request, Request)
            updates.append(Update(request, row.start, row_result))
            self._book(request, row, row_result)
        return updates

    def _book(self, request: Request, row: ScheduledRow, result: RowResult) -> None:
        if result.error is not None:
            self.finish(request, FinishReason.ERROR)
            return
        request.num_computed_tokens += row.num_tokens
        self.kv.commit(request)
        if result.token_id is not None:
            request.token_ids.append(result.token_id)
        if (reason := self._reason_to_end(request, result.token_id)) is not None:
            self.finish(request, reason)

    def _reason_to_end(self, request: Request, token_id: int | None) -> FinishReason | None:
        if token_id in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens:
            return FinishReason.STOP
        complete = request.num_computed_tokens >= request.num_tokens or token_id is not None
        if complete and request.num_output_tokens >= request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is: its blocks are released, it is never scheduled again."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._finished.append(request.request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block belongs to a running request or the prefix tree."""
        self.kv.check_integrity(self.running)
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert all(request.status is RequestStatus.WAITING and request.block_table is None for request in self.waiting)
