"""Structured output over HTTP, with the clients that people use, on the real engine with a small model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from scripted import LiveServer

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.grammar import compiler
from llmsched.engine.grammar.spec import GrammarSpec

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


class Pet(BaseModel):
    name: str
    age: int
    kind: Literal["cat", "dog"]
    friends: list[bool]


@pytest.fixture(scope="module")
def server(tiny_model: Any) -> Iterator[LiveServer]:
    folder = str(tiny_model("llama"))
    config = EngineConfig(model=folder, dtype="float32", device="cpu", num_gpu_blocks_override=200, seed=0)
    server = LiveServer(build_engine(config), name=MODEL).start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def bias(server: LiveServer) -> dict[str, int]:
    return {str(server.ids(mark)[0]): 4 for mark in '"}],'}


def test_parse_with_a_pydantic_model(client: openai.OpenAI, bias: dict[str, int]) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Pet, max_tokens=300, seed=seed, logit_bias=bias
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Pet)
        assert choice.message.parsed == Pet.model_validate_json(choice.message.content or "")


def test_streams_join_to_the_whole_answer(client: openai.OpenAI, bias: dict[str, int]) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 1, "logit_bias": bias, "n": 2}
    fields["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "pet", "schema": Pet.model_json_schema()},
    }
    whole = client.chat.completions.create(**fields)
    texts, reasons = ["", ""], ["", ""]
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["stop", "stop"] == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    for text in texts:
        Pet.model_validate_json(text)


def test_the_parsing_stream_of_the_client(client: openai.OpenAI, bias: dict[str, int]) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Pet, max_tokens=300, seed=2, logit_bias=bias
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_schema_is_enforced_whatever_strict_is(client: openai.OpenAI, strict: bool | None) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    named: Any = {"name": "n", "schema": schema, "strict": strict}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": named}, seed=3
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_json_object(client: openai.OpenAI, bias: dict[str, int]) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        logit_bias=bias,
        seed=1,
        max_tokens=300,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_text_is_not_constrained(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    free = client.chat.completions.create(**fields)
    text = client.chat.completions.create(response_format={"type": "text"}, **fields)
    assert text.choices[0].message.content == free.choices[0].message.content


STRUCTURED: dict[str, tuple[Any, str]] = {
    "choice": (["red", "dark blue", "é"], "red|dark blue|é"),
    "regex": ("[a-f]{3}-[0-9]{2}", "[a-f]{3}-[0-9]{2}"),
    "grammar": ('root ::= ("x" | "yy") "=" [0-9]', "(x|yy)=[0-9]"),
    "json": ({"enum": ["a", 5]}, '"a"|5'),
    "json text": ('{"enum": ["a", 5]}', '"a"|5'),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_outputs(client: openai.OpenAI, kind: str) -> None:
    value, pattern = STRUCTURED[kind]
    extra = {"structured_outputs": {kind.split()[0]: value}}
    for temperature in (0, 1.5):
        done = client.completions.create(
            model=MODEL, prompt=["a", "b"], n=2, temperature=temperature, seed=1, max_tokens=40, extra_body=extra
        )
        for choice in done.choices:
            assert re.fullmatch(pattern, choice.text), choice.text
            assert choice.finish_reason == "stop"
        chat = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=temperature, seed=1, extra_body=extra
        )
        assert re.fullmatch(pattern, chat.choices[0].message.content or "")


def test_a_json_object_in_structured_outputs(http: httpx.Client, bias: dict[str, int]) -> None:
    body = {
        "prompt": "a",
        "structured_outputs": {"json_object": True},
        "logit_bias": bias,
        "max_tokens": 300,
        "seed": 4,
    }
    answer = http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert isinstance(json.loads(answer["text"]), dict)


def test_max_tokens_cuts_and_says_so(http: httpx.Client) -> None:
    body = {"prompt": "a", "structured_outputs": {"regex": "a{90}"}, "max_tokens": 3}
    answer = http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "length"


SCHEMA_WITH_NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_WITH_NOT}}},
            "response_format",
            'at #/properties/a: not supported: "not"',
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be given"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field 'schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
            "response_format",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "x"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"regex": "a" * 20000}}, "structured_outputs", "at most 16384"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "either structured_outputs or response_format",
        ),
        ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
        ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_errors_name_the_field(http: httpx.Client, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    start = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
    answer = http.post(path, json=start | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_complete_output_ends_before_min_tokens(http: httpx.Client) -> None:
    body = {"prompt": "a", "structured_outputs": {"regex": "a{2}"}, "min_tokens": 9, "max_tokens": 20}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("aa", "stop")


def test_compilations_are_counted(http: httpx.Client) -> None:
    def count() -> float:
        found = re.search(r"grammar_compile_seconds_count\S* (\S+)", http.get("/metrics").text)
        assert found
        return float(found[1])

    before = count()
    for _ in range(3):
        body = {"prompt": "a", "structured_outputs": {"regex": "[xyz]{2}"}, "max_tokens": 5}
        assert http.post("/v1/completions", json=body).status_code == 200
    assert count() == before + 1


def test_a_slow_compilation_holds_up_no_other_request(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    lark = compiler._lark

    def slow(spec: GrammarSpec) -> str:
        if spec.text == "slow":
            begun.set()
            gate.wait()
        return lark(spec)

    monkeypatch.setattr(compiler, "_lark", slow)

    def post(regex: str) -> httpx.Response:
        body = {"prompt": "a", "structured_outputs": {"regex": regex}, "max_tokens": 9}
        return httpx.post(f"{http.base_url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(2) as threads:
        late = [threads.submit(post, "slow") for _ in range(2)]
        assert begun.wait(20)
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert not any(each.done() for each in late)
        gate.set()
        assert [each.result().json()["choices"][0]["text"] for each in late] == ["slow"] * 2
