"""Simulated run of a list of requests on a scheduler and a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.request import Request
from llmsched.engine.scheduler.scheduler import Scheduler


class LinearCost(NamedTuple):
    """Linear cost of a step in seconds: a fixed part, and parts per prefill token, decoding sequence and KV token read.

    Sliding windows do not change the cost.
    """

    fixed: float
    per_prefill_token: float
    per_decode_seq: float
    per_kv_token: float

    @property
    def window(self) -> None: ...

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_decode_seq * shape.decode_seqs
            + self.per_kv_token * shape.kv_tokens
        )


@dataclass(slots=True)
class SimulatedTimes:
    """Times of one request in seconds of virtual time: its arrival, and each of its tokens."""

    request: Request
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.request.arrival_time

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def simulate(
    requests: Iterable[Request],
    scheduler: Scheduler,
    executor: SimulatedExecutor,
    clock: VirtualClock,
    after_step: Callable[[StepPlan], None] = lambda _: None,
) -> list[SimulatedTimes]:
    """Run `requests` until all have ended, and return their times. Each request arrives at its `arrival_time`.

    `clock` must be the clock of `scheduler` and `executor`. `after_step` is called with the plan of each step.
    """
    pending = sorted(requests, key=lambda request: request.arrival_time, reverse=True)
    times = {request.request_id: SimulatedTimes(request) for request in pending}
    while pending or scheduler.has_work():
        if not scheduler.has_work():
            clock.now = max(clock.now, pending[-1].arrival_time)
        while pending and pending[-1].arrival_time <= clock.now:
            scheduler.add(pending.pop())
        if (until := scheduler.idle_until()) is not None:
            clock.now = min([until, *(request.arrival_time for request in pending[-1:])])
            continue
        plan = scheduler.schedule()
        scheduler.advance(plan)
        updates = scheduler.settle(plan, executor.execute(plan))
        for update in updates:
            if update.result.token_id is not None:
                times[update.request.request_id].token_times.append(clock.now)
        after_step(plan)
    return list(times.values())
