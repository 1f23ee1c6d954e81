"""Scheduler: chooses the tokens that the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Unpack, cast

from llmsched.engine.config import Limits, ResolvedConfig
from llmsched.engine.executor.base import RowResult, StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.admission import Admission
from llmsched.engine.scheduler.drafts import Drafter
from llmsched.engine.scheduler.ledger import Ledger, SchedulerCounters
from llmsched.engine.scheduler.prediction import OutputPredictor
from llmsched.engine.scheduler.preemption import Preemption
from llmsched.engine.scheduler.sampled_tokens import accept, matched, reason_to_end
from llmsched.engine.scheduler.token_budget import Pacer, StepBuilder
from llmsched.engine.scheduler.waiting_queue import WaitingQueue, WaitReason, initial_rank


class Update(NamedTuple):
    """Result of a step for one request."""

    request: Request
    start: int  # position of the first token that the step computed
    result: RowResult


class Demand(NamedTuple):
    """Blocks that running requests lack before a step, and a request to preempt in favour of the first waiting one."""

    growing: list[Request]  # running requests that need more blocks for their tokens
    missing: int  # number of these blocks
    victim: Request | None  # running request whose place the first waiting request takes, as that is of a higher class


#: The same as Update(*fields) in half the time.
_new_update = cast("Callable[[tuple[Request, int, RowResult]], Update]", partial(tuple.__new__, Update))


class Scheduler:
    """Planner of steps: decides which tokens each step computes.

    For each step, the caller calls `schedule` to plan it, `advance` after it was launched, and `settle` when its
    results are known. From `advance` to `settle`, the step is in flight, and the tokens that it samples are pending.
    Meanwhile the next step may be scheduled and launched, but it is advanced only after the step in flight is settled.
    While a step with drafts (see drafts.py) is in flight, no step is planned, because it may sample several tokens per
    request.

    Steps have no phases: each step lets num_computed_tokens of the running requests catch up with their num_tokens.
    Prefill, chunked prefill, decode and recovery from preemption differ only in the number of uncomputed tokens.

    When blocks run out, the first running request by rank is never preempted, and every accepted request fits the pool
    alone. So each step makes progress, and every request ends. At most max_num_batched_tokens requests run, so every
    decoding request gets its token in every step.

    Starvation bound: while a request R waits, at most max_passes x (1 + S) requests of larger rank are admitted, where
    S is the number of requests of smaller rank that wait during that time. R waits for at most N steps, where N is the
    number of tokens (prompt, max_tokens and recomputed tokens) of the requests that run during that time. The proof is
    in tests/scheduler/test_starvation.py. Policy sptf has no bound, because its ranks are lengths.
    """

    def __init__(self, kv: KVManager, config: ResolvedConfig, clock: Callable[[], float]) -> None:
        self.kv = kv
        self.config = config
        self.counters = SchedulerCounters()
        self.ledger = Ledger(clock)
        self.waiting = WaitingQueue(clock)
        self.running: list[Request] = []
        self.predictor = OutputPredictor(config.output_prediction)
        self.preemption = Preemption(kv, config)
        self._clock = clock
        self._finished: list[str] = []
        self._in_flight: StepPlan | None = None
        self._has_abandoned = False
        self.configure()

    def configure(self, **limits: Unpack[Limits]) -> None:
        """Change the limits of a step, and forget all estimates from earlier steps. No request may be running."""
        assert not self.running
        self.config = replace(self.config, **limits)
        self.pacer = Pacer(self.config)
        self.drafter = (
            None if self.config.speculative == "off" else Drafter(self.config, self.pacer, self.ledger, self.counters)
        )
        self.admission = Admission(
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
        """Queue a request that fits the pool alone (see `fits_alone(...)`)."""
        request.rank = initial_rank(request, self.config)
        self.ledger.begin(request.request_id, request.arrival_time, ahead=len(self.waiting), running=len(self.running))
        self.waiting.add(request, short=self.admission.is_short(request))
        self.admission.changed()

    def fits_alone(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Return True if the pool can hold a request of this size alone."""
        most = num_prompt_tokens + max(0, max_tokens - 1)
        return self.kv.layout.num_blocks(most) <= self.kv.max_request_blocks

    def expire_pins(self) -> None:
        if self.kv.expire(self._clock()):
            self.admission.changed()

    def unpin(self, pin_id: str) -> None:
        self.kv.pins.delete(pin_id)
        self.admission.changed()

    def kv_usage(self) -> KVUsage:
        """Return how KV memory is used.

        KV that a step computes counts as written once `advance(...)` is called for the step.
        """
        return self.kv.usage(self.running)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def idle_until(self) -> float | None:
        first = self.waiting.first_arrival
        if self.running or first is None or len(self.waiting) >= self.config.min_schedule_batch:
            return None
        until = first.arrival_time + self.config.schedule_window
        return until if self._clock() < until else None

    # -- one step ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan one step: secure memory for running requests, then schedule decodes, partial prefills and admissions.

        The plan has no rows if nothing can be computed before the step in flight is settled.
        """
        self.admission.control.step_limit = self.pacer.limit
        demand = self._demand()
        if self._in_flight is not None and self._needs_results(demand):
            return StepPlan(())
        self.expire_pins()
        self.admission.new_step()
        preempted = self._secure_memory(demand) or self._has_abandoned
        self._has_abandoned = False
        if not preempted and demand.victim is not None:
            first = self.waiting.first
            num_blocks = self.kv.layout.num_blocks(first.num_tokens + self.predictor.remaining(first))
            self._preempt(demand.victim, "class", num_blocks)
            preempted = True
        decodes: list[Request] = []
        behind: list[Request] = []
        for request in self.running:
            uncomputed = len(request.token_ids) + request.num_pending_tokens - request.num_computed_tokens
            if uncomputed == 1:
                decodes.append(request)
            elif uncomputed:
                behind.append(request)
        budget = self.pacer.next_budget(decodes, behind, self.admission.num_startable)
        if decodes:
            self.admission.backfill.prefill_per_step = max(1, budget - len(decodes))
        step = StepBuilder(budget, self.kv, self.ledger, self.pacer.pace)
        step.decode(decodes)
        behind.sort(key=lambda r: (r.rank, r.request_id))
        admit = self.admission.worth_trying and (not preempted or not self.running)
        reason = self._prefill(step, behind, admit=admit)
        self.waiting.times.now_waiting_for(reason if self.waiting else None)
        num_drafted = 0
        if self.drafter is not None and self._in_flight is None:
            num_drafted = step.draft(self.drafter.choose(decodes, step.left))
        if not (rows := step.rows()):
            return StepPlan(())
        finished, self._finished = self._finished, []
        moves = self.kv.take_state_moves()
        return StepPlan(rows, finished, self.kv.copies.take(), *self.kv.swap.take(), num_drafted, moves)

    def _demand(self) -> Demand:
        growing = [  # block_table is faster than `table`
            r
            for r in self.running
            if len(r.token_ids) + r.num_pending_tokens > r.block_table.capacity  # type: ignore[union-attr]
        ]
        missing = sum(request.table.num_growing(request.num_tokens) for request in growing)
        victim = None
        if self.admission.is_full and self.waiting:
            victim = self.preemption.choose_victim_for(self.waiting.first, self.running)
        return Demand(growing, missing, victim)

    def _needs_results(self, demand: Demand) -> bool:
        """Return True if the next plan must wait until the step in flight is settled."""
        # A reason is a possible preemption: pending tokens could not be computed again, and the results may end a
        # request, which frees its blocks. Other reasons are penalties, grammars and drafts, which depend on pending
        # tokens.
        if demand.victim is not None:
            return True
        if any(request.num_pending_tokens and request.depends_on_tokens for request in self.running):
            return True
        if self._in_flight is not None and self._in_flight.num_draft_tokens:
            return True
        if self.drafter is not None:
            decodes = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1]
            if self.drafter.choose(decodes, self.pacer.limit - len(decodes), ahead=True):
                return True
        # In sliding-window layers, a request may need one block more until `settle` releases one.
        spare = self.kv.layout.window_groups * len(demand.growing)
        return demand.missing + spare > self.kv.pool.num_available

    def _secure_memory(self, demand: Demand) -> bool:
        """Give running requests blocks for all their tokens. Return True if requests were preempted for this."""
        growing, missing, _ = demand
        preempted = False
        while missing > self.kv.pool.num_available:
            victim = self.preemption.choose_victim(self.running)
            missing -= victim.table.num_growing(victim.num_tokens)
            self._preempt(victim, "memory")
            preempted = True
        for request in growing:
            if request.status is RequestStatus.RUNNING:
                self.kv.blocks.grow(request)
        return preempted

    def _preempt(self, request: Request, reason: str, demand: int | None = None) -> None:
        assert not request.num_pending_tokens, "a request cannot be preempted while a step samples its next token"
        # Copying KV to host memory takes device memory, of which the failed step has just run out.
        loss = self.preemption.decide(request, demand, may_swap=reason != "step_memory")
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
        self.admission.exclude(request)
        if reason == "memory":
            self.counters.num_headroom_changes += self.admission.control.preempted(len(self.running))
        self.waiting.add_at_head_of_class(request, short=self.admission.is_short(request))

    def _prefill(self, step: StepBuilder, behind: list[Request], *, admit: bool) -> WaitReason:
        """Schedule prefills with the tokens that decodes leave in the budget, and admit requests if `admit` is True.

        `behind` are the running requests with more than one uncomputed token, sorted by rank. Returns why the first
        request that still waits was not admitted.
        """
        lane = int(self.config.fast_lane_share * step.left)
        for request in behind:
            if lane > 0 and self.admission.is_short(request):
                lane -= step.give(request, lane)
        admitted = self.admission.admit_short_ones(step, lane) if admit else []
        for request in behind:
            step.give(request, step.left)
        if admit and self.waiting and step.left > 0:
            self.admission.admit_in_order(step)
        for request in admitted:
            step.give(request, step.left)
        return self.admission.wait_reason(step)

    # -- after the step ---------------------------------------------------------------------------------------

    def advance(self, plan: StepPlan) -> None:
        """Count the tokens of a launched plan as computed, and the tokens that it samples as pending."""
        # A token with which its request reaches max_tokens is not pending, because no step will compute it. So no later
        # step has a row of a request that is sure to end.
        assert self._in_flight is None, "settle the step in flight first"
        self._in_flight = plan
        running = RequestStatus.RUNNING
        for request, _, num_tokens, _, sample, draft, _ in _rows_of(plan):
            if request.status is running:
                request.num_computed_tokens += num_tokens - len(draft)
                if sample and len(request.token_ids) + 1 - request.num_prompt_tokens < request.sampling.max_tokens:
                    request.num_pending_tokens = 1

    def settle(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Apply the result of an advanced plan to its requests. Requests that end release their blocks.

        A request with stop strings that its draft ends only gets its `finish_reason`. The caller calls `finish(...)`
        for it, because a stop string may end it earlier.
        """
        assert self._in_flight is plan
        self._in_flight = None
        self.preemption.costs.learn(plan, result)
        self.pacer.learn(plan, result.elapsed - result.swap_elapsed)
        updates = []
        running = RequestStatus.RUNNING
        for (request, start, _, _, _, draft, _), row_result in zip(_rows_of(plan), result.rows, strict=True):
            if request.status is not running:
                continue
            request.num_pending_tokens = 0
            if request.matcher is not None and row_result.token_id is not None:
                row_result = matched(request.matcher, row_result)
            updates.append(_new_update((request, start, row_result)))
            reason = accept(request, draft, row_result) if draft else None
            if draft and self.drafter is not None:
                self.drafter.settled(request, draft, row_result)
            if (row_result.last if draft else row_result).error is not None:
                reason = FinishReason.ERROR
            else:
                assert request.block_table is not None  # faster than `request.table`, for every row of every step
                if request.num_computed_tokens >= request.block_table.commit_at:
                    self.kv.commit(request)
                if not draft:
                    if (token_id := row_result.token_id) is not None:
                        request.token_ids.append(token_id)
                    reason = reason_to_end(request, token_id)
                elif reason is None:
                    self.kv.blocks.take_back(request)
            if reason is not None and draft and request.sampling.stop:
                request.finish_reason = reason
            elif reason is not None:
                self.finish(request, reason)
        return updates

    def abandon(self, plan: StepPlan, following: StepPlan | None = None) -> int:
        """Undo an advanced plan whose step ran out of memory. Return how many running requests were preempted.

        `following` is the plan that was launched after `plan`, if there is one; it is undone too. Later steps compute
        the tokens again, with at most half as many tokens per step.
        """
        # The steps may have done any part of their work. The KV that they computed is in blocks that no lookup finds.
        # The KV that they copied may be incomplete, so each request into whose blocks the steps were to copy KV is
        # preempted, and KV that the steps were to save in host memory is dropped. The steps may have advanced recurrent
        # states, so each request with such a state is preempted too. Further requests are preempted until
        # one token of each running request fits in a step.
        assert self._in_flight is plan
        self._in_flight = None
        for request, _, num_tokens, _, _, draft, _ in _rows_of(plan):
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens -= num_tokens - len(draft)
                request.num_pending_tokens = 0
                if draft:
                    self.kv.blocks.take_back(request)
        undone = [plan] if following is None else [plan, following]
        self._finished[:0] = [request_id for each in undone for request_id in each.finished]
        saved = {host for each in undone for _, host in each.swap_out}
        saved_states = {host for each in undone for _, host in each.state_moves.swap_out}
        for request in self.waiting:
            if request.swapped is not None and not (
                saved.isdisjoint(request.swapped.host_blocks) and saved_states.isdisjoint(request.swapped.host_states)
            ):
                self.kv.swap.discard(request)
                request.status = RequestStatus.WAITING
        before = self.counters.num_preemptions
        copied = {block for each in undone for _, block in (*each.copies, *each.swap_in)}
        changed = {slot for each in undone for slot in each.changed_states()}
        for request in list(self.running):
            state_kept = request.state is None or request.state.slot not in changed
            if state_kept and copied.isdisjoint(request.table.held_blocks()):
                self.kv.blocks.trim(request)
            else:
                self._preempt(request, "step_memory")
        self.pacer.lower(plan.num_tokens)
        while len(self.running) > self.pacer.limit:
            self._preempt(self.preemption.choose_victim(self.running), "step_memory")
        self._has_abandoned = True
        return self.counters.num_preemptions - before

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request and release its blocks. Do nothing if the request has already finished."""
        # A launched step may still use these blocks. They can be reused at once, because an executor computes steps and
        # copies in the order of their launches. No lookup finds the KV that the launched step writes, because only
        # settled tokens are committed.
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.release(request)
        else:
            self.waiting.remove(request)
            self.kv.swap.discard(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.predictor.learn(request)
        if self.drafter is not None:
            self.drafter.forget(request)
        self.ledger.note(request.request_id, "finished", reason=reason.value, output_tokens=request.num_output_tokens)
        self.ledger.end(request.request_id)
        self.admission.backfill.forget(request)
        self.admission.changed()
        self._finished.append(request.request_id)

    def check_integrity(self) -> None:
        self.kv.check_integrity(self.running, self.waiting)
        assert all(r.status is RequestStatus.RUNNING and r.swapped is None for r in self.running)
        assert self._in_flight is not None or not any(r.num_pending_tokens for r in (*self.running, *self.waiting))
        for request in self.waiting:
            assert request.block_table is None
            expected = RequestStatus.WAITING if request.swapped is None else RequestStatus.SWAPPED
            assert request.status is expected


def _rows_of(plan: StepPlan) -> Sequence[tuple[Request, int, int, object, bool, tuple[int, ...], object]]:
    return cast("Sequence[tuple[Request, int, int, object, bool, tuple[int, ...], object]]", plan.rows)
