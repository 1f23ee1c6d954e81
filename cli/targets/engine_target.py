"""Engine in this process as a target of a load, without HTTP and with exact token counts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from llmsched.cli.figures.engine_counts import EngineCounts, scheduler_counts
from llmsched.cli.figures.kv_memory import KVMeter, TargetState, target_state
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord
from llmsched.cli.load.load import Load, PlannedRequest
from llmsched.cli.load.prompts import TextEncoder, TokenizerEncoder, usable_ids
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.cli.targets.load_run import run_workload, warm_up
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import EngineDeadError, LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance
from llmsched.engine.request import FinishReason
from llmsched.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmsched.engine.async_engine import AsyncEngine
    from llmsched.engine.core import Engine, Timeline


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    """Run an engine in a thread while the block runs, and yield it as an AsyncEngine."""
    from llmsched.engine.async_engine import AsyncEngine

    service = AsyncEngine(engine)
    service.start()
    try:
        yield service
    finally:
        await service.stop()


class EngineTarget:
    _numbers = itertools.count()

    in_process = True
    sample_interval = 0.1

    def __init__(self, engine: AsyncEngine) -> None:
        self.name = engine.core.model.name
        self.encode: TextEncoder | None = TokenizerEncoder(engine.core.tokenizer)
        self.meter: KVMeter | None = KVMeter()
        self._engine = engine
        self._adapters = engine.core.adapters or (None,)  # requests use them in turn
        engine.core.on_step = self.meter

    async def send(self, request: PlannedRequest, record: RequestRecord) -> None:
        now = asyncio.get_running_loop().time
        token_ids = request.prompt.token_ids
        assert token_ids is not None
        sampling = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        record.asked_tokens = request.output_len
        record.sent = now()
        try:
            record.request_id = f"bench-{next(self._numbers)}"
            adapter = self._adapters[request.index % len(self._adapters)]
            stream = self._engine.submit(record.request_id, token_ids, sampling, adapter=adapter)
            async with stream:
                async for output in stream:
                    record.chunks.append(Chunk(now(), output.text, len(output.token_ids)))
                    record.usage = ReportedUsage(
                        output.num_prompt_tokens, output.num_cached_tokens, output.num_output_tokens
                    )
                    record.finish_reason = output.finish_reason
                    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise RequestFailed(f"ended by {output.finish_reason}", output.error or "")
        except EngineDeadError as problem:
            raise RequestFailed("engine failed", str(problem)) from problem
        except LlmschedError as problem:
            raise RequestFailed("refused", str(problem)) from problem
        record.end = now()
        if not record.usage.output_tokens:
            raise RequestFailed("empty stream", "the request ended without a token")

    async def counts(self) -> EngineCounts:
        try:
            return await self._engine.call(lambda core: scheduler_counts(core.scheduler))
        except EngineDeadError:
            return EngineCounts(self._engine.stats().num_preemptions)

    async def state(self) -> TargetState | None:
        try:
            use = await self._engine.call(lambda core: core.scheduler.kv_usage())
        except EngineDeadError:
            return None
        stats, now = self._engine.stats(), asyncio.get_running_loop().time()
        return target_state(now, stats.num_running, stats.num_waiting, use)

    async def timelines(self, records: Sequence[RequestRecord]) -> list[Timeline | None]:
        try:
            names = [record.request_id or "" for record in records]
            told = await self._engine.call(lambda core: [core.explain(name) for name in names])
        except EngineDeadError:
            return [None] * len(records)
        return [choices[0] if choices else None for choices in told]

    def memory(self) -> MemoryParts | None:
        return None if self._engine.core.plan is None else self._engine.core.plan.parts


@asynccontextmanager
async def open_engine(config: EngineConfig, plan: RunPlan, progress: Progress) -> AsyncIterator[OpenTarget]:
    """Load a model into this process, warm it up, and yield it as a target. Raises ModelError and ConfigError."""
    from llmsched.engine.build import build_engine

    warmup = 1 if plan.warmup is None else plan.warmup
    async with running(build_engine(config, progress)) as engine:
        ids, target = usable_ids(engine.core.tokenizer, engine.core.model.vocab_size), EngineTarget(engine)
        await warm_up(target, plan.workload, warmup, ids=ids, timeout=plan.timeout)

        async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
            await until_idle(engine)
            await engine.call(lambda core: core.prefixes.reset())
            return await run_workload(
                target, workload, slo, ids=ids, timeout=plan.timeout, progress=progress, partial=plan.partial
            )

        yield OpenTarget(target.name, Provenance("in process"), warmup, measure, engine.core.config.chosen())


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until the engine has no request or has failed."""
    while engine.healthy and (engine.stats().num_running or engine.stats().num_waiting):
        await asyncio.sleep(0.01)
