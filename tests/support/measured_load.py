"""Measurement of a load that is sent to a server."""

from __future__ import annotations

from typing import Any

import httpx

from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.token_times import CountTokens
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, WordEncoder
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import run_workload
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent


async def measure_load(
    url: str,
    load: Load,
    slo: Slo | None = None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    ids: range | None = COMMON_IDS,
    encode: WordEncoder | None = None,
    timeout: float | None = None,
    count_tokens: CountTokens | None = None,
    partial: bool = False,
    **options: Any,
) -> Measurement:
    """Connect to a server, send the load and return the figures. `options` are those of HttpOptions."""
    target = HttpTarget(HttpOptions(url, **options), transport=transport)
    target.encode = encode
    try:
        await target.connect()
        more: dict[str, Any] = {"count_tokens": count_tokens, "partial": partial}
        return await run_workload(target, load, slo or Slo(), ids=ids, timeout=timeout, progress=silent, **more)
    finally:
        await target.close()
