"""Simulated engine: the scheduler and KV management of `Engine`, with a virtual clock in place of a device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import StepCost, decode_shape
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock, invented_token
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler.scheduler import Scheduler, Update
from llmsched.engine.step_loop import StepLoop


class SimulatedEngine(StepLoop):
    """Scheduler and KV memory of an engine on a virtual clock that starts at 0. Every output has max_tokens tokens.

    `per_swapped_block` is the time in seconds to copy one KV block to or from host memory.
    """

    clock: VirtualClock

    def __init__(
        self, config: ResolvedConfig, kv: KVManager, cost: StepCost, *, per_swapped_block: float = 0.0
    ) -> None:
        if config.speculative != "off":
            raise ConfigError(
                "speculative",
                f"{config.speculative} cannot be simulated, because a simulation has no text; leave it off",
            )
        self._cost = cost
        clock = VirtualClock()
        executor = SimulatedExecutor(cost, clock, per_swapped_block=per_swapped_block)
        super().__init__(config, kv, executor, clock)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, arrival_time: float) -> Request:
        """Queue a request that arrived at `arrival_time`, which must not be later than the virtual clock.

        Raises RequestError for a request that can never be served, and QueueFullError if too many requests wait.
        """
        self.check_length(len(prompt), max_tokens)
        self.check_queue(len(self.scheduler.waiting), 1)
        request = Request(
            request_id=request_id,
            # Four bytes a token instead of forty: a queue of long prompts holds tens of millions of tokens.
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
        self.scheduler.finish(request, FinishReason.ABORT)

    def wait_until(self, time: float) -> None:
        """Advance the clock to `time` without computing anything; do nothing if the clock is past `time`."""
        self.clock.now = max(self.clock.now, time)

    def skip_decodes(self, until: float) -> list[float]:
        """Simulate the next uneventful steps that begin before `until`. Return the time at which each step ends.

        In these steps each running request gets a token, and no request needs a block, fills a block, or ends. Each has
        the same effect as a call of `step()`, but takes a fraction of the time.
        """
        times: list[float] = []
        scheduler, clock = self.scheduler, self.clock
        if not (most := _num_uneventful_steps(scheduler)):
            return times
        running, tokens = scheduler.running, [invented_token(r.request_id) for r in scheduler.running]
        ends = [request.num_computed_tokens for request in running]
        while len(times) < most and clock.now < until:
            ends = [end + 1 for end in ends]
            shape = decode_shape(ends, self._cost.window)
            clock.now += (seconds := self._cost.seconds(shape))
            scheduler.preemption.costs.learn_decodes(seconds)
            scheduler.pacer.learn_decodes(shape, seconds)
            times.append(clock.now)
            for request, token_id in zip(running, tokens, strict=True):
                request.token_ids.append(token_id)
                request.num_computed_tokens += 1
            if self.on_step is not None:
                self.on_step(scheduler.kv_usage())
        return times

    def step(self) -> list[Update]:
        """Simulate one step, advance the clock by its duration, and return the update of each request in the step."""
        return self.run_step()[1]


def _num_uneventful_steps(scheduler: Scheduler) -> int:
    if scheduler.waiting or scheduler.pacer.limit < scheduler.config.max_num_batched_tokens:
        return 0
    return max(0, min((_num_uneventful_tokens(request) for request in scheduler.running), default=0))


def _num_uneventful_tokens(request: Request) -> int:
    table, num_tokens = request.table, len(request.token_ids)
    if num_tokens - request.num_computed_tokens != 1:
        return 0
    before_end = request.sampling.max_tokens - request.num_output_tokens - 1
    return min(table.capacity + 1 - num_tokens, table.commit_at - num_tokens, before_end)
