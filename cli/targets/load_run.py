"""One run: warm up, send the load, read the counters, measure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from llmsched.cli.figures.kv_memory import KVMeter, TargetState
from llmsched.cli.figures.lag import Lag, loop_lags, settled_heap
from llmsched.cli.figures.live_figures import LiveFigures
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import CountTokens
from llmsched.cli.load.load import Load, run_load
from llmsched.cli.targets.sampling import sampled
from llmsched.cli.targets.target import Target
from llmsched.engine.latency import Slo
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.progress import Progress

#: Warm-up prompts must not be those of the run, or the run would find them cached.
_WARMUP_SEED_OFFSET = 1_000_003


class LoadRun(NamedTuple):
    """What came of a load: a record of each request, how many were preempted (None: the target does not tell), how late
    the client's event loop was (None: nobody looked), whether that has a process of its own, the target's state over
    time, whether the user ended it, and how KV memory was used in each step (None: a target whose steps are not seen).
    """

    records: list[RequestRecord]
    preemptions: int | None
    loop_lags: list[Lag] | None
    own_process: bool
    samples: Sequence[TargetState] = ()
    memory: MemoryParts | None = None
    interrupted: bool = False
    meter: KVMeter | None = None

    def measure(self, workload: Load, slo: Slo, count_tokens: CountTokens | None = None) -> Measurement:
        """The figures; see `measure`."""
        return measure(
            self.records,
            workload,
            slo,
            preemptions=self.preemptions,
            count_tokens=count_tokens,
            loop_lags=self.loop_lags,
            own_process=self.own_process,
            samples=self.samples,
            memory=self.memory,
            interrupted=self.interrupted,
            meter=self.meter,
        )


async def run_workload(
    target: Target,
    workload: Load,
    slo: Slo,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    progress: Progress,
    count_tokens: CountTokens | None = None,
    partial: bool = False,
) -> Measurement:
    """Send a load to a target and measure it; see `send_workload`."""
    run = await send_workload(target, workload, ids=ids, timeout=timeout, progress=progress, partial=partial)
    return run.measure(workload, slo, count_tokens)


async def send_workload(
    target: Target,
    workload: Load,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    progress: Progress,
    partial: bool = False,
) -> LoadRun:
    """Send a load to a target. Random prompts are of token `ids`, or of words where it is None.

    `partial`: being cancelled, as by Ctrl-C, ends the load, and the run is what has ended by then, if that is anything.
    """
    planned = workload.plan(ids, target.encode)
    total = 0 if workload.stop_after else len(planned)
    ended: list[RequestRecord] = []
    untold: list[RequestRecord] = []
    live = LiveFigures(asyncio.get_running_loop().time)

    def count(record: RequestRecord) -> None:
        ended.append(record)
        untold.append(record)
        live.ended(record)
        progress("requests", len(ended), total)

    async def state() -> TargetState | None:
        if target.in_process:
            await _ask_timelines(target, untold)
        return await target.state()

    before = await target.preemptions()
    if target.meter is not None:
        target.meter.take()  # of what came before
    with settled_heap():
        async with loop_lags() as lags, sampled(state, target.sample_interval) as samples:
            try:
                records = await run_load(
                    planned,
                    live.watching(target.send),
                    closed=workload.closed,
                    max_concurrency=workload.max_concurrency,
                    timeout=timeout,
                    stop_after=workload.stop_after,
                    on_end=count,
                )
                interrupted = False
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not (partial and ended) or task is None:
                    raise
                task.uncancel()
                records, interrupted = sorted(ended, key=lambda record: record.index), True
    await _ask_timelines(target, untold)
    after = await target.preemptions()
    # A server that was started anew counts from 0 again.
    preemptions = after - before if before is not None and after is not None and after >= before else None
    meter = None if target.meter is None else target.meter.take()
    return LoadRun(records, preemptions, lags, not target.in_process, samples, target.memory(), interrupted, meter)


async def _ask_timelines(target: Target, ended: list[RequestRecord]) -> None:
    """Put on the records what the target tells of them, and empty the list."""
    records = ended.copy()
    ended.clear()
    for record, timeline in zip(records, await target.timelines(records), strict=True):
        record.timeline = timeline


async def warm_up(
    target: Target,
    workload: Load,
    count: int,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    output_len: int | None = None,
) -> None:
    """Send `count` requests like the load's, all at once, with prompts of their own; their fate does not matter.

    Their answers are as long as the load's, or `output_len` tokens.
    """
    if count < 1:
        return
    other = workload.head(count, seed=workload.seed + _WARMUP_SEED_OFFSET, output_len=output_len)
    await run_load(other.plan(ids), target.send, closed=False, max_concurrency=None, timeout=timeout)
