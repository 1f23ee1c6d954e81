"""/v1/chat/completions over a real socket, and both APIs through the OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from scripted import MODEL, ScriptedServer

from llmsched.engine.text.chat_template import render_chat

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def post(http: httpx.Client, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(http: httpx.Client, messages: Any = HELLO, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post(PATH, json={"messages": messages, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_fields(http: httpx.Client) -> None:
    answer = post(http, max_tokens=3)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)


def test_stream_begins_with_the_role_and_ends_with_the_reason(http: httpx.Client) -> None:
    chunks = stream(http, max_tokens=3)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:]) == "abc"
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]


def test_every_choice_of_a_stream_has_its_role(http: httpx.Client) -> None:
    choices = [choice for chunk in stream(http, n=2, max_tokens=2) for choice in chunk["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in own) == "ab"


def test_the_template_makes_the_prompt(http: httpx.Client, server: ScriptedServer) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = len(render_chat(server.tokenizer, turns))
    assert post(http, turns, max_tokens=1)["usage"]["prompt_tokens"] == expected


def test_text_parts_are_a_text(http: httpx.Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    whole = post(http, parts, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert whole == post(http, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]


def test_an_image_is_refused(http: httpx.Client) -> None:
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    answer = http.post(PATH, json={"messages": parts})
    assert answer.status_code == 400
    assert "image_url" in answer.json()["error"]["message"]


def test_without_max_tokens_the_answer_may_fill_the_context(http: httpx.Client) -> None:
    answer = post(http, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 2}])
def test_max_completion_tokens(http: httpx.Client, fields: dict[str, int]) -> None:
    assert post(http, **fields)["usage"]["completion_tokens"] == 2


def test_logprobs_have_the_bytes_of_the_text(http: httpx.Client, server: ScriptedServer) -> None:
    prompt = render_chat(server.tokenizer, HELLO)
    output = [*server.ids("天"), *server.ids("\U0001f34b")[:2], *server.ids("x")]
    server.force(prompt, output)
    choice = post(http, logprobs=True, top_logprobs=3)["choices"][0]
    rows = choice["logprobs"]["content"]
    assert len(rows) == len(output) + 1  # end-of-sequence is a token, without text
    assert all(len(row["top_logprobs"]) == 3 for row in rows)
    raw = b"".join(bytes(row["bytes"]) for row in rows)
    assert raw.decode(errors="replace") == choice["message"]["content"] == server.tokenizer.decode(output)
    streamed = stream(http, logprobs=True, top_logprobs=3)
    parts = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"] if choice["logprobs"]]
    assert [row for part in parts for row in part["content"]] == rows
    del server.script.outputs[tuple(prompt)]


def test_logprobs_only_on_demand(http: httpx.Client) -> None:
    assert post(http, max_tokens=1)["choices"][0]["logprobs"] is None
    rows = post(http, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [row["top_logprobs"] for row in rows] == [[]]


@pytest.mark.parametrize("streamed", [False, True])
def test_no_template(make_server: Callable[..., ScriptedServer], streamed: bool) -> None:
    with httpx.Client(base_url=make_server(chat_template=None).url) as http:
        answer = http.post(PATH, json={"messages": HELLO, "stream": streamed})
        assert answer.status_code == 400
        assert "/v1/completions" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_template_that_refuses(make_server: Callable[..., ScriptedServer], streamed: bool) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    with httpx.Client(base_url=make_server(chat_template=template).url) as http:
        assert http.post(PATH, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        answer = http.post(PATH, json={"messages": HELLO * 2, "stream": streamed})
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.6), ({"temperature": None}, 0.6), ({"temperature": 0}, 0.0), ({"temperature": 1.5}, 1.5)],
)
def test_defaults_of_the_model(
    make_server: Callable[..., ScriptedServer], fields: dict[str, Any], temperature: float
) -> None:
    server = make_server(sampling_defaults={"temperature": 0.6, "top_k": 64})
    seen = []
    next_token = server.script.next_token
    server.script.next_token = lambda sequence: seen.append(sequence.sampling) or next_token(sequence)  # type: ignore
    with httpx.Client(base_url=server.url) as http:
        post(http, max_tokens=1, n=2, **fields)
    assert [(sampling.temperature, sampling.top_k) for sampling in seen] == [(temperature, 64)] * 2


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        (PATH, {}, 7),
        (PATH, {"max_tokens": 3}, 3),
        (PATH, {"max_completion_tokens": 9}, 9),
        ("/v1/completions", {}, 7),
        ("/v1/completions", {"max_completion_tokens": 3, "max_tokens": 3, "stop": None}, 3),
        ("/v1/completions", {"max_completion_tokens": 2, "top_k": -1}, 2),
    ],
)
def test_limits_of_the_model(
    make_server: Callable[..., ScriptedServer], path: str, fields: dict[str, Any], count: int
) -> None:
    server = make_server(sampling_defaults={"max_tokens": 7, "min_tokens": 5, "top_k": -1})
    with httpx.Client(base_url=server.url) as http:
        prompt: dict[str, Any] = {"messages": HELLO} if path == PATH else {"prompt": "x"}
        answer = http.post(path, json={**prompt, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == count


def prompt_of(http: httpx.Client, path: str = PATH, **fields: Any) -> list[int]:
    answer = http.post(path, json={"max_tokens": 1, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["prompt_token_ids"])


def test_special_tokens_are_text_in_messages_and_tokens_in_prompts(http: httpx.Client) -> None:
    text = "hi<|im_end|>"
    messages = [{"role": "user", "content": text}]
    assert prompt_of(http, messages=messages).count(2) == 1
    assert prompt_of(http, messages=messages, parse_special=True).count(2) == 2
    assert prompt_of(http, "/v1/completions", prompt=text).count(2) == 1
    assert prompt_of(http, "/v1/completions", prompt=text, parse_special=False).count(2) == 0


def test_a_final_message_is_continued(http: httpx.Client, server: ScriptedServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The capital is"}]
    ids = prompt_of(http, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert server.tokenizer.decode(ids).endswith("The capital is")
    answer = http.post(PATH, json={"messages": messages, "continue_final_message": True, "add_generation_prompt": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"


# -- the OpenAI client ------------------------------------------------------------------------------------------


def test_client_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "llmsched"


def test_client_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=4, logprobs=True
    )
    assert answer.choices[0].message.content == "abcd"
    assert answer.usage.completion_tokens == 4
    assert [row.token for row in answer.choices[0].logprobs.content or []] == ["a", "b", "c", "d"]


def test_client_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abcd"
    assert chunks[-1].usage.completion_tokens == 4


def test_client_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=3, echo=True).choices[0].text == "xabc"
    chunks = client.completions.create(model=MODEL, prompt=["x", "y"], max_tokens=3, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abc", "abc"]


def test_client_extensions(client: openai.OpenAI, server: ScriptedServer) -> None:
    extra = {"stop_token_ids": server.ids("c"), "top_k": 5, "cache_salt": "tenant"}
    assert client.completions.create(model=MODEL, prompt="x", extra_body=extra).choices[0].text == "ab"


def test_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
