"""OpenAPI description of the server, and requests made from it: none of them may be a failure of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from scripted import ScriptedServer

ROUTES = [
    *(("GET", path) for path in ("/", "/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/{name}")),
    *(("GET", path) for path in ("/v1/cache", "/v1/prefixes", "/v1/requests/{given}/explain", "/v1/stats")),
    ("GET", "/v1/requests/slowest"),
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", "/v1/prefixes", "/reset_prefix_cache")),
    ("DELETE", "/v1/prefixes/{prefix_id}"),
]
NO_BODY = {"/v1/embeddings", "/reset_prefix_cache"}


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
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(ROUTES)
    for method, path in ROUTES:
        has_body = "requestBody" in document["paths"][path][method.lower()]
        assert has_body == (method == "POST" and path not in NO_BODY)
    completion = document["components"]["schemas"]["CompletionRequest"]
    assert completion["required"] == ["prompt"]
    assert completion["additionalProperties"] is False
    assert completion["properties"]["stop"]["anyOf"][0] == {"type": "string"}
    error = httpx.get(f"{server.url}/v1/models/x").json()
    assert set(error["error"]) == set(document["components"]["schemas"]["Error"]["properties"]["error"]["required"])


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{method} {path}" for method, path in ROUTES])
def test_no_request_makes_the_server_fail(api: Any, method: str, path: str) -> None:
    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy())
    def answers(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # most would name a model that is not served
        answer = case.call()
        assert answer.status_code < 500, answer.text

    answers()
