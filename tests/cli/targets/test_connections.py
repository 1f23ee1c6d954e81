"""Connections over real sockets: opened when needed, then reused."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from measured_load import measure_load

from llmsched.cli.bench.selfcheck.scripted_server import ScriptedServer
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets import http1
from llmsched.cli.targets.http1 import TransportPool
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.interface import TargetUnreachableError
from llmsched.engine.errors import LlmschedError
from llmsched.engine.proxies import proxy_for


def bench(name: str, workload: SyntheticLoad) -> Measurement:
    async def main() -> Measurement:
        server = await asyncio.start_server(ScriptedServer().serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await measure_load(f"http://127.0.0.1:{port}/{name}/v1", workload, timeout=20.0)

    return asyncio.run(main())


def test_one_after_the_other_uses_one_connection() -> None:
    figures = bench("rate", SyntheticLoad(num_prompts=20, input_len=8, output_len=1, max_concurrency=1))
    assert (figures.requests.completed, figures.latency.connect.count) == (20, 1)
    assert all(record.sent is not None and record.client_lag is not None for record in figures.run.records)


def test_as_many_connections_as_requests_at_a_time() -> None:
    figures = bench("steady", SyntheticLoad(num_prompts=12, input_len=8, output_len=40, max_concurrency=6))
    assert (figures.requests.completed, figures.latency.connect.count) == (12, 6)
    assert figures.tokens.output == 12 * 40


def test_a_connection_that_was_cut_is_not_reused() -> None:
    figures = bench("failures", SyntheticLoad(num_prompts=10, input_len=8, output_len=40, max_concurrency=1))
    reasons = {"cut without [DONE]": 2, "error event": 2, "http 500": 2, "empty stream": 2}
    assert (figures.requests.completed, figures.requests.failures) == (2, reasons)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "http://host", None),
        ({"http_proxy": "http://proxy:1"}, "http://host", "http://proxy:1"),
        ({"http_proxy": "http://proxy:1"}, "https://host", None),
        ({"all_proxy": "http://proxy:2"}, "https://host", "http://proxy:2"),
        ({"http_proxy": "http://proxy:1", "no_proxy": "host"}, "http://host:8000", None),
        ({"http_proxy": "http://proxy:1", "no_proxy": "host:8000"}, "http://host:8000", None),
        ({"http_proxy": "http://proxy:1", "no_proxy": "host:8000"}, "http://host:8001", "http://proxy:1"),
        ({"http_proxy": "http://proxy:1", "no_proxy": "x, 127.0.0.0/8"}, "http://127.0.0.1:8000", None),
        ({"http_proxy": "http://proxy:1", "no_proxy": "127.0.0.0/8"}, "http://128.0.0.1", "http://proxy:1"),
        ({"all_proxy": "socks5://proxy:1", "no_proxy": "::1"}, "http://[::1]:8000", None),
    ],
)
def test_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made: list[object] = []
    monkeypatch.setattr(httpx, "AsyncHTTPTransport", lambda verify, proxy: made.append(proxy))
    monkeypatch.setattr(http1, "Http1Transport", lambda verify: made.append(None))

    async def main() -> None:
        async with TransportPool(url).lend():
            pass

    asyncio.run(main())
    assert made == [proxy]


@pytest.mark.parametrize("value", ["foo:bar", "ftp://host:1", "http://[::1"])
def test_a_malformed_proxy_is_named_unless_no_proxy_lists_the_host(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with pytest.raises(LlmschedError, match=r"ALL_PROXY='.*' is not the URL of a proxy"):
        HttpTarget(HttpOptions("http://host:8000"))
    monkeypatch.setenv("NO_PROXY", "host")
    HttpTarget(HttpOptions("http://host:8000"))


def test_a_proxy_that_accepts_no_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{reserved.getsockname()[1]}")
        with pytest.raises(TargetUnreachableError, match="through the proxy in ALL_PROXY, which NO_PROXY can avoid"):
            asyncio.run(measure_load("http://host:8000", SyntheticLoad()))


def test_a_proxy_without_a_scheme_speaks_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    assert proxy_for("https://host") == "http://proxy:3128"
