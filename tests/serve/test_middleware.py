"""Request ids on every answer, CORS for web pages, and comments in streams that wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx
import openai
import pytest
from measured_load import measure_load
from scripted import MODEL, ScriptedServer

from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.serve.access import Access
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.cli.serve.middleware import read_origins
from llmsched.engine.errors import ConfigError

COMPLETION = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("given", ["abc-123", None, "two words", "x" * 200, "ü", ""])
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", COMPLETION, 200),
        ("POST", "/v1/completions", {**COMPLETION, "stream": True}, 200),
        ("POST", "/v1/completions", {"prompt": 5}, 400),
        ("POST", "/v1/completions", {"prompt": "x" * (9 << 20)}, 413),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/health", None, 200),
    ],
)
def test_every_answer_has_its_request_id(
    http: httpx.Client, given: str | None, method: str, path: str, body: Any, status: int
) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    answer = http.request(method, path, json=body, headers=headers)
    assert answer.status_code == status
    (returned,) = answer.headers.get_list("x-request-id")
    if given == "abc-123":
        assert returned == given
    else:
        assert len(returned) == 32
        assert returned != http.get("/health").headers["x-request-id"]


def test_answers_to_what_is_not_http_have_a_request_id(server: ScriptedServer) -> None:
    with socket.create_connection(server.listeners[0].getsockname()[:2]) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"\r\nX-Request-Id: " in answer


def test_the_log_names_the_request_id(
    make_server: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setattr("llmsched.cli.serve.completion_response.CompletionResponse._usage", lambda self: 1 / 0)
    with httpx.Client(base_url=server.url, headers={"X-Request-Id": "trace-7"}) as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 500
        http.post("/v1/completions", json={**COMPLETION, "stream": True, "stream_options": {"include_usage": True}})
    assert caplog.text.count("(X-Request-Id trace-7)") == 2


# -- CORS -------------------------------------------------------------------------------------------------------------

PAGE = {"Origin": "https://chat.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = "access-control-allow-origin"


def test_without_the_option_there_is_no_cors(http: httpx.Client) -> None:
    assert http.options("/v1/chat/completions", headers=PREFLIGHT).status_code == 405
    assert ALLOWED not in http.get("/health", headers=PAGE).headers


@pytest.mark.parametrize("allowed", ["*", "https://chat.example", "http://localhost:3000, https://chat.example"])
@pytest.mark.parametrize("key", ["secret", None])
def test_pages_of_allowed_origins(make_server: Callable[..., ScriptedServer], allowed: str, key: str | None) -> None:
    server = make_server(access=Access(key, cors_origins=read_origins(allowed)))
    expected = "*" if allowed == "*" else PAGE["Origin"]
    with httpx.Client(base_url=server.url) as http:
        preflight = http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers[ALLOWED] == expected
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for path, sent, status in (
            ("/v1/models", {"Authorization": "Bearer secret"}, 200),
            ("/v1/models", {}, 200 if key is None else 401),
            ("/v1/nothing", {}, 404),
            ("/health", {}, 200),
        ):
            answer = http.get(path, headers={**PAGE, **sent})
            assert (answer.status_code, answer.headers[ALLOWED]) == (status, expected)
            readable = answer.headers["access-control-expose-headers"].split(", ")
            assert {"X-Request-Id", "Retry-After", "x-ratelimit-remaining-tokens"} <= set(readable)
            assert answer.headers["x-request-id"]


def test_pages_of_other_origins(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(access=Access(cors_origins=read_origins("https://chat.example")))
    with httpx.Client(base_url=server.url, headers={"Origin": "https://evil.example"}) as http:
        assert ALLOWED not in http.options("/v1/models", headers={"Access-Control-Request-Method": "GET"}).headers
        answer = http.get("/v1/models")
        assert answer.status_code == 403
        assert ALLOWED not in answer.headers


@pytest.mark.parametrize("text", ["", "chat.example", "https://chat.example/", "https://a.example,,*", "https://a b"])
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        read_origins(text)


# -- comments in streams that wait ------------------------------------------------------------------------------------


def test_a_stream_that_waits_sends_comments(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(http=HttpLimits(sse_keep_alive=0.05))
    server.script.gate.clear()
    with (
        httpx.Client(base_url=server.url, timeout=20) as http,
        http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
        server.script.gate.set()
        assert [line for line in lines if line and not line.startswith(":")][-1] == "data: [DONE]"


def test_clients_ignore_the_comments(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(http=HttpLimits(sse_keep_alive=0.02))
    server.script.step_s = 0.1
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    chunks = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcd"

    work = SyntheticLoad(num_prompts=1, input_len=8, output_len=3)
    (latency,) = asyncio.run(measure_load(server.url, work, ids=range(10, 200), timeout=9.0)).latencies
    assert latency.ttft > 0.05


def test_no_comments_if_they_are_off(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(http=HttpLimits(sse_keep_alive=0))
    server.script.step_s = 0.1
    with httpx.Client(base_url=server.url) as http:
        assert "\n: " not in http.post("/v1/completions", json={**COMPLETION, "stream": True}).text


# -- routes that clients try ------------------------------------------------------------------------------------------


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("llmsched")}


def test_embeddings_are_refused_with_a_reason(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "x", "model": "m"})
    assert answer.status_code == 404
    assert "computes no embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/chat/completions"])
def test_unknown_routes_name_the_known_ones(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": MODEL, "input": "Hi"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == "not_found_error"
    assert "/v1/chat/completions" in error["message"]


HELLO = [{"role": "user", "content": "Hello <|im_end|>"}]


def test_tokenize_counts_as_the_model_does(http: httpx.Client, server: ScriptedServer) -> None:
    ids = server.ids("Hello <|im_end|>")
    whole = http.post(
        "/tokenize", json={"model": MODEL, "prompt": "Hello <|im_end|>", "return_token_strs": True}
    ).json()
    assert whole == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": ["H", "e", "l", "l", "o", "Ġ", "<|im_end|>"],
    }
    for options in ({}, {"add_generation_prompt": False}, {"parse_special": True}):
        counted = http.post("/tokenize", json={"messages": HELLO, **options}).json()["tokens"]
        answer = http.post(
            "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, "return_token_ids": True} | options
        )
        assert counted == answer.json()["choices"][0]["prompt_token_ids"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello <|im_end|>"}
    assert http.post("/tokenize", json={"prompt": "word " * 1000}).json()["count"] > 512


def test_tokenize_adds_bos_unless_told_otherwise(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(bos=True)
    with httpx.Client(base_url=server.url) as http:
        assert http.post("/tokenize", json={"prompt": "a"}).json()["tokens"] == [0, *server.ids("a")]
        fields = {"prompt": "a", "add_special_tokens": False}
        assert http.post("/tokenize", json=fields).json()["tokens"] == server.ids("a")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "made_up": 1}, "made_up"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokenize_refuses_by_name(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_tokenize_needs_the_key(make_server: Callable[..., ScriptedServer]) -> None:
    with httpx.Client(base_url=make_server(access=Access("secret")).url) as http:
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 401
        assert http.post("/detokenize", json={"tokens": []}).status_code == 401
