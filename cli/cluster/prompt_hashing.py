"""Prompts of HTTP requests as the router sees them: token counts and hashes of prefixes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from llmsched.engine.kv.cache_summary import prefix_hashes, span_of
from llmsched.engine.kv.prefix_tree import PrefixKey, encode
from llmsched.engine.request import NO_ADAPTER, prefix_key
from llmsched.engine.routing.rules import RoutedPrompt
from llmsched.engine.text.chat_template import render_chat
from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Bytes of a body that count as one token if the body cannot be tokenised here.
_BYTES_PER_TOKEN = 4


class PromptHasher:
    """Hasher of prompts. It accepts any body, because the replica reports errors in the body."""

    def __init__(self, tokenizer: Tokenizer, block_size: int, adapters: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._span = span_of(block_size)
        self._adapters = {name: index for index, name in enumerate(adapters)}

    def routed(self, path: str, body: bytes) -> RoutedPrompt:
        """Return the prompt of a request to `path`, the first one if the request has several."""
        try:
            fields = json.loads(body) if path in _READERS else None
            token_ids = _READERS[path](self._tokenizer, fields) if isinstance(fields, dict) else []
            key = self._key(fields) if isinstance(fields, dict) else ""
            return RoutedPrompt(len(token_ids), prefix_hashes(encode(token_ids), key, self._span), self._span)
        except Exception as error:  # the replica reports what is wrong with the body
            logger.debug("a request to %s is routed without its prefix: %s", path, error)
            return RoutedPrompt(len(body) // _BYTES_PER_TOKEN, (), self._span)

    def _key(self, fields: dict[str, Any]) -> PrefixKey:
        return prefix_key(self._adapters.get(str(fields.get("model")), NO_ADAPTER), str(fields.get("cache_salt") or ""))


def _completion_ids(tokenizer: Tokenizer, fields: dict[str, Any]) -> list[int]:
    prompt = fields["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _chat_ids(tokenizer: Tokenizer, fields: dict[str, Any]) -> list[int]:
    options = dict(fields.get("chat_template_kwargs") or {})
    if fields.get("tools"):
        options["tools"] = fields["tools"]
    return render_chat(tokenizer, fields["messages"], **options)


_READERS = {"/v1/completions": _completion_ids, "/v1/chat/completions": _chat_ids}
