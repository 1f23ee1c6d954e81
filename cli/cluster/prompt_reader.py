"""Prompts of HTTP requests: their token ids for the replica, and hashes of their prefixes for the router."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llmsched.cli.serve.prompt_tokenizer import PromptTokenizer
from llmsched.cli.serve.protocol import (
    MAX_VALUES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelRequest,
    parse,
)
from llmsched.cli.serve.responses_request import ResponsesRequest
from llmsched.engine.kv.cache_summary import prefix_hashes, span_of
from llmsched.engine.kv.prefix_tree import TOKEN_BYTES, encode
from llmsched.engine.request import NO_ADAPTER, prefix_key
from llmsched.engine.routing.rules import RoutedPrompt
from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Bytes of a body that count as one token if the body is not tokenised here.
_BYTES_PER_TOKEN = 4
_SCHEMAS: Mapping[str, type[ModelRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}


class ReadPrompts(NamedTuple):
    """Prompts of a request."""

    first: RoutedPrompt
    token_ids: tuple[bytes, ...] = ()  # of each prompt, encoded; empty if the replica must tokenise them


class PromptReader:
    """Reader of the prompts in requests. It accepts any body, because the replica reports errors in the body.

    `max_model_len` is the context of the replicas in tokens, or more. Tokenisation is slow, so use the reader in
    threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        block_size: int,
        adapters: Sequence[str] = (),
        max_choices: int = 1,
    ) -> None:
        self._prompts = PromptTokenizer(tokenizer, max_model_len)
        self._max_values = MAX_VALUES + max_model_len
        self._max_choices = max_choices
        self._span = span_of(block_size)
        self._adapters = {name: index for index, name in enumerate(adapters)}

    def read(self, path: str, body: bytes) -> Iterator[ReadPrompts]:
        """Yield the prompts of a request to `path`, all in one item. `PreparationTurns.collect` runs such iterators."""
        try:
            yield self._tokenised(path, body) if path in _SCHEMAS else self.unread(body)
        except Exception as error:  # the replica reports what is wrong with the body
            logger.debug("a request to %s is routed without its prefix: %s", path, error)
            yield self.unread(body)

    def unread(self, body: bytes) -> ReadPrompts:
        """Return what is known about the prompts without tokenising them."""
        return ReadPrompts(RoutedPrompt(len(body) // _BYTES_PER_TOKEN, (), self._span))

    def _tokenised(self, path: str, body: bytes) -> ReadPrompts:
        request = parse(_SCHEMAS[path], body, self._max_choices, self._max_values)
        generation = request.chat if isinstance(request, ResponsesRequest) else request
        assert isinstance(generation, GenerationRequest)
        token_ids = tuple(map(encode, self._prompts.prompts(generation)))
        key = prefix_key(self._adapters.get(request.model or "", NO_ADAPTER), generation.cache_salt or "")
        hashes = prefix_hashes(token_ids[0], key, self._span)
        return ReadPrompts(RoutedPrompt(len(token_ids[0]) // TOKEN_BYTES, hashes, self._span), token_ids)
