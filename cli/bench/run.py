"""One run: warm up, send the load, read the counters, measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmsched.cli.bench.client import Target
from llmsched.cli.bench.lag import loop_lags
from llmsched.cli.bench.load import Workload, plan_load, run_load
from llmsched.cli.bench.measure import Measurement, measure
from llmsched.cli.bench.placing import CountTokens
from llmsched.cli.bench.record import RequestRecord
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress

#: Warm-up prompts must not be those of the run, or the run would find them cached.
_WARMUP_SEED_OFFSET = 1_000_003


async def run_workload(
    target: Target,
    workload: Workload,
    slo: Slo,
    *,
    ids: Sequence[int] | None,
    timeout: float | None,
    progress: Progress,
    count_tokens: CountTokens | None = None,
) -> Measurement:
    """Send a workload to a target and measure it. Prompts are of token `ids`, or of words where it is None."""
    planned = plan_load(workload, ids)
    ended = 0

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        progress("requests", ended, len(planned))

    before = await target.preemptions()
    async with loop_lags() as lags:
        records = await run_load(
            planned,
            target.send,
            closed=workload.closed,
            max_concurrency=workload.max_concurrency,
            timeout=timeout,
            on_end=count,
        )
    after = await target.preemptions()
    preemptions = after - before if before is not None and after is not None else None
    return measure(
        records,
        workload,
        slo,
        preemptions=preemptions,
        count_tokens=count_tokens,
        loop_lags=lags,
        own_process=not target.in_process,
    )


async def warm_up(
    target: Target, workload: Workload, count: int, *, ids: Sequence[int] | None, timeout: float | None
) -> None:
    """Send `count` requests like the workload's, all at once, with prompts of their own; their fate does not matter."""
    if count < 1:
        return
    other = replace(workload, num_prompts=count, seed=workload.seed + _WARMUP_SEED_OFFSET, request_rate=None)
    await run_load(plan_load(other, ids), target.send, closed=False, max_concurrency=None, timeout=timeout)
