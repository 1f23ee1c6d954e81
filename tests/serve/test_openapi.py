"""OpenAPI description of the server, and requests made from it: none of them may be a failure of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from scripted import ScriptedServer

POST = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/prefixes"}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer().start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture(scope="module")
def api(server: ScriptedServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_and_body_is_described(server: ScriptedServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    assert {path for path in POST if "requestBody" in paths[path]["post"]} == POST
    for name in ("/health", "/metrics", "/version", "/v1/models", "/v1/cache", "/reset_prefix_cache"):
        assert name in paths
    completion = document["components"]["schemas"]["CompletionRequest"]
    assert completion["required"] == ["prompt"]
    assert completion["additionalProperties"] is False
    assert completion["properties"]["stop"]["anyOf"][0] == {"type": "string"}
    error = httpx.get(f"{server.url}/v1/models/x").json()
    assert set(error["error"]) == set(document["components"]["schemas"]["Error"]["properties"]["error"]["required"])


@schemathesis.pytest.from_fixture("api").parametrize()
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case: Any) -> None:
    answer = case.call()
    assert answer.status_code < 500, answer.text
