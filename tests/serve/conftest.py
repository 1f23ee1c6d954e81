"""Fixtures with scripted servers, for tests of the HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted import EOS, ScriptedServer


@pytest.fixture
def make_server() -> Iterator[Callable[..., ScriptedServer]]:
    """Yield a function that starts a server, for tests that break or configure one. Close its servers afterwards."""
    servers: list[ScriptedServer] = []

    def make(**settings: Any) -> ScriptedServer:
        servers.append(ScriptedServer(**settings).start())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer().start()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Yield the server that the tests of a module share. A test must leave it idle and healthy."""
    yield shared_server
    shared_server.script.gate.set()
    with httpx.Client(base_url=shared_server.url) as http:
        assert http.get("/health").status_code == 200


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def say(server: ScriptedServer) -> Callable[[str], None]:
    """Return a function that sets the text of all answers."""

    def say(text: str) -> None:
        server.script.alphabet = [*server.ids(text), EOS]

    return say


@pytest.fixture
def client(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
