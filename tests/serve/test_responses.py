"""/v1/responses through openai-python, on a scripted model that reasons and calls functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted import MODEL, ScriptedServer
from tool_templates import THINKING_TEMPLATE

from llmsched.cli.serve.choice_formats import ChoiceDelta
from llmsched.cli.serve.parsed_output import CallDelta
from llmsched.cli.serve.prompt_preparation import dumped
from llmsched.cli.serve.responses_answer import OutputItems
from llmsched.cli.serve.responses_request import ResponsesRequest
from llmsched.engine.text.parsers.parts import Kind, Part

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ScriptedServer]:
    settings = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_blocks": 512}
    server = ScriptedServer(chat_template=THINKING_TEMPLATE, **settings).start()
    yield server
    server.close()


def outline(response: Any) -> list[tuple[str, ...]]:
    """Return (type, content) of each output item, after checking its status."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        is_complete = response.status == "completed" or item is not response.output[-1]
        assert item.status == ("completed" if is_complete else "incomplete")
        match item.type:
            case "message":
                found.append(("message", "".join(part.text for part in item.content)))
            case "reasoning":
                found.append(("reasoning", "".join(part.text for part in item.content)))
            case "function_call":
                assert item.call_id.startswith("call_")
                found.append(("call", item.name, item.arguments))
    return found


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """Return the final response of a stream, after checking that its events add up to it."""
    events = list(client.responses.create(model=MODEL, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}"
    texts, num_parts = [""] * len(final.output), [0] * len(final.output)
    added, done = [], []
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
            assert event.item_id == final.output[event.output_index].id
        elif event.type == "response.output_item.added":
            assert len(added) == len(done) == event.output_index
            added.append(event.item.id)
        elif event.type == "response.output_item.done":
            done.append(event.item)
        elif event.type in ("response.content_part.added", "response.content_part.done"):
            num_parts[event.output_index] += 1
    assert done == final.output
    assert num_parts == [0 if item.type == "function_call" else 2 for item in final.output]
    assert texts == [item.arguments if item.type == "function_call" else item.content[0].text for item in final.output]
    return final


def both(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[tuple[str, ...]]]:
    """Return the whole response and its outline, after checking that a stream gives the same."""
    whole = client.responses.create(model=MODEL, **fields)
    final = streamed(client, **fields)
    assert outline(final) == outline(whole)
    assert (final.status, final.usage.total_tokens) == (whole.status, whole.usage.total_tokens)
    return whole, outline(whole)


def test_text(client: openai.OpenAI, say: Callable[[str], None], http: httpx.Client) -> None:
    say("Hm.</think>\n\nIt is warm.")
    whole, items = both(client, input="Warm?", instructions="Be brief.")
    assert items == [("reasoning", "Hm."), ("message", "It is warm.")]
    assert whole.output_text == "It is warm."
    assert (whole.status, whole.store, whole.instructions) == ("completed", False, "Be brief.")
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Warm?"}]}
    usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_calls(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say(f"Hm.</think>I look.\n{CALL}\n{CALL}")
    call = ("call", "weather", '{"city": "Rome"}')
    _, items = both(client, input=[{"role": "user", "content": "Warm?"}], tools=TOOLS)
    assert items == [("reasoning", "Hm."), ("message", "I look."), call, call]
    assert both(client, input="Warm?", tools=TOOLS, parallel_tool_calls=False)[1][2:] == [call]
    assert both(client, input="Warm?", tools=TOOLS, tool_choice="none")[1][1] == ("message", f"I look.\n{CALL}\n{CALL}")


def test_text_after_a_call(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say(f"</think>{CALL}\nThere it is.")
    call = ("call", "weather", '{"city": "Rome"}')
    assert both(client, input="Warm?", tools=TOOLS)[1] == [call, ("message", "There it is.")]
    say('</think><tool_call>\n{"name": "weather", "arguments": {"city": oh no')
    assert both(client, input="Warm?", tools=TOOLS)[1] == [("call", "weather", '{"city": '), ("message", "oh no")]


def test_arguments_and_text_in_one_output() -> None:
    items, parts = OutputItems(), [CallDelta(0, "{", "call_1", "weather")]
    list(items.add(ChoiceDelta(0, "", [], parts=[*parts])))
    list(items.add(ChoiceDelta(0, "Yes", [], parts=[CallDelta(0, "}"), Part(Kind.CONTENT, "Yes")])))
    assert [item["type"] for item in items.items] == ["function_call", "message"]
    assert items.items[0]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_output_tokens": 9999},
            "max_output_tokens is 9999, 10022 in all; shorten the prompt or lower max_output_tokens",
        ),
        ({"tools": [{"type": "web_search"}]}, "only function is supported"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools.0.name: this field is required"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: this field is required"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: is not supported by this server; leave it out"),
    ],
)
def test_errors_name_the_fields_of_this_api(http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = http.post(PATH, json={"input": "x", **fields})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_the_output_goes_back_as_input(
    client: openai.OpenAI, server: ScriptedServer, say: Callable[[str], None]
) -> None:
    say(f"Hm.</think>I look.{CALL}{CALL}")
    first = client.responses.create(model=MODEL, input="Warm?", tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    start = {"role": "user", "content": [{"type": "input_text", "text": "Warm?"}]}
    history: Any = [start, *first.output, *results]
    items = [start, *(item.model_dump() for item in first.output), *results]
    request = ResponsesRequest.model_validate({"input": items})
    user, answer, *tools = dumped(request.chat.messages)
    assert (user["role"], answer["role"], answer["reasoning_content"]) == ("user", "assistant", "Hm.")
    assert [call["id"] for call in answer["tool_calls"]] == [tool["tool_call_id"] for tool in tools]
    assert [tool["content"] for tool in tools] == ["21 degrees"] * 2
    say("</think>It is warm.")
    assert client.responses.create(model=MODEL, input=history, tools=TOOLS).output_text == "It is warm."


def test_a_truncated_answer_is_incomplete(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("</think>It is warm.")
    whole, items = both(client, input="Warm?", max_output_tokens=12)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert "It is warm.".startswith(items[0][1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"made_up": 1}, "made_up"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"model": "other"}, "model"),
    ],
)
def test_refusals(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={"input": "x", **fields})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_what_is_harmless_is_taken(http: httpx.Client, say: Callable[[str], None]) -> None:
    say("</think>Yes")
    fields = {"store": False, "truncation": "disabled", "metadata": {"a": "b"}, "include": [], "top_logprobs": 0}
    fields |= {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "high", "summary": "auto"}, "user": "u"}
    answer = http.post(PATH, json={"input": "x", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == {"a": "b"}


def test_a_failure_ends_the_stream_with_an_error(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    server.script.row_error = "no luck"
    with httpx.Client(base_url=server.url) as http:
        events = http.post(PATH, json={"input": "x", "stream": True}).text.strip().split("\n\n")
    name, data = events[-1].split("\n")
    assert name == "event: error"
    assert "no luck" in json.loads(data.removeprefix("data: "))["message"]
