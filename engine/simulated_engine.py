"""Simulated engine: the scheduler and KV management of `Engine`, with a virtual clock in place of a device."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from typing import cast

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import StepCost, StepShape, decode_shape
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock, invented_token
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler.scheduler import Scheduler, Update
from llmsched.engine.step_loop import StepLoop

#: Most uneventful steps that are predicted at a time.
_MOST_AHEAD = 16


class SimulatedEngine(StepLoop):
    """Scheduler and KV memory of an engine on a virtual clock that starts at 0. Every output has max_tokens tokens.

    A step is uneventful if each running request decodes, none waits and none ends. `look_ahead` predicts such steps,
    and `catch_up` simulates them later, in a fraction of the time that `step` takes. The prediction is dropped if a
    request is added or aborted.

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
        self._ahead: deque[tuple[StepShape, float]] = deque()  # predicted steps, with their seconds
        self._rows: list[tuple[Request, int]] = []  # requests of the predicted steps, with the token that each gets
        self._decoded: list[float] = []

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
        self._ahead.clear()
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self._ahead.clear()
        self.scheduler.finish(request, FinishReason.ABORT)

    def wait_until(self, time: float) -> None:
        """Simulate the predicted steps that begin before `time`. Then advance the clock to `time` if it is earlier."""
        self.catch_up(time)
        self.clock.now = max(self.clock.now, time)

    def step(self) -> list[Update]:
        """Simulate one step, advance the clock by its duration, and return the update of each request in the step."""
        self._ahead.clear()
        return self.run_step()[1]

    # -- uneventful steps -------------------------------------------------------------------------------------

    def look_ahead(self, before: float = math.inf) -> float:
        """Predict the next uneventful steps, of which all end before `before`. Return when the step after them begins.

        The prediction replaces an earlier one. It may stop early, so the step after it may be uneventful too.
        """
        self._ahead.clear()
        end = self.clock.now
        if not (most := _num_uneventful_steps(self.scheduler)):
            return end
        self._rows = [(request, invented_token(request.request_id)) for request in self.scheduler.running]
        ends = [request.num_computed_tokens for request, _ in self._rows]
        for _ in range(most):
            ends = [each + 1 for each in ends]
            shape = decode_shape(ends, self._cost.window)
            seconds = self._cost.seconds(shape)
            if end + seconds >= before:
                break
            end += seconds
            self._ahead.append((shape, seconds))
        return end

    def catch_up(self, until: float) -> None:
        """Simulate the predicted steps that begin before `until`. The effects are those of calls of `step()`."""
        while self._ahead and self.clock.now < until:
            self._decode(*self._ahead.popleft())

    def take_decoded(self) -> list[float]:
        """Return the time at which each step ended that `catch_up` has simulated since the last call."""
        decoded, self._decoded = self._decoded, []
        return decoded

    def _decode(self, shape: StepShape, seconds: float) -> None:
        scheduler, rows = self.scheduler, self._rows
        growing = [r for r, _ in rows if len(r.token_ids) > r.block_table.capacity]  # type: ignore[union-attr]
        if growing:
            scheduler.expire_pins()
            for request in growing:
                scheduler.kv.blocks.grow(request)
        scheduler.pacer.next_budget(scheduler.running, (), 0)
        self.clock.now += seconds
        self._decoded.append(self.clock.now)
        scheduler.preemption.costs.learn_decodes(seconds)
        scheduler.pacer.learn_decodes(shape, seconds)
        full = []
        for request, _ in rows:
            request.num_computed_tokens += 1
            if request.num_computed_tokens >= request.block_table.commit_at:  # type: ignore[union-attr]
                full.append(request)
        if self.on_step is not None:
            self.on_step(scheduler.kv_usage())
        for request in full:
            scheduler.kv.commit(request)
        for request, token_id in rows:
            request.token_ids.append(token_id)


def _num_uneventful_steps(scheduler: Scheduler) -> int:
    running, kv = scheduler.running, scheduler.kv
    if not running or scheduler.waiting or scheduler.pacer.limit < scheduler.config.max_num_batched_tokens:
        return 0
    if any(len(request.token_ids) - request.num_computed_tokens != 1 for request in running):
        return 0
    count = min(_MOST_AHEAD, *(request.sampling.max_tokens - request.num_output_tokens - 1 for request in running))
    if kv.states is not None:  # a state may be saved where a block is full
        count = min(count, *(request.table.commit_at - len(request.token_ids) for request in running))
    while count > 0 and sum(_num_growing(request, count) for request in running) > kv.pool.num_available:
        count //= 2
    return max(0, count)


def _num_growing(request: Request, count: int) -> int:
    """Return how many more blocks the request needs at most for `count` more tokens."""
    table, layout = request.table, request.table.layout
    width = layout.width(len(request.token_ids) + count)
    full = layout.full_groups * max(0, width - len(table))
    return full + (layout.window_groups * max(0, width - table.window_end) if layout.window_groups else 0)
