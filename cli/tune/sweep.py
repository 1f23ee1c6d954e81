"""Trying the settings one after another; whatever goes wrong with one is its result, never the end of the sweep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

from llmsched.cli.bench.inprocess import EngineTarget, running_engine
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.measure import Measurement
from llmsched.cli.bench.prompts import usable_ids
from llmsched.cli.bench.run import run_workload, warm_up
from llmsched.cli.tune.objective import Setting, Trial, failed_trial, judge
from llmsched.engine.config import EngineConfig
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

if TYPE_CHECKING:
    from llmsched.engine.service import AsyncEngine

_WARMUP_OUTPUT_LEN = 4
_IDLE_POLL_S = 0.01


class Runner(Protocol):
    """Measures one setting under the load of a round; an exception means that the setting does not work."""

    async def __call__(self, setting: Setting, round_index: int) -> Measurement: ...


async def sweep(
    settings: Sequence[Setting],
    rounds: int,
    run: Runner,
    slo: Slo,
    *,
    time_limit: float = math.inf,
    on_trial: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Measure every setting once a round, so that drift of the machine falls on all alike, and judge each.

    A setting that failed in one round is not tried in the next. A round after the first is begun only if, at the pace
    so far, it ends within `time_limit` (seconds).
    """
    now = asyncio.get_running_loop().time
    start = now()
    measured: dict[Setting, list[Measurement]] = {setting: [] for setting in settings}
    broken: dict[Setting, str] = {}
    for round_index in range(rounds):
        if round_index and (now() - start) * (round_index + 1) / round_index > time_limit:
            break
        for index, setting in enumerate(settings):
            if setting not in broken:
                try:
                    measured[setting].append(await run(setting, round_index))
                except Exception as problem:
                    broken[setting] = " ".join(f"{type(problem).__name__}: {problem}".split())
            on_trial(round_index * len(settings) + index + 1, rounds * len(settings))
    return [
        failed_trial(setting, broken[setting]) if setting in broken else judge(setting, measured[setting], slo)
        for setting in settings
    ]


class EngineRunner:
    """A Runner on one engine that is reconfigured between trials, and built anew only if it died.

    Every trial starts with an empty prefix cache, so none gains from the prompts of another.
    """

    def __init__(self, config: EngineConfig, workload: Load, timeout: float, progress: Progress) -> None:
        self._config = config
        self._workload = workload
        self._timeout = timeout
        self._progress = progress
        self._stack = AsyncExitStack()
        self._engine: AsyncEngine | None = None
        self._ids: list[int] = []
        self._warm: set[Setting] = set()

    async def engine(self) -> AsyncEngine:
        """The engine, built if there is none that works. Raises ModelError and ConfigError."""
        if self._engine is not None and not self._engine.healthy:
            await self.close()
        if self._engine is None:
            self._engine = await self._stack.enter_async_context(running_engine(self._config, self._progress))
            self._ids = usable_ids(self._engine.tokenizer, self._engine.model.vocab_size)
            self._warm.clear()
        return self._engine

    async def close(self) -> None:
        self._engine = None
        await self._stack.aclose()

    async def __call__(self, setting: Setting, round_index: int) -> Measurement:
        engine = await self.engine()
        await _until_idle(engine)
        await engine.reconfigure(
            max_num_batched_tokens=setting.max_num_batched_tokens, max_num_seqs=setting.max_num_seqs
        )
        target = EngineTarget(engine)
        if setting not in self._warm:
            await warm_up(
                target, self._workload, 1, ids=self._ids, timeout=self._timeout, output_len=_WARMUP_OUTPUT_LEN
            )
            self._warm.add(setting)
        await engine.reset_prefix_cache()
        workload = self._workload.with_seed(self._workload.seed + round_index)
        return await run_workload(target, workload, Slo(), ids=self._ids, timeout=self._timeout, progress=silent)


async def _until_idle(engine: AsyncEngine) -> None:
    """Wait for requests that a timeout has aborted to leave the engine."""
    while engine.healthy and (engine.stats().num_running or engine.stats().num_waiting):
        await asyncio.sleep(_IDLE_POLL_S)
