from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from llmsched.cli.figures.client_lag import loop_lags, settled_heap
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.cli.figures.live_figures import LiveFigures
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.figures.token_times import CountTokens
from llmsched.cli.load.load import Load, plan_first, run_load
from llmsched.cli.load.prompts import repeated_share
from llmsched.cli.targets.interface import Target
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import Progress

#: Most samples of one run. When there are more, every second sample is dropped and the interval is doubled.
MOST_SAMPLES = 4096

#: Added to the seed for warm-up prompts, so that the warm-up does not put the run's prompts into a cache.
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
    first: int | None = None,
) -> Measurement:
    """Send a load to a target and return its figures, measured against `slo`; see `send_workload`."""
    run = await send_workload(
        target, workload, ids=ids, timeout=timeout, progress=progress, partial=partial, first=first
    )
    return measure(run, workload, slo, count_tokens)


async def send_workload(
    target: Target,
    workload: Load,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    progress: Progress,
    partial: bool = False,
    first: int | None = None,
) -> RunRecord:
    """Send a load to a target, or only its first `first` requests, and return the record of the run.

    Random prompts consist of token ids from `ids`, or of words if `ids` is None. `timeout` is in seconds per request.
    With `partial`, Ctrl-C ends the load, and the record has the requests that have ended.
    """
    planned, stop_after = plan_first(workload, first, ids, target.encode)
    total = 0 if stop_after else len(planned)
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

    before = await target.counts()
    if target.meter is not None:
        target.meter.take()  # discard the steps before the load
    with settled_heap():
        async with loop_lags() as lags, _sampled(state, target.sample_interval) as samples:
            running = run_load(
                planned,
                live.watching(target.send),
                closed=workload.closed,
                max_concurrency=workload.max_concurrency,
                timeout=timeout,
                stop_after=stop_after,
                on_end=count,
            )
            records, interrupted = await _unless_interrupted(running, ended if partial else [])
    await _ask_timelines(target, untold)
    counts = (await target.counts()).since(before)
    meter = None if target.meter is None else target.meter.take()
    own_process = not target.in_process
    repeated = repeated_share(request.prompt for request in planned) if own_process else None
    return RunRecord(records, counts, lags, own_process, samples, target.memory(), interrupted, meter, repeated)


async def _unless_interrupted(
    running: Awaitable[list[RequestRecord]], ended: Sequence[RequestRecord]
) -> tuple[list[RequestRecord], bool]:
    """Return the records from `running`, and False. If Ctrl-C cancels it, return those in `ended`, and True.

    Raises CancelledError if `ended` is empty then.
    """
    try:
        return await running, False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not ended or task is None:
            raise
        task.uncancel()
        return sorted(ended, key=lambda record: record.index), True


@asynccontextmanager
async def _sampled(
    state: Callable[[], Awaitable[TargetState | None]], interval: float
) -> AsyncIterator[list[TargetState]]:
    """Yield a list to which a result of `state()` is added every `interval` seconds, until a result is None."""
    samples: list[TargetState] = []

    async def sample() -> None:
        seconds = interval
        while True:
            await asyncio.sleep(seconds)
            if (one := await state()) is None:
                return
            samples.append(one)
            if len(samples) > MOST_SAMPLES:
                del samples[1::2]
                seconds *= 2

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling


async def _ask_timelines(target: Target, ended: list[RequestRecord]) -> None:
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
    """Send `count` requests like those of the load, but with other prompts, all at once. Ignore failures.

    Answers have `output_len` tokens or, if that is None, lengths from the load's distribution.
    """
    if count < 1:
        return
    other = workload.head(count, seed=workload.seed + _WARMUP_SEED_OFFSET, output_len=output_len)
    await run_load(other.plan(ids), target.send, closed=False, max_concurrency=None, timeout=timeout)
