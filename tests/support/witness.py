"""Looks on while a scheduler works: whether the bound that it states for those who wait holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fakes import Harness

from llmsched.engine.request import Request


@dataclass
class Wait:
    """What happened while a request waited: those of a smaller rank that waited too, the others that passed it, and all
    that ran, from step `began` on.
    """

    there_when_it_came: set[Request]
    began: int
    recomputed: int
    ran: set[Request]
    ahead: set[Request] = field(default_factory=set)
    passed_by: list[Request] = field(default_factory=list)


class Witness:
    """Looks on while a scheduler admits; checks the bound at every admission."""

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
        """Note who waits now, in front of whom."""
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
        """It ended while it waited, or after; it waits no longer."""
        self.waits.pop(request, None)

    def check(self, request: Request, wait: Wait) -> None:
        assert len(wait.passed_by) <= self.max_passes * (1 + len(wait.ahead)), request.request_id
        assert request.num_passed <= self.max_passes

    def check_steps(self, wait: Wait) -> None:
        """Each computed a token of theirs at least."""
        tokens = sum(other.num_prompt_tokens + other.sampling.max_tokens for other in wait.ran)
        tokens += self.scheduler.counters.recomputed_tokens - wait.recomputed
        steps = len(self.plans) - wait.began
        assert steps <= tokens, f"waited for {steps} steps, while those that ran had {tokens} tokens"

    def check_those_ahead(self, request: Request, wait: Wait) -> None:
        """Why each of them had a smaller rank."""
        if request.num_preemptions:
            return
        for other in wait.ahead - wait.there_when_it_came:
            levels = request.priority - other.priority
            assert (
                other.num_preemptions
                or other.arrival_time < request.arrival_time + levels * self.scheduler.config.priority_step
            )
