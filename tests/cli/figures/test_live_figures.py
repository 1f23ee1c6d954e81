"""Figures shown while a run lasts."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from virtual_time import run_virtual

from llmsched.cli.figures.live_figures import LiveFigures
from llmsched.cli.figures.record import Chunk, RequestFailed, RequestRecord
from llmsched.cli.load.load import PlannedRequest, run_load
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad


def test_rate_running_and_medians_so_far() -> None:
    """Four requests at a time get a token after 0.5 s and then every 0.12 s; the fourth fails."""
    told: list[tuple[float, str]] = []

    async def send(request: PlannedRequest, record: RequestRecord) -> None:
        now = asyncio.get_running_loop().time
        record.sent = now()
        if request.index == 3:
            await asyncio.sleep(0.25)
            raise RequestFailed("http 500")
        for wait in (0.5, 0.12, 0.12, 0.12):
            await asyncio.sleep(wait)
            record.chunks.append(Chunk(now(), "x", 1))
        record.end = now()

    async def main() -> None:
        now = asyncio.get_running_loop().time
        live = LiveFigures(now, lambda text: told.append((round(now(), 3), text)))
        work = SyntheticLoad(num_prompts=7, input_len=8, output_len=4, max_concurrency=4)
        await run_load(
            work.plan(COMMON_IDS),
            live.watching(send),
            closed=True,
            max_concurrency=4,
            timeout=None,
            on_end=live.ended,
        )

    run_virtual(main())
    assert told[0] == (0.25, "4 requests/s, 3 running")
    assert told[1] == (0.86, "2.33 requests/s, 3 running, TTFT P50 500 ms, ITL P50 120 ms")
    assert told[-1] == (1.72, "4.07 requests/s, 0 running, TTFT P50 500 ms, ITL P50 120 ms")
    assert all(after - before >= 0.2 for before, after in pairwise(time for time, _ in told[:-1]))
