"""The status line of `serve` tells what happened since the last one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from scripted import ScriptedServer

from llmsched.cli.serve.status_line import StatusMeter, quantile


def complete(server: ScriptedServer, prompt: str, tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


def test_the_line_tells_the_work_since_the_last_one(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    meter = StatusMeter(server.service)
    assert meter.line() == ""
    complete(server, "a b c d e f g h " * 8, 20)
    complete(server, "a b c d e f g h " * 8, 20)
    line = meter.line()
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"0 running, 0 waiting \| {number} tokens/s \| KV 0% \| prefix hits \d+% \| P99 TTFT {number} m?s \| "
        rf"P99 ITL {number} m?s",
        line,
    ), line
    assert "prefix hits 0%" not in line
    assert meter.line() == ""
    complete(server, "a", 1)
    assert "P99 ITL" not in meter.line()  # one token has no gap


@pytest.mark.parametrize("seed", range(3))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(seed: int) -> None:
    bounds = [0.01, 0.02, 0.05, 0.1, 0.5, 1.0]
    samples = np.random.default_rng(seed).lognormal(-3, 1, 500)
    buckets = {bound: float((samples <= bound).sum()) for bound in [*bounds, math.inf]}
    for share in (0.1, 0.5, 0.99):
        exact, found = float(np.quantile(samples, share)), quantile(buckets, share)
        assert found is not None
        assert np.searchsorted(bounds, found) == min(np.searchsorted(bounds, exact), len(bounds) - 1)
    assert quantile(dict.fromkeys(buckets, 0.0), 0.99) is None
