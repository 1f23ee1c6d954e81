"""Which tokens are computed in the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Unpack

from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.admission import Door
from llmsched.engine.scheduler.counters import SchedulerCounters
from llmsched.engine.scheduler.ledger import Ledger
from llmsched.engine.scheduler.pacing import Pacer
from llmsched.engine.scheduler.prediction import OutputPredictor
from llmsched.engine.scheduler.preemption import SAFE_AFTER, Preemption
from llmsched.engine.scheduler.step import Step
from llmsched.engine.scheduler.waiting import WaitingQueue, initial_rank
from llmsched.engine.scheduler.waits import WaitFor


class Update(NamedTuple):
    """What a step meant for one request."""

    request: Request
    start: int
    result: RowResult


class Scheduler:
    """Decides, step by step; holds no tensors and no text.

    There are no phases: each step lets num_computed_tokens of the running requests catch up with their num_tokens, and
    prefill, chunked prefill, decode and recovery from preemption differ only in how far behind they are.

    Invariants: a request is in `waiting` or `running` or nowhere; running requests hold blocks for all their tokens
    (in layers with a window: for at least one more than are computed); the first of the running by rank is never
    preempted and any single request fits the pool, so each step makes progress and everyone ends. No more run than
    there are tokens in a step, so each decode gets its token in every one.

    Nobody starves. Let S be the number of requests of a smaller rank that wait at some time while a request R does:
    they were there when it came, or came less than (levels between their priorities) x priority_step after it, or were
    preempted and came back to the head of their class. These may all be admitted before R. Of all others at most
    max_passes x (1 + S) are, whatever lets them pass (fast lane, quota, cache hit, or that they fit where R does not):
    each counts against the first in the queue, whom no more than max_passes ever pass, and while R waits that is R or
    one of S. When R is the first and that is used up, nobody else is admitted, and R is as soon as it fits: when those
    that run have ended, if not before. (Under sptf ranks are lengths, so S has no bound: it is a baseline.)

    In steps: each computes a token at least, of those that ran when R came or of the S + max_passes x (1 + S) others.
    So R waits for no more steps than these have tokens, prompts and max_tokens together, and those that preemption
    makes them compute again.
    """

    def __init__(self, kv: KVManager, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.kv = kv
        self.config = config
        self.counters = SchedulerCounters()
        self.ledger = Ledger(clock)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.predictor = OutputPredictor(config.output_prediction)
        self.preemption = Preemption(kv, config)
        self._clock = clock
        self._finished: list[str] = []
        self.configure()

    def configure(self, **limits: Unpack[Limits]) -> None:
        """Change the limits of a step, only while nothing runs; what headroom and steps have taught is forgotten."""
        assert not self.running
        self.config = replace(self.config, **limits)
        self.pacer = Pacer(self.config)
        assert self.config.max_num_batched_tokens is not None
        self.token_budget = self.config.max_num_batched_tokens
        self.door = Door(
            self.kv,
            self.config,
            self._clock,
            waiting=self.waiting,
            running=self.running,
            ledger=self.ledger,
            counters=self.counters,
            predictor=self.predictor,
        )

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool alone (see `fits_alone`)."""
        request.rank = initial_rank(request, self.config)
        self.ledger.begin(request.request_id, request.arrival_time, ahead=len(self.waiting), running=len(self.running))
        self.waiting.add(request, short=self.door.is_short(request))
        self.door.waits.begin(request)
        self.door.changed()

    def fits_alone(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request can ever be served. The last sampled token needs no KV: nothing is computed after it."""
        most = num_prompt_tokens + max(0, max_tokens - 1)
        return self.kv.num_blocks_for(most) <= self.kv.max_request_blocks

    def expire_pins(self) -> None:
        """Let go of the pinned prefixes whose time is over."""
        if self.kv.expire(self._clock()):
            self.door.changed()

    def unpin(self, pin_id: str) -> None:
        """Let go of a pinned prefix. Raises RequestError if there is none of that name."""
        self.kv.pins.delete(pin_id)
        self.door.changed()

    def kv_use(self, computed: StepPlan | None = None) -> KVUsage:
        """How KV memory is used now, or, with a plan that is computed but not booked, before those that ended with it
        give theirs back.
        """
        use = self.kv.use(self.running)
        written = 0 if computed is None else self.kv.layout.num_groups * computed.num_tokens
        return use._replace(empty=use.empty - written)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def idle_until(self) -> float | None:
        """If the engine had better wait for more requests before it starts: until when at most (coalescing)."""
        first = self.waiting.first_arrival
        if self.running or first is None or len(self.waiting) >= self.config.min_schedule_batch:
            return None
        until = first.arrival_time + self.config.schedule_window
        return until if self._clock() < until else None

    # -- one step ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide one step: first memory for those who run, then decodes, partial prefills, admissions."""
        self.expire_pins()
        self.door.new_step()
        preempted = self._secure_memory() or self._make_room_for_class()
        decodes: list[Request] = []
        behind: list[Request] = []
        for request in self.running:
            one_behind = len(request.token_ids) - request.num_computed_tokens == 1
            (decodes if one_behind else behind).append(request)
        step = Step(self.pacer.token_budget(self.token_budget, self.running, len(decodes)), self.kv, self.ledger)
        step.decode(decodes)
        behind.sort(key=lambda r: (r.rank, r.request_id))
        self._prefill(step, behind, admit=self.door.worth_trying and (not preempted or not self.running))
        self.door.waits.now_for(self._lacking(step))
        finished, self._finished = self._finished, []
        return StepPlan(step.rows(), finished, self.kv.take_copies(), *self.kv.take_swaps())

    def _lacking(self, step: Step) -> WaitFor | None:
        """What those who wait after this step has been decided wait for; None: nobody does."""
        return self.door.lacking(step) if self.waiting else None

    def _secure_memory(self) -> bool:
        """Give each running request blocks for all its tokens, preempting until they suffice."""
        growing = [request for request in self.running if len(request.token_ids) > request.table.capacity]
        missing = sum(self.kv.num_growing(request) for request in growing)
        preempted = False
        while missing > self.kv.pool.num_available:
            victim = self.preemption.choose_victim(self.running)
            missing -= max(0, self.kv.num_growing(victim))
            self._preempt(victim, "memory")
            preempted = True
        for request in growing:
            if request.status is RequestStatus.RUNNING:
                self.kv.grow(request)
        return preempted

    def _preempt(self, request: Request, reason: str, demand: int | None = None) -> None:
        loss = self.preemption.decide(request, demand)
        self.ledger.note(
            request.request_id,
            "preempted",
            reason=reason,
            **loss.details(),
            free_blocks=self.kv.pool.num_available,
            running=len(self.running),
        )
        self.running.remove(request)
        request.num_lost_tokens = request.num_computed_tokens
        if loss.swap:
            self.kv.swap_out(request)
            self.counters.num_swapped_out += 1
        else:
            self.kv.release(request)
        request.status = RequestStatus.SWAPPED if loss.swap else RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.door.shut_out(request)
        if reason == "memory":
            self.counters.num_headroom_changes += self.door.control.preempted(len(self.running))
        self.waiting.move_to_head_of_class(request)
        self.waiting.add(request, short=self.door.is_short(request))
        self.door.waits.begin(request)

    def _prefill(self, step: Step, behind: list[Request], *, admit: bool) -> None:
        """Share all that decodes left of the budget: a part goes to short requests first, the rest by rank."""
        lane = int(self.config.fast_lane_share * step.left)
        for request in behind:
            if lane > 0 and self.door.is_short(request):
                lane -= step.give(request, lane)
        admitted = self.door.admit_short_ones(step, lane) if admit else []
        for request in behind:
            step.give(request, step.left)
        if admit and self.waiting and step.left > 0:
            self.door.admit_in_order(step)
        for request in admitted:
            step.give(request, step.left)

    def _make_room_for_class(self) -> bool:
        """With all slots taken, preempt one of a lower class that comes after the first that waits."""
        if not (self.door.is_full and self.waiting and self.config.scheduling_policy == "fair"):
            return False
        first = self.waiting.first
        lowest = max(self.running, key=lambda r: (r.priority, r.rank, r.request_id))
        if lowest.priority <= first.priority or lowest.rank <= first.rank or lowest.num_preemptions >= SAFE_AFTER:
            return False
        self._preempt(lowest, "class", self.kv.num_blocks_for(first.num_tokens + self.predictor.remaining(first)))
        return True

    # -- after the step ---------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Book what a step computed. Requests that ended with it have their `finish_reason`, and no blocks."""
        self.preemption.rates.learn(plan, result)
        self.pacer.learn(plan, result.elapsed - result.swap_elapsed)
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
        if request.num_computed_tokens >= request.table.commit_at:
            self.kv.commit(request)
        if result.token_id is not None:
            request.token_ids.append(result.token_id)
        if (reason := self._reason_to_end(request, result.token_id)) is not None:
            self.finish(request, reason)

    def _reason_to_end(self, request: Request, token_id: int | None) -> FinishReason | None:
        num_tokens, sampling = len(request.token_ids), request.sampling
        num_output_tokens = num_tokens - request.num_prompt_tokens
        if token_id in request.stop_ids and num_output_tokens > sampling.min_tokens:
            return FinishReason.STOP
        if num_output_tokens < sampling.max_tokens:
            return None
        complete = token_id is not None or request.num_computed_tokens >= num_tokens
        return FinishReason.LENGTH if complete else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is: its blocks are released, it is never scheduled again."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)
            self.door.waits.end(request)
            self.kv.swap.discard(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.predictor.learn(request)
        self.ledger.note(request.request_id, "finished", reason=reason.value, output_tokens=request.num_output_tokens)
        self.ledger.end(request.request_id)
        self.door.passing.forget(request)
        self.door.changed()
        self._finished.append(request.request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block belongs to a running request or the prefix tree, and every slot to a
        swapped one.
        """
        self.kv.check_integrity(self.running, self.waiting)
        assert all(r.status is RequestStatus.RUNNING and r.swapped is None for r in self.running)
        for request in self.waiting:
            assert request.block_table is None
            expected = RequestStatus.WAITING if request.swapped is None else RequestStatus.SWAPPED
            assert request.status is expected
