"""A whole load, simulated: requests arrive by a virtual clock at the real scheduler.

`SimulatedEngine` is an engine without model and text: what it decides is decided by the same scheduler and KV manager,
what it costs by a `StepCost`. `simulate` runs a list of requests through a scheduler of one's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Unpack, cast

from llmsched.engine.config import Limits, ResolvedConfig, check_limits
from llmsched.engine.executor.base import Executor, StepPlan
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, StepCost, VirtualClock
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.refusals import check_length, check_queue
from llmsched.engine.request import FinishReason, Request, SamplingParams
from llmsched.engine.scheduler.ledger import Entry
from llmsched.engine.scheduler.policies import make_scheduler
from llmsched.engine.scheduler.scheduler import Scheduler, Update


class SimulatedEngine:
    """The scheduler and KV manager of an engine on a virtual clock. Outputs are as long as max_tokens says.

    `cost` says how long a step takes, `per_swapped_block` how many seconds a block takes to or from host memory.
    `layout` is that of the KV cache (default: all layers keep all tokens).
    """

    def __init__(
        self,
        config: ResolvedConfig,
        num_blocks: int,
        cost: StepCost,
        *,
        swap: SwapSpace | None = None,
        layout: KVLayout | None = None,
        per_swapped_block: float = 0.0,
    ) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.scheduler = make_scheduler(make_kv(config, num_blocks, swap, layout), config, self.clock)
        self.executor: Executor = SimulatedExecutor(cost, self.clock, per_swapped_block=per_swapped_block)
        #: Sees how KV memory is used in each step, as `Engine.on_step`.
        self.on_step: Callable[[KVUsage], None] | None = None

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.counters.num_preemptions

    def reconfigure(self, **limits: Unpack[Limits]) -> None:
        """As Engine.reconfigure, before the first request."""
        check_limits(self.config, limits)
        self.scheduler.configure(**limits)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, arrival_time: float) -> Request:
        """Queue a request that came at `arrival_time`, which is not after now.

        Raises RequestError for what can never be served, QueueFullError when too many wait.
        """
        check_length(self.scheduler, self.config.max_model_len, len(prompt), max_tokens)
        check_queue(len(self.scheduler.waiting), 1, self.config.max_queue_size, lambda: 0.0)
        request = Request(
            request_id=request_id,
            # Four bytes a token instead of forty: a queue of long prompts holds tens of millions.
            token_ids=cast("list[int]", array("i", prompt)),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            seed=0,
            stop_ids=frozenset(),
            arrival_time=arrival_time,
        )
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is."""
        self.scheduler.finish(request, FinishReason.ABORT)

    def idle_until(self) -> float | None:
        """Until when a step would do nothing unless more requests come (coalescing), if that is so."""
        return self.scheduler.idle_until()

    def wait_until(self, time: float) -> None:
        """Let time pass in which nothing is computed."""
        self.clock.now = max(self.clock.now, time)

    def step(self) -> list[Update]:
        """One step of whatever is due; the clock stands at its end afterwards."""
        plan = self.scheduler.schedule()
        result = self.executor.execute(plan)
        if self.on_step is not None:
            self.on_step(self.scheduler.kv_use(plan))
        return self.scheduler.update(plan, result)

    def kv_use(self) -> KVUsage:
        """How KV memory is used now."""
        return self.scheduler.kv_use()

    def entries(self, request_id: str) -> list[Entry]:
        """What the scheduler decided about a request, in order; empty if it is unknown or long gone."""
        return self.scheduler.ledger.entries(request_id)


@dataclass(slots=True)
class SimulatedTimes:
    """Times of one request in virtual seconds: arrival, and each token."""

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
    """Run `requests`, each from its arrival_time on, until all have ended. `scheduler` tells time by `clock`."""
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
        updates = scheduler.update(plan, executor.execute(plan))
        for update in updates:
            if update.result.token_id is not None:
                times[update.request.request_id].token_times.append(clock.now)
        after_step(plan)
    return list(times.values())
