"""Calls that a grammar forces, on the real engine with a small random-weight model, which would never write one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel
from scripted import LiveServer
from tiny_models import build_model, build_tokenizer
from tokenizers import AddedToken
from tool_templates import THINKING_TEMPLATE

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
COLORS = ["red", "blue"]
PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": COLORS}},
    "required": ["color"],
    "additionalProperties": False,
}
_TOKENIZER = Tokenizer(build_tokenizer())
#: Keeps the model from filling its answer with white space.
BLANKS = {str(i): -100 for i in range(300) if (text := _TOKENIZER.token_bytes(i)) and not text.strip()}
WAIT: dict[str, Any] = {"type": "function", "function": {"name": "wait"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "paint", "parameters": PAINT, **fields}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose prompts open its reasoning, which one token ends."""
    path = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(path)
    fast = build_tokenizer(chat_template=THINKING_TEMPLATE)
    fast.backend_tokenizer.add_tokens([AddedToken("</think>", normalized=False)])
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", num_gpu_blocks_override=256)
    server = LiveServer(build_engine(config), name="tiny").start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    common = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none", "max_tokens": 120, "seed": 1}
    return {**common, "tools": [tool(), WAIT], "logit_bias": BLANKS, **fields}


def answers(http: httpx.Client, **fields: Any) -> list[tuple[str, list[tuple[str, Any]], str]]:
    """Return (finish reason, calls, content) of each choice."""
    answer = http.post(PATH, json=body(**fields))
    assert answer.status_code == 200, answer.text
    found = []
    for choice in answer.json()["choices"]:
        message, reason = choice["message"], choice["finish_reason"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        complete = functions[:-1] if reason == "length" else functions
        calls = [(each["name"], json.loads(each["arguments"])) for each in complete]
        found.append((reason, calls, message["content"] or ""))
    return found


def refusal(http: httpx.Client, **fields: Any) -> tuple[str, str]:
    """Return the field and the message of a 400."""
    answer = http.post(PATH, json=body(**fields))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def test_required_calls(http: httpx.Client) -> None:
    found = answers(http, tool_choice="required", n=32, temperature=2)
    for reason, calls, content in found:
        assert not content or reason == "length"
        assert reason in ("tool_calls", "length")
        assert calls or reason == "length"
        assert all(arguments.get("color") in COLORS for name, arguments in calls if name == "paint")
        assert all(arguments == {} for name, arguments in calls if name == "wait")
    assert {name for _, calls, _ in found for name, _ in calls} == {"paint", "wait"}
    assert any(reason == "tool_calls" for reason, _, _ in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "paint"}}},
        {"tool_choice": "required", "parallel_tool_calls": False, "tools": [tool()]},
    ],
)
def test_one_call(http: httpx.Client, fields: dict[str, Any]) -> None:
    for reason, calls, _ in answers(http, n=8, temperature=1.2, **fields):
        assert reason == "tool_calls"
        assert [name for name, _ in calls] == ["paint"]


def test_a_stream_has_the_same_call(http: httpx.Client) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": "paint"}}}
    ((_, ((name, arguments),), _),) = answers(http, **fields)
    events = http.post(PATH, json=body(stream=True, **fields)).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [part["name"] for part in parts if "name" in part] == [name]
    assert json.loads("".join(part["arguments"] for part in parts)) == arguments
    assert choices[-1]["finish_reason"] == "tool_calls"


class Paint(BaseModel):
    """Paint something."""

    color: Literal["red", "blue"]


def test_openai_python_parses_the_arguments(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    fields: Any = {"model": "tiny", "messages": body()["messages"], "reasoning_effort": "none", "logit_bias": BLANKS}
    fields |= {"tools": [openai.pydantic_function_tool(Paint)], "tool_choice": "required"}
    answer = client.chat.completions.parse(parallel_tool_calls=False, **fields)
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Paint)
    with client.chat.completions.stream(parallel_tool_calls=False, seed=2, **fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [type(event.parsed_arguments) for event in done] == [Paint]


def test_openai_python_parses_responses(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    fields: Any = {"model": "tiny", "input": "x", "reasoning": {"effort": "none"}}
    assert isinstance(client.responses.parse(text_format=Paint, **fields).output_parsed, Paint)
    tools: Any = [{"type": "function", "name": "paint", "parameters": PAINT}]
    with client.responses.stream(tools=tools, tool_choice={"type": "function", "name": "paint"}, **fields) as stream:
        (item,) = stream.get_final_response().output
    assert (item.type, json.loads(item.arguments)["color"] in COLORS) == ("function_call", True)


def test_tools_beside_a_response_format(http: httpx.Client) -> None:
    schema = {"name": "answer", "schema": {"enum": ["yes", "no"]}}
    found = answers(http, response_format={"type": "json_schema", "json_schema": schema}, n=16, temperature=1.5)
    for reason, calls, content in found:
        assert bool(calls) != bool(content) or reason == "length"
        assert not content or json.loads(content) in ("yes", "no")
    only = answers(http, response_format={"type": "json_schema", "json_schema": schema}, tool_choice="none", n=4)
    assert all(json.loads(content) in ("yes", "no") for _, _, content in only)


def test_strict_functions_allow_text(http: httpx.Client) -> None:
    found = answers(http, tools=[tool(strict=True)], n=4, max_tokens=20)
    assert all(content and reason == "length" for reason, _, content in found)


def test_what_cannot_be_forced(http: httpx.Client) -> None:
    wrong = {**PAINT, "properties": {"color": {"type": "string", "not": {"const": "red"}}}}
    param, message = refusal(http, tools=[tool(parameters=wrong, strict=True)], tool_choice="required")
    assert param == "tools"
    assert message.startswith("tools: parameters of paint: the schema cannot be enforced: at #/properties/color")
    loose = {"tools": [tool(parameters=wrong)], "tool_choice": "required", "parallel_tool_calls": False, "n": 8}
    found = answers(http, max_tokens=250, **loose)
    assert any(reason == "tool_calls" for reason, _, _ in found)
    assert all(isinstance(arguments, dict) for _, calls, _ in found for _, arguments in calls)
    assert refusal(http, structured_outputs={"choice": ["a"]})[0] == "structured_outputs"
    costly = {"properties": {"x": {"type": "integer", "multipleOf": 99_999_989}}}
    param, message = refusal(http, tools=[tool(parameters=costly, strict=True)], tool_choice="required")
    assert param == "tools"
    assert "at #/properties/x: multipleOf" in message
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": costly}}
    assert refusal(http, response_format=response_format)[0] == "response_format"
    yes_no = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    param, message = refusal(http, tools=[tool(parameters=wrong, strict=True)], response_format=yes_no)
    assert (param, "parameters of paint" in message) == ("tools", True)
    other = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
    param, message = refusal(http, response_format=other)
    assert (param, "at #/properties/color: not supported" in message) == ("response_format", True)
    no_json = {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}
    assert all(not content or reason == "length" for reason, _, content in answers(http, response_format=no_json))


# -- reasoning ------------------------------------------------------------------------------------------------------


def test_the_grammar_begins_after_the_reasoning(http: httpx.Client, server: LiveServer) -> None:
    end = server.tokenizer.backend.token_to_id("</think>")
    fields = {"reasoning_effort": "high", "tool_choice": "required", "temperature": 1, "n": 4}
    for reason, calls, content in answers(http, logit_bias={**BLANKS, str(end): 8}, **fields):
        assert calls or reason == "length"
        assert not content or reason == "length"
    endless = answers(http, logit_bias={str(end): -100}, **fields)
    assert all((reason, calls, content) == ("length", [], "") for reason, calls, content in endless)
