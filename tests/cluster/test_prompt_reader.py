"""The ingress sees the same tokens as the replica, and lets the replica answer for what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import build_tokenizer

from llmsched.cli.cluster.prompt_reader import PromptReader, ReadPrompts
from llmsched.engine.kv.cache_summary import prefix_hashes
from llmsched.engine.kv.prefix_tree import encode
from llmsched.engine.routing.rules import RoutedPrompt
from llmsched.engine.text.chat_template import render_chat
from llmsched.engine.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "some words that are repeated, " * 200


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def read(tokenizer: Tokenizer, path: str, body: Any, adapters: tuple[str, ...] = ()) -> ReadPrompts:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (prompts,) = PromptReader(tokenizer, 4096, 16, adapters, max_choices=8).read(path, data)
    return prompts


def routed(tokenizer: Tokenizer, path: str, body: Any, adapters: tuple[str, ...] = ()) -> RoutedPrompt:
    return read(tokenizer, path, body, adapters).first


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_chat_has_the_hashes_of_its_rendered_tokens(tokenizer: Tokenizer, path: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    ids = render_chat(tokenizer, messages)
    prompts = read(tokenizer, path, {"messages": messages} if path == CHAT else {"input": TEXT})
    assert prompts.token_ids == (encode(ids),)
    assert prompts.first.num_tokens == len(ids)
    assert prompts.first.hashes == prefix_hashes(encode(ids), "", 256)
    assert prompts.first.hashes


def test_every_prompt_of_a_completion_is_tokenised(tokenizer: Tokenizer) -> None:
    prompts = read(tokenizer, "/v1/completions", {"prompt": ["one", "two"]})
    assert prompts.token_ids == tuple(encode(tokenizer.encode(text)) for text in ("one", "two"))


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "another"]])
def test_the_first_text_of_a_completion_counts(tokenizer: Tokenizer, prompt: Any) -> None:
    assert routed(tokenizer, "/v1/completions", {"prompt": prompt}).num_tokens == len(tokenizer.encode(TEXT))


@pytest.mark.parametrize("prompt", [list(range(600)), [list(range(600)), [1]]])
def test_token_ids_are_taken_as_they_are(tokenizer: Tokenizer, prompt: Any) -> None:
    found = routed(tokenizer, "/v1/completions", {"prompt": prompt})
    assert found.hashes == prefix_hashes(encode(range(600)), "", 256)


def test_salts_and_adapters_are_apart(tokenizer: Tokenizer) -> None:
    body = {"prompt": TEXT, "model": "sql"}
    plain = routed(tokenizer, "/v1/completions", {"prompt": TEXT})
    salted = routed(tokenizer, "/v1/completions", {**body, "cache_salt": "a"})
    adapted = routed(tokenizer, "/v1/completions", body, ("chat", "sql"))
    assert len({plain.hashes[0], salted.hashes[0], adapted.hashes[0]}) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"not json"),
        (CHAT, {"messages": "no list"}),
        (CHAT, {}),
        (CHAT, [1]),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/completions", {"prompt": "x", "n": 9}),
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": [2**70]}),
        ("/v1/completions", {"prompt": ["text", 5]}),
        ("/v1/models", b""),
        (CHAT, b"[" * 100_000),
    ],
)
def test_what_cannot_be_read_is_routed_without_a_prefix(tokenizer: Tokenizer, path: str, body: Any) -> None:
    prompts = read(tokenizer, path, body)
    assert (prompts.first.hashes, prompts.token_ids) == ((), ())
