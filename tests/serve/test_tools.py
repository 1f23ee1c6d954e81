"""Tool calls and reasoning of /v1/chat/completions, through openai-python on a scripted model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted import EOS, MODEL, ScriptedServer
from tool_templates import THINKING_TEMPLATE, TOOL_TEMPLATES

PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
ROME, BONN = '{"city": "Rome"}', '{"city": "Bonn"}'
CALLS = f"""Let me see.
<tool_call>
{{"name": "weather", "arguments": {ROME}}}
</tool_call>
<tool_call>
{{"name": "time", "arguments": {BONN}}}
</tool_call>"""


LARGE = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_blocks": 512}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ScriptedServer]:
    """Start a server whose model reasons, and whose template shows tools in the notation of Hermes."""
    server = ScriptedServer(chat_template=THINKING_TEMPLATE, **LARGE).start()
    yield server
    server.close()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, **{"messages": HELLO, "tools": TOOLS, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream, joined from its deltas as clients do."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in ask(client, stream=True, **fields):
        for part in chunk.choices:
            delta = part.delta.model_dump(exclude_none=True)
            start = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
            choice = choices.setdefault(part.index, start)
            assert choice["finish_reason"] is None
            choice["finish_reason"] = part.finish_reason
            choice["content"] += delta.get("content", "")
            choice["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                calls = choice["tool_calls"]
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                    continue
                assert call.keys() == {"index", "function"}
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return [choices[index] for index in sorted(choices)]


def whole(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer in the form of `streamed`."""
    choices = []
    for choice in ask(client, **fields).choices:
        message = choice.message.model_dump()
        choices.append(
            {
                "content": message["content"] or "",
                "reasoning_content": message.get("reasoning_content", ""),
                "tool_calls": message["tool_calls"] or [],
                "finish_reason": choice.finish_reason,
            }
        )
    return choices


def same(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """Return the first choice, after checking that all choices of the stream and of the whole answer are alike."""
    answers = whole(client, **fields) + streamed(client, **fields)
    assert len(answers) == 2 * fields.get("n", 1)
    ids = [call.pop("id") for answer in answers for call in answer["tool_calls"]]
    assert all(re.fullmatch(r"call_\w{24}", each) for each in ids)
    assert len(set(ids)) == len(ids)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def calls_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in answer["tool_calls"])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]


@pytest.mark.parametrize("n", [1, 3])
def test_calls(client: openai.OpenAI, say: Callable[[str], None], n: int) -> None:
    say(f"I look.\n</think>\n\n{CALLS}")
    answer = same(client, n=n)
    assert calls_of(answer) == [("weather", ROME), ("time", BONN)]
    assert (answer["content"], answer["reasoning_content"]) == ("Let me see.", "I look.")
    assert answer["finish_reason"] == "tool_calls"


def test_a_call_alone_has_no_content(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("</think>\n\n" + CALLS.removeprefix("Let me see.\n"))
    message = ask(client).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 2


def test_arguments_are_streamed_token_by_token(
    server: ScriptedServer, client: openai.OpenAI, say: Callable[[str], None]
) -> None:
    say("</think>" + CALLS)
    server.script.gate.clear()
    stream = ask(client, stream=True)
    server.script.gate.set()
    deltas = [call.function for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [each.name for each in deltas if each.name] == ["weather", "time"]
    assert "".join(each.arguments for each in deltas) == ROME + BONN


def test_parallel_tool_calls_may_be_refused(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("</think>" + CALLS)
    answer = same(client, parallel_tool_calls=False)
    assert calls_of(answer) == [("weather", ROME)]
    assert answer["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_content(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("</think>" + CALLS)
    for fields in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
        answer = same(client, **fields)
        assert (answer["content"], answer["tool_calls"], answer["finish_reason"]) == (CALLS, [], "stop")


def test_the_prompt_has_the_tools_unless_none_may_be_called(server: ScriptedServer, http: httpx.Client) -> None:
    def prompt(**fields: Any) -> str:
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True, **fields}
        ids = http.post(PATH, json=body).json()["choices"][0]["prompt_token_ids"]
        tokenized = {"messages": HELLO, "tools": body["tools"]}
        if "tool_choice" not in fields:
            assert http.post("/tokenize", json=tokenized).json()["tokens"] == ids
        return server.tokenizer.decode(ids)

    shown = json.dumps(TOOLS[1])
    assert shown in prompt()
    assert "Look it up" not in prompt(tool_choice="none")
    assert prompt(tools=[]) == prompt(tool_choice="none")


def test_a_truncated_call_ends_with_length(
    client: openai.OpenAI, server: ScriptedServer, say: Callable[[str], None]
) -> None:
    say("</think>" + CALLS)
    most = len(server.ids("</think>" + CALLS[: CALLS.index("Rome") + 2]))
    answer = same(client, max_tokens=most)
    assert answer["finish_reason"] == "length"
    assert calls_of(answer) == [("weather", '{"city": "Ro')]


def test_a_stop_string_ends_a_call(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("</think>" + CALLS)
    answer = same(client, stop=["</tool_call>"])
    assert calls_of(answer) == [("weather", ROME)]
    assert answer["finish_reason"] == "tool_calls"
    answer = same(client, stop=["Rome"])
    assert calls_of(answer) == [("weather", '{"city": "')]
    assert answer["finish_reason"] == "stop"


def test_malformed_calls_are_content(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    text = CALLS.replace('"name": ', '"name" ')
    say(f"</think>{text}")
    answer = same(client)
    assert (answer["content"], answer["tool_calls"], answer["finish_reason"]) == (text, [], "stop")


def test_logprobs_cover_every_token(http: httpx.Client, server: ScriptedServer, say: Callable[[str], None]) -> None:
    text = f"Hm.</think>{CALLS}"
    say(text)
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True}
    rows = http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows[:-1]) == text
    events = http.post(PATH, json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "[DONE]" not in event and event]
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [row for part in parts for row in part["content"]] == rows


def test_the_results_go_back_to_the_model(
    client: openai.OpenAI, server: ScriptedServer, say: Callable[[str], None]
) -> None:
    say("</think>" + CALLS)
    message = ask(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in message.tool_calls]
    say("</think>Warm.")
    history = [*HELLO, message, *results]
    answer = ask(client, messages=history, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == "Warm."
    prompt = server.tokenizer.decode(answer.choices[0].prompt_token_ids)
    assert f'<tool_call>\n{{"name": "time", "arguments": {BONN}}}\n</tool_call>' in prompt
    assert prompt.count("tool\n21 degrees") == 2


# -- reasoning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fields", [{"tools": openai.omit}, {}])
def test_reasoning(client: openai.OpenAI, say: Callable[[str], None], fields: dict[str, Any], n: int) -> None:
    say("Hm, warm.\n</think>\n\nIt is warm. \n")
    answer = same(client, n=n, **fields)
    expected = ("It is warm. \n", "Hm, warm.", "stop")
    assert (answer["content"], answer["reasoning_content"], answer["finish_reason"]) == expected


def test_reasoning_that_does_not_end_is_no_content(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    say("Hm, warm or cold")
    answer = same(client)
    assert (answer["content"], answer["reasoning_content"]) == ("", "Hm, warm or cold")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_reasoning_can_be_turned_off(
    http: httpx.Client, say: Callable[[str], None], fields: dict[str, Any], thinks: bool
) -> None:
    say("abc")
    message = http.post(PATH, json={"messages": HELLO, **fields}).json()["choices"][0]["message"]
    expected = {"content": "", "reasoning_content": "abc"} if thinks else {"content": "abc"}
    assert message == {"role": "assistant", "refusal": None, **expected}


def test_reasoning_tokens_are_counted(make_server: Callable[..., ScriptedServer]) -> None:
    """The texts around reasoning may be special tokens."""
    server = make_server(chat_template=THINKING_TEMPLATE, special_tokens=("<think>", "</think>"), **LARGE)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    reasoning = server.ids("Hm, warm.</think>")
    server.script.alphabet = [*reasoning, *server.ids("Warm."), EOS]
    counts = []
    for effort, text in (("high", "Warm."), ("none", "Hm, warm.</think>Warm.")):
        fields = {"reasoning_effort": effort, "n": 2}
        assert same(client, **fields)["content"] == text
        counts.append(ask(client, **fields).usage.completion_tokens_details.reasoning_tokens)
        *_, last = ask(client, stream=True, stream_options={"include_usage": True}, **fields)
        assert last.usage.completion_tokens_details.reasoning_tokens == counts[-1]
    assert counts == [2 * len(reasoning), 0]


@pytest.mark.parametrize(("begun", "thinks"), [("<think>Hm,", True), ("<think>Hm.</think>It", False), ("It", False)])
def test_a_continued_message_may_be_reasoning(
    http: httpx.Client, say: Callable[[str], None], begun: str, thinks: bool
) -> None:
    say(" warm")
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    answer = http.post(PATH, json={"messages": messages, "continue_final_message": True})
    message = answer.json()["choices"][0]["message"]
    expected = {"content": "", "reasoning_content": "warm"} if thinks else {"content": " warm"}
    assert message == {"role": "assistant", "refusal": None, **expected}


# -- other models ---------------------------------------------------------------------------------------------------


def test_markers_that_are_special_tokens(make_server: Callable[..., ScriptedServer]) -> None:
    markers = ("[TOOL_CALLS]", "[ARGS]")
    server = make_server(chat_template=TOOL_TEMPLATES["mistral"], special_tokens=markers, **LARGE)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    output = server.ids(f"Let me see.[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]time[ARGS]{BONN}")
    assert server.tokenizer.backend.token_to_id("[ARGS]") in output
    server.script.alphabet = [*output, EOS]
    answer = same(client)
    assert calls_of(answer) == [("weather", ROME), ("time", BONN)]
    assert answer["content"] == "Let me see."
    assert same(client, tools=openai.omit)["content"] == f"Let me see.weather{ROME}time{BONN}"


def test_harmony(make_server: Callable[..., ScriptedServer]) -> None:
    """Every answer of such a model is parsed, with and without tools."""
    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
    server = make_server(chat_template=TOOL_TEMPLATES["harmony"], special_tokens=markers, **LARGE)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"
    server.script.alphabet = [*server.ids(reasoning + call), EOS]
    answer = same(client)
    assert (answer["reasoning_content"], calls_of(answer)) == ("Hm.", [("weather", ROME)])
    server.script.alphabet = [*server.ids(f"{reasoning}<|channel|>final<|message|>Warm."), EOS]
    answer = same(client, tools=openai.omit)
    assert (answer["reasoning_content"], answer["content"], answer["finish_reason"]) == ("Hm.", "Warm.", "stop")


def test_a_template_without_tools(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(**LARGE)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    server.script.alphabet = [*server.ids(CALLS), EOS]
    answer = ask(client, extra_body={"return_token_ids": True}).choices[0]
    assert len(answer.message.tool_calls) == 2
    assert f"<tools>\n{json.dumps(TOOLS[0])}" in server.tokenizer.decode(answer.prompt_token_ids)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort is not supported") as caught:
        ask(client, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


def test_a_notation_that_is_not_known(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(chat_template=TOOL_TEMPLATES["hermes"].replace('{"name": "', "CALL "))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="knows no notation") as caught:
        ask(client)
    assert caught.value.param == "tools"
    assert ask(client, tool_choice="none", max_tokens=2).choices[0].message.content == "ab"
