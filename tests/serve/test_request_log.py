"""Account of each request to the model: its figures, once per request, however it ends."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import ScriptedServer

from llmsched.cli.log_lines import JsonLines, TextLines, event
from llmsched.cli.serve.request_log import EndedRequest, log_request

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def ended() -> list[EndedRequest]:
    """Requests that the server has reported."""
    return []


@pytest.fixture(scope="module")
def shared_server(ended: list[EndedRequest]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(observers=[ended.append, log_request]).start()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def nothing_yet(ended: list[EndedRequest]) -> None:
    ended.clear()


def wait_for(ended: list[EndedRequest]) -> EndedRequest:
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    (request,) = ended
    return request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_one_account_per_request(
    http: httpx.Client, ended: list[EndedRequest], path: str, body: dict[str, Any], stream: bool
) -> None:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 6}
    answer = http.post(path, json=body | limit | {"stream": stream}, headers={"X-Request-Id": "mine"})
    request = wait_for(ended)
    assert request.answer_id in answer.text
    assert (request.request_id, request.path, request.streamed, request.reason) == ("mine", path, stream, "length")
    assert request.tokens()["output_tokens"] == 6
    times = request.times()
    assert times["ttft"] == pytest.approx(times["queue"] + times["prefill"])
    assert 0 < times["ttft"] < times["e2e"]
    assert 0 < times["itl_p99"] < times["e2e"]


def test_prompts_with_choices_are_one_request(http: httpx.Client, ended: list[EndedRequest]) -> None:
    usage = http.post(COMPLETIONS, json={"prompt": ["hello", "you"], "n": 3, "max_tokens": 4}).json()["usage"]
    tokens = wait_for(ended).tokens()
    assert len(ended[0].choices) == 6
    assert tokens["output_tokens"] == usage["completion_tokens"] == 24
    assert tokens["prompt_tokens"] == usage["prompt_tokens"]
    assert tokens["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_a_client_that_leaves(server: ScriptedServer, http: httpx.Client, ended: list[EndedRequest]) -> None:
    server.script.step_s = 0.02
    try:
        with http.stream("POST", COMPLETIONS, json={"prompt": "hello", "max_tokens": 400, "stream": True}) as answer:
            next(answer.iter_lines())
    finally:
        server.script.step_s = 0.0
    request = wait_for(ended)
    assert request.reason == "abort"
    assert 0 < request.tokens()["output_tokens"] < 400


def test_a_refused_request_has_no_account(http: httpx.Client, ended: list[EndedRequest]) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 9999}).status_code == 400
    http.post(COMPLETIONS, json={"prompt": "hello"})
    wait_for(ended)


def test_an_observer_that_fails_harms_no_request(http: httpx.Client, ended: list[EndedRequest]) -> None:
    class Broken(list[EndedRequest]):
        def append(self, request: EndedRequest) -> None:
            raise RuntimeError("broken")

    server = ScriptedServer(observers=[Broken().append]).start()
    with httpx.Client(base_url=server.url) as other:
        for _ in range(2):
            assert other.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4}).status_code == 200
    server.close()


def test_the_line_as_text_and_as_json(
    http: httpx.Client, ended: list[EndedRequest], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmsched")
    http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4}, headers={"X-Request-Id": "mine"})
    wait_for(ended)
    (record,) = (record for record in caplog.records if hasattr(record, "event"))
    text = TextLines().format(record)
    assert "INFO request mine: length | 4 (" in text
    assert " + 4 tokens | queue " in text
    for label in ("TTFT", "P99 ITL", "E2E"):
        assert f" | {label} " in text
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["event"], line["request_id"]) == ("info", "request", "mine")
    assert (line["finish_reason"], line["output_tokens"], line["preemptions"]) == ("length", 4, 0)
    assert "message" not in line
    assert "\n" not in JsonLines().format(record)


def test_lines_without_fields() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        failed = logging.LogRecord("x", logging.ERROR, "f", 1, "%s failed", ("é",), (ValueError, error, None))
    line = json.loads(JsonLines().format(failed))
    assert (line["level"], line["message"]) == ("error", "é failed")
    assert line["error"].endswith("ValueError: a\nb")
    assert event("request", {"a": 1}) == {"event": "request", "fields": {"a": 1}}
