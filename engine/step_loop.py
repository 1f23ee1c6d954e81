"""Step loop of the real and the simulated engine: schedule, launch, collect, settle."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Unpack

from llmsched.engine.config import Limits, ResolvedConfig, check_limits
from llmsched.engine.errors import ConfigError, QueueFullError, RequestError, is_out_of_memory, one_line
from llmsched.engine.executor.base import Executor, Pending, StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.scheduler.baselines import make_scheduler
from llmsched.engine.scheduler.scheduler import Update

logger = logging.getLogger(__name__)


class _LaunchedStep(NamedTuple):
    plan: StepPlan
    pending: Pending = None
    error: Exception | None = None


class StepLoop:
    """Base of Engine and SimulatedEngine: a scheduler that plans steps and an executor that computes them.

    With async_scheduling, if the executor supports it, the loop launches the next step before it waits for the results
    of the present one. So the device computes while the engine processes results. If the next plan depends on the
    results, the loop waits for them first.
    """

    #: Most attempts at a step that runs out of memory. Each has at most half of the tokens of the one before it.
    max_attempts: ClassVar[int] = 6

    def __init__(self, config: ResolvedConfig, kv: KVManager, executor: Executor, clock: Callable[[], float]) -> None:
        self.config = config
        self.executor = executor
        self.clock = clock
        self.scheduler = make_scheduler(kv, config, clock)
        #: Called after each step with the KV usage before finished requests free their blocks.
        self.on_step: Callable[[KVUsage], None] | None = None
        self._in_flight: _LaunchedStep | None = None

    def has_work(self) -> bool:
        """Return True if any request is running or waiting, or a step is in flight."""
        return self._in_flight is not None or self.scheduler.has_work()

    def idle_until(self) -> float | None:
        """Return the time (engine's clock) until which the next step waits for more requests; None if it does not wait.

        While no request runs, a step waits up to schedule_window seconds for min_schedule_batch requests.
        """
        return None if self._in_flight is not None else self.scheduler.idle_until()

    def reconfigure(self, **limits: Unpack[Limits]) -> None:
        """Change limits of steps.

        Raises ConfigError while requests run, and for a limit above the value for which memory was reserved.
        """
        if self.scheduler.running:
            raise ConfigError(next(iter(limits), "limits"), "cannot be changed while requests run; wait until they end")
        check_limits(self.config, limits)
        if self._in_flight is not None and self._in_flight.error is None:
            self._in_flight = None  # all its requests have ended
        self.scheduler.configure(**limits)

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise RequestError if a request exceeds max_model_len or would need more KV blocks than the engine has."""
        asked = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}"
        if num_prompt_tokens + max_tokens > self.config.max_model_len:
            raise RequestError(
                "max_tokens" if num_prompt_tokens < self.config.max_model_len else "prompt",
                f"the context of this server is {self.config.max_model_len} tokens; {asked}, "
                f"{num_prompt_tokens + max_tokens} in all; shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        if not self.scheduler.fits_alone(num_prompt_tokens, max_tokens):
            kv = self.scheduler.kv
            raise RequestError(
                "max_tokens",
                f"{asked}: that needs more than the {kv.pool.num_blocks} KV blocks of {kv.block_size} tokens "
                f"({kv.layout.longest(kv.pool.num_blocks)} tokens) that this server has",
                code="context_length_exceeded",
            )

    def check_queue(self, num_waiting: int, num_new: int) -> None:
        """Raise QueueFullError if `num_waiting` and `num_new` requests together exceed max_queue_size."""
        if num_waiting + num_new > self.config.max_queue_size:
            message = f"{num_waiting} requests are waiting; at most {self.config.max_queue_size} may"
            raise QueueFullError(message, self.retry_after())

    def retry_after(self) -> float:
        """Return the seconds after which a refused request may be sent again."""
        return 1.0

    def run_step(self) -> tuple[StepPlan, list[Update]]:
        """Compute a step and update the scheduler. Return the plan and the update of each request.

        If a step runs out of memory, on the device or the host, a smaller step is computed instead. After
        `self.max_attempts` such steps in a row, the last error is raised. The plan is empty if nothing is left to
        compute.
        """
        attempts = 0
        while True:
            step = self._in_flight or self._launch()
            self._in_flight = None
            if step is None:
                if self.scheduler.has_work():
                    raise RuntimeError(f"nothing to schedule with {len(self.scheduler.waiting)} requests waiting")
                return StepPlan(()), []
            self.scheduler.advance(step.plan)
            if self._may_look_ahead(step):
                self._in_flight = self._launch()
            try:
                result = self._collect(step)
            except Exception as error:
                attempts += 1
                if not is_out_of_memory(error) or attempts == self.max_attempts:
                    raise
                self._abandon(step.plan, error)
                step = None  # its error refers to the tensors of the step
                continue
            if self.on_step is not None:
                self.on_step(self.scheduler.kv_usage())
            return step.plan, self.scheduler.settle(step.plan, result)

    def _may_look_ahead(self, step: _LaunchedStep) -> bool:
        looks_ahead = self.executor.looks_ahead and self.config.async_scheduling
        return looks_ahead and step.error is None and self.scheduler.idle_until() is None

    def _launch(self) -> _LaunchedStep | None:
        # An error of the launch is raised when the step is collected, so that the results of the previous step are not
        # lost.
        plan = self.scheduler.schedule()
        if not plan.rows:
            return None
        try:
            return _LaunchedStep(plan, self.executor.launch(plan))
        except Exception as error:
            return _LaunchedStep(plan, error=error)

    def _collect(self, step: _LaunchedStep) -> StepResult:
        if step.error is not None:
            raise step.error
        return self.executor.collect(step.pending)

    def _abandon(self, plan: StepPlan, error: Exception) -> None:
        following, self._in_flight = self._in_flight, None
        preempted = self.scheduler.abandon(plan, None if following is None else following.plan)
        logger.warning(
            "out of memory in a step of %d tokens of %d requests (%s): steps have at most %d tokens now; %d requests "
            "were preempted and will be computed again",
            plan.num_tokens,
            len(plan.rows),
            one_line(error),
            self.scheduler.pacer.limit,
            preempted,
        )
