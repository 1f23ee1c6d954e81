"""The engine without a model and text, on a virtual clock: its steps take the time that a cost model says.

Scheduling and KV memory are decided by the same code as in `Engine`. Output lengths are given by max_tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.executor.cost import StepCost
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.request import FinishReason, Request, SamplingParams
from llmsched.engine.scheduler.scheduler import Update
from llmsched.engine.step_loop import StepLoop


class SimulatedEngine(StepLoop):
    """Scheduler and KV memory of an engine on a virtual clock that starts at 0.

    `cost` is the duration of a step, `per_swapped_block` the seconds that a block takes to or from host memory.
    """

    clock: VirtualClock

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
        clock = VirtualClock()
        executor = SimulatedExecutor(cost, clock, per_swapped_block=per_swapped_block)
        super().__init__(config, num_blocks, executor, clock, swap=swap, layout=layout)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, arrival_time: float) -> Request:
        """Queue a request that arrived at `arrival_time`, which must not be in the future.

        Raises RequestError for a request that can never be served, QueueFullError if too many requests wait.
        """
        self.check_length(len(prompt), max_tokens)
        self.check_queue(len(self.scheduler.waiting), 1)
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
        """End a request in any state."""
        self.scheduler.finish(request, FinishReason.ABORT)

    def wait_until(self, time: float) -> None:
        """Advance the clock to `time` without computing anything."""
        self.clock.now = max(self.clock.now, time)

    def step(self) -> list[Update]:
        """Compute one step, which advances the clock, and return what each request gained."""
        return self.run_step()[1]
