"""Deadlines over HTTP: the field `timeout`, the header x-request-deadline-ms, and what a client is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import ScriptedServer

from llmsched.cli.serve.request_context import DEADLINE_HEADER

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 400},
    "/v1/chat/completions": CHAT | {"max_tokens": 400},
    "/v1/responses": {"input": "hello", "max_output_tokens": 400},
}


@pytest.fixture
def slow(server: ScriptedServer) -> Iterator[ScriptedServer]:
    server.script.step_s = 0.01
    yield server
    server.script.step_s = 0.0


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_not_complete_in_time_is_an_error(
    slow: ScriptedServer, http: httpx.Client, path: str
) -> None:
    answer = http.post(path, json=BODIES[path], headers={DEADLINE_HEADER: "200"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (504, "deadline_exceeded", "timeout_error")
    assert "its deadline has passed (" in error["message"]
    assert 'finished_reason="deadline"' in http.get("/metrics").text


def test_a_stream_has_the_tokens_so_far_and_then_the_error(slow: ScriptedServer, http: httpx.Client) -> None:
    body = BODIES["/v1/completions"] | {"stream": True, "timeout": 0.3}
    *events, last, rest = http.post("/v1/completions", json=body).text.split("\n\n")
    assert rest == ""
    text = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)
    assert text.startswith("abcd")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_answers_in_time_are_complete(http: httpx.Client) -> None:
    for path, body in BODIES.items():
        assert http.post(path, json=body, headers={DEADLINE_HEADER: "60000"}).status_code == 200
    assert http.post("/v1/completions", json=BODIES["/v1/completions"] | {"timeout": 60}).status_code == 200


def test_the_earlier_deadline_counts(http: httpx.Client) -> None:
    body = BODIES["/v1/completions"] | {"timeout": 60, "stream": True}
    answer = http.post("/v1/completions", json=body, headers={DEADLINE_HEADER: "0.0001"})
    assert answer.status_code == 429  # before a stream begins
    assert answer.json()["error"]["code"] == "deadline_too_early"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("fields", "header", "name"),
    [
        ({"timeout": 0}, None, "timeout"),
        ({"timeout": "3"}, None, "timeout"),
        ({"timeout": 1e9}, None, "timeout"),
        ({}, "soon", DEADLINE_HEADER),
        ({}, "-5", DEADLINE_HEADER),
        ({}, "nan", DEADLINE_HEADER),
        ({}, "inf", DEADLINE_HEADER),
    ],
)
def test_impossible_deadlines(http: httpx.Client, fields: dict[str, Any], header: str | None, name: str) -> None:
    headers = {} if header is None else {DEADLINE_HEADER: header}
    answer = http.post("/v1/completions", json=BODIES["/v1/completions"] | fields, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
