"""Refused requests and their answers, API keys, limits, full queues; the server survives all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attacks
import httpx
import pytest
from exposition import samples
from scripted import MODEL, ScriptedServer

from llmsched.cli.serve.access import Access
from llmsched.cli.serve.http_limits import HttpLimits

MAX_BODY_BYTES = HttpLimits().max_body_size
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a b c", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2},
}


def strict(answer: httpx.Response) -> Any:
    """Return the answer's JSON, which must not have NaN or Infinity."""
    return json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in {answer.text}"))


def refused(http: httpx.Client, path: str, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == status, answer.text
    error = strict(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


@pytest.fixture(autouse=True)
def _lives_on(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        (COMPLETIONS, "n", 0),
        (COMPLETIONS, "n", 3_000_000),
        (COMPLETIONS, "n", 10**400),
        (COMPLETIONS, "seed", -(10**400)),
        (COMPLETIONS, "priority", 10**400),
        (COMPLETIONS, "temperature", 10**400),
        (COMPLETIONS, "prompt", [10**400]),
        (COMPLETIONS, "logit_bias", {"1": 10**400}),
        (COMPLETIONS, "temperature", -0.1),
        (COMPLETIONS, "temperature", 2.1),
        (COMPLETIONS, "top_p", 1.5),
        (COMPLETIONS, "top_p", -0.1),
        (COMPLETIONS, "min_p", 2),
        (COMPLETIONS, "top_k", -2),
        (COMPLETIONS, "repetition_penalty", 0),
        (COMPLETIONS, "presence_penalty", 2.5),
        (COMPLETIONS, "frequency_penalty", -2.5),
        (COMPLETIONS, "max_tokens", -1),
        (COMPLETIONS, "max_tokens", 10**18),
        (COMPLETIONS, "min_tokens", 3),
        (COMPLETIONS, "stop", [""]),
        (COMPLETIONS, "stop", ["x"] * 17),
        (COMPLETIONS, "logit_bias", {"1000000": 1}),
        (COMPLETIONS, "stop_token_ids", [-1]),
        (COMPLETIONS, "prompt", [10**7]),
        (COMPLETIONS, "prompt", [-1]),
        (COMPLETIONS, "prompt", ""),
        (COMPLETIONS, "prompt", [""]),
        (COMPLETIONS, "prompt", [[]]),
        (CHAT, "n", 0),
        (CHAT, "temperature", -1),
        (CHAT, "messages", []),
    ],
)
def test_ranges_are_refused_by_name_before_any_event(
    http: httpx.Client, path: str, param: str, value: Any, streamed: bool
) -> None:
    error = refused(http, path, stream=streamed, **{param: value})
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize("fields", [{"top_p": 0, "temperature": 0}, {"top_p": 0}, {"min_p": 1}, {"top_p": 1e-9}])
def test_edges_of_ranges_are_taken(http: httpx.Client, fields: dict[str, float]) -> None:
    assert http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **fields}).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_the_refusal_of_nan_is_strict_json(http: httpx.Client, value: str) -> None:
    body = json.dumps({**BODIES[COMPLETIONS], "temperature": "@"}).replace('"@"', value)
    answer = http.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert strict(answer)["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", [b"", b'{"model": "x", ', b"[" * 200_000, b'{"prompt": "\xff"}', b"\x00", b"[1]"])
def test_what_is_no_json(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert strict(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
def test_any_content_type_is_read_as_json(http: httpx.Client, kind: str) -> None:
    answer = http.post(COMPLETIONS, content=json.dumps(BODIES[COMPLETIONS]), headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_unknown_model(http: httpx.Client) -> None:
    assert refused(http, COMPLETIONS, 404, model="other")["code"] == "model_not_found"
    assert http.get("/v1/models/other").status_code == 404
    assert http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 512


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/health", 200),
        ("GET", "/docs", 404),
    ],
)
def test_methods_and_routes(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert not answer.content if method == "HEAD" else strict(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "accepted"),
    [(511, 1, True), (512, 1, False), (511, 2, False), (508, 5, False), (513, 1, False), (600, 0, False)],
)
def test_context(http: httpx.Client, length: int, max_tokens: int, accepted: bool) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": [10] * length, "max_tokens": max_tokens})
    assert (answer.status_code == 200) == accepted
    if not accepted:
        message = strict(answer)["error"]["message"]
        assert answer.status_code == 400
        assert all(str(number) in message for number in (512, length, max_tokens))


def test_the_default_of_sixteen_tokens_ends_with_the_context(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": [10] * 505})
    assert answer.json()["usage"]["completion_tokens"] == 7


def test_chat_beyond_the_context(http: httpx.Client) -> None:
    error = refused(http, CHAT, messages=[{"role": "user", "content": "x " * 600}], max_tokens=None)
    assert "512" in error["message"]


def test_what_can_never_fit_the_pool(make_server: Callable[..., ScriptedServer]) -> None:
    with httpx.Client(base_url=make_server(num_blocks=8).url) as http:
        assert http.post(COMPLETIONS, json={"prompt": [10] * 128, "max_tokens": 1}).status_code == 200
        answer = http.post(COMPLETIONS, json={"prompt": [10] * 128, "max_tokens": 2})
        assert answer.status_code == 400
        assert "128" in answer.json()["error"]["message"]
        assert http.post(COMPLETIONS, json={"prompt": [10] * 8}).status_code == 200


# -- size and time ----------------------------------------------------------------------------------------------


def test_a_large_body_is_refused(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "word " * (MAX_BODY_BYTES // 4)})
    answer = http.post(COMPLETIONS, content=body)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in strict(answer)["error"]["message"]


def test_a_large_body_of_unknown_length_is_refused(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65536 + 8):
            yield b" " * 65536

    assert http.post(COMPLETIONS, content=chunks()).status_code == 413


def test_a_text_far_too_long_is_not_tokenised(
    http: httpx.Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
        for path, text in ((COMPLETIONS, {"prompt": "x" * 1_000_000}), (CHAT, {"messages": [_user("x" * 1_000_000)]})):
            assert "512" in refused(http, path, **text)["message"]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_others_are_served_while_a_prompt_is_tokenised(
    http: httpx.Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, encode = threading.Event(), threading.Event(), server.tokenizer.encode

    def slow(text: str, *rest: Any, **more: Any) -> list[int]:
        if text == "slow":
            begun.set()
            assert go_on.wait(20)
        return encode(text, *rest, **more)

    monkeypatch.setattr(server.tokenizer, "encode", slow)
    answers: list[int] = []
    sender = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + COMPLETIONS, json={"prompt": "slow"}).status_code)
    )
    sender.start()
    assert begun.wait(20)
    assert http.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 200
    go_on.set()
    sender.join()
    assert answers == [200]


def test_tokenising_ends_when_the_client_leaves(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    begun, go_on, encode, encoded = threading.Event(), threading.Event(), server.tokenizer.encode, []

    def slow(text: str, *rest: Any, **more: Any) -> list[int]:
        encoded.append(text)
        begun.set()
        assert go_on.wait(20)
        time.sleep(0.02)  # longer than a turn
        return encode(text, *rest, **more)

    monkeypatch.setattr(server.tokenizer, "encode", slow)
    body = json.dumps({"prompt": [f"prompt {number}" for number in range(100)]})
    with attacks.connected(server.url) as client:
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert begun.wait(20)
    time.sleep(1.0)  # until the server has seen it
    go_on.set()
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "last"}, timeout=20).status_code == 200
    assert encoded == ["prompt 0", "last"]


@pytest.mark.parametrize("path", [CHAT, "/v1/prefixes", "/tokenize"])
@pytest.mark.parametrize("name", ["tokenizer", "messages", "conversation", "self", "chat_template", "tokenize"])
def test_template_arguments_that_the_server_sets_are_refused(http: httpx.Client, path: str, name: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = http.post(path, json={"messages": messages, "chat_template_kwargs": {name: 1}})
    assert (answer.status_code, strict(answer)["error"]["param"]) == (400, "chat_template_kwargs")
    assert name in strict(answer)["error"]["message"]


def test_a_full_queue(make_server: Callable[..., ScriptedServer]) -> None:
    with httpx.Client(base_url=make_server(max_queue_size=2).url) as http:
        answer = http.post(COMPLETIONS, json={"prompt": "a", "n": 3})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert strict(answer)["error"]["type"] == "rate_limit_error"
        assert http.post(COMPLETIONS, json={"prompt": "a", "n": 2}).status_code == 200


def test_a_fault_of_one_row_fails_its_request_alone(http: httpx.Client, server: ScriptedServer) -> None:
    server.script.row_error = "no number came out"
    answer = http.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert answer.status_code == 500
    assert "no number came out" in strict(answer)["error"]["message"]
    server.script.row_error = "no number came out"
    streamed = http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True})
    (event, rest) = streamed.text.split("\n\n", 1)
    assert "no number came out" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert rest == ""


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {}), (COMPLETIONS, {"stream": True}), (CHAT, BODIES[CHAT]), ("/tokenize", {}), ("/v1/prefixes", {})],
)
def test_a_fault_of_the_server_is_a_500_that_tells_nothing(
    http: httpx.Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    def broken(*_: Any, **__: Any) -> list[int]:
        raise ZeroDivisionError("secret path")

    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "encode", broken)
        answer = http.post(path, json={"prompt": "a", **fields} if path != CHAT else fields)
    assert answer.status_code == 500
    assert strict(answer)["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx.Client]:
    server = ScriptedServer(access=Access("geheim-é", "wartung")).start()
    with httpx.Client(base_url=server.url) as http:
        yield http
    server.close()


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic geheim-é", "geheim-é", "Bearer geheim-é2", "Bearer geheim"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("POST", COMPLETIONS), ("POST", CHAT), ("POST", "/reset_prefix_cache")],
)
def test_no_way_in_without_the_key(locked: httpx.Client, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = locked.request(method, path, headers=headers, content=b"{")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert strict(answer)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_key_opens(locked: httpx.Client, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} geheim-é".encode()}
    assert locked.post(COMPLETIONS, headers=headers, json=BODIES[COMPLETIONS]).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_need_no_key(locked: httpx.Client, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_refusals_are_counted_by_reason(server: ScriptedServer) -> None:
    def counted(reason: str) -> float:
        return samples(server.engine.metrics).get(f"llmsched:requests_refused_total{{reason={reason}}}", 0.0)

    reasons = ("invalid_request", "unknown_parameter", "context_length_exceeded", "model_not_found")
    before = [counted(reason) for reason in reasons]
    with httpx.Client(base_url=server.url) as http:
        for fields in ({"temperature": -1}, {"tempo": 1}, {"max_tokens": 9999}, {"model": "other"}):
            http.post("/v1/completions", json={"prompt": "x", **fields})
        http.get("/v1/models/other")  # no request to the model
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert [counted(reason) for reason in reasons] == [count + 1 for count in before]
