"""Number of streams that the bench's own client can follow before it limits what it measures.

MEASURED on this machine: a server in another process streams 50 tokens/s to each of N clients of one process and logs
when it wrote them. "client CPU" is the client's CPU time per token, including the time to make prompts. The lags are
those that mark a run invalid; "ITL P99" is measured by the client, "server's" by the server. If "machine P99" is most
of the lag, other work on the machine was measured. Lags and gaps are in ms.

python tests/bench/bench_client.py
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import httpx

from llmsched.cli.bench.selfcheck.self_check import scripted_server
from llmsched.cli.figures.measure import measure
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import send_workload
from llmsched.engine.goodput import Slo
from llmsched.engine.percentiles import Summary, summarise
from llmsched.engine.progress import silent

STREAMS = (16, 64, 128, 256, 512)
SCRIPT = "crowd"
RAMP_S = 1.0
COLUMNS = "streams  tokens/s  client CPU  lag P99  machine P99  ITL P99  server's  valid"


async def main() -> None:
    print(COLUMNS)
    async with scripted_server() as root:
        for streams in STREAMS:
            print(await row(root, streams))


async def row(root: str, streams: int) -> str:
    load = SyntheticLoad(
        num_prompts=streams, input_len=8, output_len=75, request_rate=streams / RAMP_S, arrivals="constant"
    )
    target = HttpTarget(HttpOptions(f"{root}/{SCRIPT}"))
    before = time.process_time()
    try:
        run = await send_workload(target, load, ids=COMMON_IDS, timeout=60.0, progress=silent)
    finally:
        await target.close()
    cpu = time.process_time() - before
    async with httpx.AsyncClient() as client:
        log = json.loads((await client.get(f"{root}/{SCRIPT}/log")).text)
    written = [[at for at, _ in parts] for _, parts in log]
    gaps = summarise([after - at for times in written for at, after in pairwise(times)])
    figures = measure(run, load, Slo())
    cells = (
        f"{streams:7}",
        f"{figures.rates.output_tokens or 0.0:8.0f}",
        f"{1e6 * cpu / max(1, figures.tokens.output):7.1f} us",
        *(f"{p99(lag):{width}.1f}" for lag, width in ((figures.client.loop, 7), (figures.client.machine, 11))),
        *(f"{p99(gap):{width}.1f}" for gap, width in ((figures.latency.itl, 7), (gaps, 8))),
        "  yes" if figures.valid else "   no",
    )
    return "  ".join(cells)


def p99(seconds: Summary | None) -> float:
    """Return the P99 in ms; 0 without samples."""
    return 0.0 if seconds is None else 1e3 * (seconds.p99 or 0.0)


if __name__ == "__main__":
    asyncio.run(main())
