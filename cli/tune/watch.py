"""What the steps of an engine took and held, noted while it serves."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from llmsched.cli.tune.knobs import PeakDemand
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.executor.cost import StepShape, StepTimeModel, shape_of

if TYPE_CHECKING:
    from llmsched.engine.core import Engine
    from llmsched.engine.simulated_engine import SimulatedEngine

#: Steps that are kept to learn from.
_KEPT = 4096
#: Steps before a fit says anything.
_ENOUGH = 32


class LearnedCost:
    """A StepCost fitted to steps of this engine; `overhead` are the seconds between two steps."""

    window: int | None = None

    def __init__(self, model: StepTimeModel, overhead: float) -> None:
        self._model = model
        self._overhead = overhead

    def seconds(self, shape: StepShape) -> float:
        return self._overhead + self._model.predict(shape)


class DemandWatch:
    """An Executor that has another compute, and remembers the peak demand: that of steps, before what ends with them
    is let go.
    """

    def __init__(self, engine: Engine | SimulatedEngine) -> None:
        self._executor = engine.executor
        self._scheduler = engine.scheduler
        self._preemptions = 0
        self.reset()
        engine.executor = self

    def reset(self) -> None:
        """Forget the peak."""
        self._running, self._used = 0, 0
        self._preemptions = self._scheduler.counters.num_preemptions

    def execute(self, plan: StepPlan) -> StepResult:
        self._running = max(self._running, len(self._scheduler.running))
        self._used = max(self._used, self._scheduler.kv.pool.num_used)
        return self._executor.execute(plan)

    def demand(self) -> PeakDemand:
        """The peak since `reset`."""
        preempted = self._scheduler.counters.num_preemptions > self._preemptions
        return PeakDemand(self._running, self._used / self._scheduler.kv.pool.num_blocks, preempted)


class StepWatch(DemandWatch):
    """One that remembers the shape and time of each step as well, which `reset` does not forget."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=_KEPT)
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._end: float | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = super().execute(plan)
        if self._end is not None:
            self._gaps.append(start - self._end)
        self._end = time.perf_counter()
        self._steps.append((shape_of(plan), result.elapsed - result.swap_elapsed))
        return result

    def cost(self) -> LearnedCost | None:
        """What steps take, from those seen; None before there are enough.

        Between steps of a busy engine lies what the scheduler and the outputs take: the median, because an idle one
        waits for requests as well.
        """
        if len(self._steps) < _ENOUGH:
            return None
        model = StepTimeModel()
        for shape, seconds in self._steps:
            model.learn(shape, seconds)
        return LearnedCost(model, median(self._gaps))
