"""The status line of `serve` tells what happened since the last one."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
from scripted import ScriptedServer

from llmsched.cli.serve.status_line import StatusMeter


def complete(server: ScriptedServer, prompt: str, tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


def test_the_line_tells_the_work_since_the_last_one(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    meter = StatusMeter(server.service.recent)
    assert meter.line() == ""
    complete(server, "a b c d e f g h " * 8, 20)
    complete(server, "a b c d e f g h " * 8, 20)
    line = meter.line()
    number = r"[\d.,]+"
    assert re.fullmatch(
        rf"0 running, 0 waiting \| {number} tokens/s \| KV 0% \| prefix hits \d+% \| P99 TTFT {number} m?s \| "
        rf"P99 ITL {number} m?s",
        line,
    ), line
    assert "prefix hits 0%" not in line
    assert meter.line() == ""
    complete(server, "a", 1)
    assert "P99 ITL" not in meter.line()  # one token has no gap
