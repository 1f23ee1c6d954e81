"""Request schemas: strict types, unknown and unsupported fields by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmsched.cli.serve.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, parse
from llmsched.engine.errors import RequestError

HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def refusal(call: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(**fields)
    return caught.value


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", '"1.0"', "true", "{}"])
def test_numbers_are_finite_numbers(field: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, f'{{"prompt": "a", "{field}": {value}}}'.encode())
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize("field", [*NUMBERS, "max_tokens", "n", "seed", "stop", "logit_bias", "logprobs", "stream"])
def test_null_is_the_default(field: str) -> None:
    assert completion(**{field: None}).sampling_fields() == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", "x"),
        ("max_tokens", []),
        ("max_tokens", True),
        ("n", True),
        ("seed", "x"),
        ("seed", 1 << 63),
        ("top_k", 1 << 63),
        ("stream", "maybe"),
        ("stream", 1),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", ["a"]),
        ("logprobs", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", 10**8),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": 101}),
        ("priority", 1.0),
        ("cache_salt", "x" * 2000),
        ("model", 5),
        ("best_of", 10**6),
        ("echo", "yes"),
        ("prompt", 5),
        ("prompt", {"a": 1}),
        ("prompt", []),
        ("prompt", [["a"]]),
        ("prompt", [1, "a"]),
        ("prompt", [1, True]),
        ("prompt", ["a"] * (MAX_CHOICES + 1)),
        ("suffix", "x"),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_completions_refuse_by_name(field: str, value: Any) -> None:
    error = refusal(completion, **{field: value})
    assert error.param == field
    assert field in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]]), ([[]], [[]])],
)
def test_four_kinds_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_prompts_times_n_is_bounded() -> None:
    assert refusal(completion, prompt=["a"] * 100, n=128).param == "n"


def test_best_of_is_accepted_if_it_equals_n() -> None:
    assert completion(n=2, best_of=2).n == 2


def test_logit_bias_has_ids_as_keys() -> None:
    assert completion(logit_bias={"464": -100, "7": 1.5}).sampling_fields() == {"logit_bias": {464: -100.0, 7: 1.5}}


@pytest.mark.parametrize("stop", ["x", ["x"]])
def test_one_stop_string_or_several(stop: Any) -> None:
    assert completion(stop=stop).sampling_fields() == {"stop": ("x",)}


def test_an_explicit_zero_is_given() -> None:
    assert completion(temperature=0, top_p=0).sampling_fields() == {"temperature": 0.0, "top_p": 0.0}


@pytest.mark.parametrize("call", [completion, chat])
def test_unknown_fields_are_refused_by_name(call: Any) -> None:
    error = refusal(call, made_up_field=1)
    assert (error.param, error.code) == ("made_up_field", "unknown_parameter")
    assert "made_up_field" in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"top_logprobs": None},
    ],
)
def test_harmless_fields_of_the_api_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling_fields() == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["audio"]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_is_not_supported_is_said(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert "not supported" in str(error)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": {}}, "tools", "tools: input should be a valid list"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: this field is required"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools",
            "tools.0.function.parameters: the type must be",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "'f' more than once"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", '"none", "auto", "required"'),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", '"none", "auto", "required"'),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names the function 'g'",
        ),
        ({"tool_choice": "auto"}, "tool_choice", "only allowed when tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed when tools"),
        ({"tools": [TOOL], "chat_template_kwargs": {"tools": []}}, "tools", "differ"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", "reasoning_effort"),
    ],
)
def test_tools_that_cannot_be(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields).template_kwargs()
    assert caught.value.param == param
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "shown", "callable_names"),
    [
        (None, 2, ["f", "g"]),
        ("auto", 2, ["f", "g"]),
        ("required", 2, ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, 2, ["g"]),
        ("none", None, []),
    ],
)
def test_tool_choice(choice: Any, shown: int | None, callable_names: list[str]) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "g", "strict": True, "returns": "x"}}]
    request = chat(tools=tools, tool_choice=choice)
    options = request.template_kwargs()
    assert (len(options["tools"]) if "tools" in options else None) == shown
    assert [tool.function.name for tool in request.callable_tools()] == callable_names
    if shown:
        no_parameters = {"type": "object", "properties": {}}
        function = {"name": "g", "returns": "x", "parameters": no_parameters}
        assert options["tools"][1] == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "no role"}], "messages.0.role"),
        ([{"role": "narrator", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([*HELLO, {"role": "user", "content": "x", "images": ["aGk="]}], "messages.1: field 'images' is not supported"),
        ([{"role": "assistant", "content": "x", "prefix": True}], "messages.0: field 'prefix' is not supported"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "messages.0: field 'audio' is not supported"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "only an assistant message can have tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function: this field is"),
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls"),
    ],
)
def test_messages(messages: Any, where: str) -> None:
    error = refusal(chat, messages=messages)
    assert error.param == "messages"
    assert where in str(error)


def test_an_answer_of_ours_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "audio": None}
    assert len(chat(messages=[*HELLO, answer, *HELLO]).messages) == 3


NOTES = {
    "id": 5,
    "reasoning": "hm",
    "metadata": {"a": 1},
    "annotations": [{"type": "url_citation"}],
    "created_at": 1.5,
    "images": [],
    "prefix": False,
    "type": "message",
    "reasoning_content": ["not text"],
    "made_up": [],
}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_the_clients_notes_in_messages_are_ignored(role: str) -> None:
    message = {"role": role, "content": "x"}
    kept = chat(messages=[{**message, **NOTES}, {**message, "reasoning_content": "hm"}]).messages
    assert [each.model_dump(exclude_none=True) for each in kept] == [message, {**message, "reasoning_content": "hm"}]


def test_messages_without_content() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None},
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]},
        {"role": "assistant", "function_call": call["function"]},
        {"role": "function", "name": "f", "content": None},
    ]
    assert [each.model_dump(exclude_none=True) for each in chat(messages=messages).messages] == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": ""},
    ]


PAYLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "guidellm": (
        completion,
        {"max_tokens": 1, "max_completion_tokens": 1, "stop": None, "ignore_eos": True, "stream": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "guidellm chat": (chat, {"max_tokens": 1, "max_completion_tokens": 1, "stop": None, "ignore_eos": True}),
    "lm-eval": (completion, {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}),
    "lm-eval chat": (
        chat,
        {"messages": [{"role": "user", "content": "x", "type": "text"}], "max_tokens": 256, "temperature": 0}
        | {"stop": ["a", "b"], "seed": 1234},
    ),
    "langchain": (
        completion,
        {"temperature": 0.7, "max_tokens": 256, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1}
        | {"logit_bias": {}, "seed": None, "logprobs": None},
    ),
    "langchain chat": (chat, {"stream": False, "temperature": None, "max_completion_tokens": 5, "stop": None}),
    "open-webui": (chat, {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 50}),
    "vllm bench": (
        completion,
        {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None, "stream": True, "top_k": -1},
    ),
    "sglang bench": (completion, {"temperature": 0.0, "best_of": 1, "max_tokens": 5, "ignore_eos": True}),
}


@pytest.mark.parametrize("client", PAYLOADS)
def test_what_clients_send(client: str) -> None:
    call, fields = PAYLOADS[client]
    limits = {fields.get("max_tokens"), fields.get("max_completion_tokens")} - {None}
    assert call(**fields).most_tokens == limits.pop()


@pytest.mark.parametrize("call", [completion, chat])
def test_different_limits_are_refused(call: Any) -> None:
    assert refusal(call, max_tokens=3, max_completion_tokens=4).param == "max_completion_tokens"


def test_the_end_of_the_prompt_is_chosen_by_fields() -> None:
    request = chat(continue_final_message=True, add_generation_prompt=False, chat_template_kwargs={"a": 1})
    assert request.template_kwargs() == {"continue_final_message": True, "add_generation_prompt": False, "a": 1}
    twice = chat(add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True})
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.add_generation_prompt differ"):
        twice.template_kwargs()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": 3},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"made_up": 1}},
    ],
)
def test_chat_refuses(fields: dict[str, Any]) -> None:
    assert refusal(chat, **fields).param in fields


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "x", ',
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800 half"}',
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", **{f"field{i}": 1 for i in range(20_000)}},
        {"prompt": "a", "stop": [1] * 50_000},
        {"prompt": ["a"] * 50_000 + [1]},
        {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(50_000)}},
    ],
    ids=["fields", "stops", "prompts", "biases"],
)
def test_thousands_of_faults_make_one_short_error(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, json.dumps(body).encode())
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ['"', "\\", '\\"', ',"[{', "\\\\,", 'é"\\,'])
@pytest.mark.parametrize("shift", range(3))
def test_only_values_outside_texts_count(text: str, shift: int) -> None:
    """The body is searched in slices, which may end within an escape or a text."""
    fields = {"prompt": "a" * shift + text * 30_000, "stop": ["x", "y"], "temperature": 0}
    assert parse(CompletionRequest, json.dumps(fields).encode(), max_values=6).prompt == [fields["prompt"]]
    with pytest.raises(RequestError, match="more than 4 JSON values"):
        parse(CompletionRequest, json.dumps(fields).encode(), max_values=4)
