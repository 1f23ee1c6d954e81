"""Observer of a scheduler that checks its starvation bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fakes import Harness

from llmsched.engine.request import Request


@dataclass
class Wait:
    """Wait of one request in the queue.

    `began` is the number of steps before the wait. `recomputed` is the number of tokens that the scheduler had
    recomputed before it. `there_when_it_came` are the requests that were in the queue when the wait began. `ahead` are
    all requests that were ahead of the waiting one at some time. `passed_by` are the requests behind it that were
    admitted before it. `ran` are the requests that ran during the wait.
    """

    there_when_it_came: set[Request]
    began: int
    recomputed: int
    ran: set[Request]
    ahead: set[Request] = field(default_factory=set)
    passed_by: list[Request] = field(default_factory=list)


class Witness:
    """Observer of a scheduler's admissions. It checks the starvation bound at each admission."""

    def __init__(self, harness: Harness) -> None:
        self.scheduler = harness.scheduler
        self.plans = harness.executor.plans
        self.max_passes = harness.scheduler.config.max_passes
        self.waits: dict[Request, Wait] = {}
        self.most_passes = 0
        self.tightest = 0.0
        start = self.scheduler.admission.start

        def watched(request: Request, hit: Any) -> Any:
            self.see()
            self.admitted(request)
            return start(request, hit)

        self.scheduler.admission.start = watched  # type: ignore[method-assign]

    def see(self) -> None:
        """Record the waiting requests and their order."""
        queue = list(self.scheduler.waiting)
        for request in queue:
            if request not in self.waits:
                recomputed, running = self.scheduler.counters.recomputed_tokens, set(self.scheduler.running)
                self.waits[request] = Wait(set(queue), len(self.plans), recomputed, running)
        for place, request in enumerate(queue):
            self.waits[request].ahead.update(queue[:place])

    def admitted(self, request: Request) -> None:
        queue = list(self.scheduler.waiting)
        for other in queue[: queue.index(request)]:
            self.waits[other].passed_by.append(request)
            self.check(other, self.waits[other])
        wait = self.waits.pop(request)
        self.check_those_ahead(request, wait)
        self.check_steps(wait)
        for other in self.waits.values():
            other.ran.add(request)
        bound = self.max_passes * (1 + len(wait.ahead))
        self.tightest = max(self.tightest, len(wait.passed_by) / bound if bound else 0.0)
        self.most_passes = max(self.most_passes, request.num_passed)

    def ended(self, request: Request) -> None:
        """Stop observing a request that ended."""
        self.waits.pop(request, None)

    def check(self, request: Request, wait: Wait) -> None:
        assert len(wait.passed_by) <= self.max_passes * (1 + len(wait.ahead)), request.request_id
        assert request.num_passed <= self.max_passes

    def check_steps(self, wait: Wait) -> None:
        """Check that the steps during the wait computed at least one token each on average."""
        tokens = sum(other.num_prompt_tokens + other.sampling.max_tokens for other in wait.ran)
        tokens += self.scheduler.counters.recomputed_tokens - wait.recomputed
        steps = len(self.plans) - wait.began
        assert steps <= tokens, f"waited for {steps} steps, but the requests that ran had only {tokens} tokens"

    def check_those_ahead(self, request: Request, wait: Wait) -> None:
        """Check that a later request got ahead of `request` only by its priority or because it had been preempted."""
        if request.num_preemptions:
            return
        for other in wait.ahead - wait.there_when_it_came:
            levels = request.priority - other.priority
            assert (
                other.num_preemptions
                or other.arrival_time < request.arrival_time + levels * self.scheduler.config.priority_step
            )
