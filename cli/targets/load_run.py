"""One run: warm up, send the load, read the counters, measure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llmsched.cli.figures.client_lag import loop_lags, settled_heap
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.cli.figures.live_figures import LiveFigures
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.figures.token_times import CountTokens
from llmsched.cli.load.load import Load, run_load
from llmsched.cli.targets.sampling import sampled
from llmsched.cli.targets.target import Target
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress

#: Warm-up prompts must not be those of the run, or the run would find them cached.
_WARMUP_SEED_OFFSET = 1_000_003


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
    return measure(run, workload, slo, count_tokens)


async def send_workload(
    target: Target,
    workload: Load,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    progress: Progress,
    partial: bool = False,
) -> RunRecord:
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
    return RunRecord(records, preemptions, lags, not target.in_process, samples, target.memory(), interrupted, meter)


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
