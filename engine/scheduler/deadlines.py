"""Deadlines: when the first token of a new request is predicted, and which requests will certainly miss theirs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llmsched.engine.errors import DeadlineError
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.request import Request, RequestStatus
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.engine.scheduler.waiting_queue import initial_rank

#: A request counts as hopeless if the time that is left is less than this share of the least time that it needs.
CERTAIN = 0.5


class _StepTimes(NamedTuple):
    """Seconds of a step, and the seconds that one prefill token and one decoding request add to it."""

    step: float
    prefill_token: float
    decode: float


class Deadlines:
    """Checker of requests' deadlines. It predicts times with the scheduler's step-time model.

    Without a trusted model (after few steps, and with baseline policies), first tokens are not predicted, and requests
    are hopeless only once their deadline has passed.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._watched: set[Request] = set()

    def watch(self, request: Request) -> None:
        if request.deadline < math.inf:
            self._watched.add(request)

    def check(self, new: Sequence[Request], deadline: float) -> None:
        """Raise DeadlineError if `deadline` has passed or the first tokens of `new` requests are predicted after it.

        The prediction assumes that the requests are queued now.
        """
        predicted = self.seconds_to_first_token(new)
        needed, left = predicted or 0.0, deadline - self._clock()
        if needed > left:
            late = f"is in {max(0.0, left):.3g} s, but the first token is predicted in {needed:.3g} s"
            raise DeadlineError(
                f"the deadline {'has passed' if predicted is None else late}; "
                "allow more time, or send the request again later",
                max(1.0, needed - max(0.0, left)),
            )

    def seconds_to_first_token(self, new: Sequence[Request]) -> float | None:
        """Predict the seconds until all `new` requests, if queued now, have their first token.

        Returns None if the step-time model is not trusted yet.
        """
        # The running requests are assumed to end as predicted, and those ahead in the queue to find as much of their
        # prompts in the prefix cache as earlier ones did.
        scheduler, last = self._scheduler, new[-1]
        if not scheduler.pacer.model.trusted:
            return None
        rank, counters = initial_rank(last, scheduler.config), scheduler.counters
        ahead = [request for request in scheduler.waiting if request.rank <= rank]
        behind = {request: request.num_tokens - request.num_computed_tokens for request in scheduler.running}
        decodes = [request for request, count in behind.items() if count == 1]
        per_step = scheduler.admission.backfill.prefill_per_step if decodes else scheduler.pacer.limit
        own = sum(request.num_tokens - scheduler.kv.prefix_cache.find(request).num_tokens for request in new)
        uncached = 1 - counters.prefix_hit_tokens / max(1, counters.prefix_queried_tokens)
        before = sum(count for request, count in behind.items() if count > 1 and request.rank <= rank)
        before += math.ceil(uncached * sum(request.num_tokens for request in ahead))
        if scheduler.admission.is_short(last):  # it overtakes longer requests, but the steps also compute their tokens
            ahead = [request for request in scheduler.waiting.short_ones(len(ahead)) if request.rank <= rank]
            steps = math.ceil((own + uncached * sum(request.num_tokens for request in ahead)) / per_step)
        else:
            steps = math.ceil((before + own) / per_step)
        steps = max(steps, self._steps_until_room([*ahead, *new], behind, per_step) + math.ceil(own / per_step))
        kv_tokens = sum(request.num_tokens for request in decodes)
        step = scheduler.pacer.model.predict(StepShape(0, len(decodes), kv_tokens))
        return steps * step + min(before + own, steps * per_step) * self._step_times().prefill_token

    def _steps_until_room(self, queue: Sequence[Request], running: dict[Request, int], per_step: int) -> int:
        """Return the number of steps until the last request of `queue` has a place and memory for its prompt.

        `running` has the number of uncomputed tokens of each running request.
        """
        kv, control = self._scheduler.kv, self._scheduler.admission.control

        drafter = self._scheduler.drafter
        per_decode = 1.0 if drafter is None else drafter.tokens_per_decode(running)

        def num_steps(request: Request, uncomputed: int) -> int:
            remaining = self._scheduler.predictor.remaining(request)
            return math.ceil(uncomputed / per_step) + math.ceil(remaining / per_decode)

        ends = [(num_steps(request, count), request.table.num_blocks) for request, count in running.items()]
        heapq.heapify(ends)
        places = control.max_running - len(ends)
        free = kv.pool.num_available - int(control.headroom * kv.pool.num_blocks)
        now = 0
        for request in queue:
            blocks = kv.layout.num_blocks(request.num_tokens)
            while ends and (places <= 0 or blocks > free):
                now, freed = heapq.heappop(ends)
                places, free = places + 1, free + freed
            places, free = places - 1, free - blocks
            heapq.heappush(ends, (now + num_steps(request, request.num_tokens), blocks))
        return now

    def take_hopeless(self) -> Iterator[tuple[Request, str]]:
        """Yield each request that will certainly miss its deadline, with the reason, and watch it no longer."""
        if not self._watched:
            return
        self._watched = {request for request in self._watched if request.status is not RequestStatus.FINISHED}
        now, times = self._clock(), self._step_times()
        for request in list(self._watched):
            left = request.deadline - now
            if left <= 0:
                reason = "its deadline has passed"
            elif (needed := self._least_seconds(request, times, left)) * CERTAIN > left:
                reason = f"its deadline is in {left:.3g} s, but it needs at least {needed:.3g} s more"
            else:
                continue
            self._watched.remove(request)
            yield request, f"{reason} ({request.num_output_tokens} output tokens so far)"

    def _least_seconds(self, request: Request, times: _StepTimes, left: float) -> float:
        """Return the least time that the request still needs, as if no other request ran."""
        sampling, scheduler = request.sampling, self._scheduler
        has_other_ends = sampling.stop or sampling.stop_token_ids or sampling.grammar
        all_tokens = sampling.ignore_eos and not has_other_ends
        least = sampling.max_tokens if all_tokens else max(1, sampling.min_tokens)
        more = max(0, least - request.num_output_tokens)
        uncomputed = request.num_tokens - request.num_computed_tokens
        most_per_decode = 1 if scheduler.drafter is None else 1 + scheduler.config.most_draft_tokens

        def decodes(tokens: int) -> float:
            return math.ceil(tokens / most_per_decode) * (times.step + times.decode)

        if request.status is RequestStatus.RUNNING and uncomputed <= 1:
            return decodes(more)

        def prefill(tokens: int) -> float:
            return math.ceil(tokens / scheduler.pacer.limit) * times.step + tokens * times.prefill_token

        later = decodes(max(0, more - 1))
        if request.status is RequestStatus.SWAPPED:
            return later
        if request.status is RequestStatus.WAITING and (prefill(uncomputed) + later) * CERTAIN > left:
            uncomputed -= scheduler.kv.prefix_cache.find(request).num_tokens
        return prefill(uncomputed) + later

    def _step_times(self) -> _StepTimes:
        model = self._scheduler.pacer.model
        if not model.trusted:
            return _StepTimes(0.0, 0.0, 0.0)
        step = model.predict(StepShape(0, 0, 0))
        prefill = (model.predict(StepShape(1000, 0, 0)) - step) / 1000
        return _StepTimes(step, prefill, model.predict(StepShape(0, 1, 0)) - step)
