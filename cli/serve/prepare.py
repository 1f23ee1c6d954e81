"""Conversion of validated requests to token ids and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llmsched.cli.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    PrefixRequest,
    Prompt,
)
from llmsched.engine import Engine, SamplingParams
from llmsched.engine.errors import RequestError
from llmsched.engine.text.chat import render_chat

#: Default max_tokens of /v1/completions. If less room is left in the context, that room is the default.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Tokenised prompt and its sampling parameters. `text` is None if the client sent token ids or messages."""

    token_ids: list[int]
    text: str | None
    sampling: SamplingParams


class Preparer:
    """Converter of requests to token ids and sampling parameters. It is slow, so call it in worker threads."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.config.max_model_len
        self._defaults = dict(engine.model.sampling_defaults)
        ids = range(self._tokenizer.vocab_size)
        self._longest_token = max((len(self._tokenizer.token_bytes(i)) for i in ids), default=1)

    def completion(self, request: CompletionRequest) -> list[PreparedPrompt]:
        """Return tokenised prompts. Raises RequestError for a bad parameter, or a prompt longer than the context."""
        extra: dict[str, Any] = {"logprobs": request.logprobs}
        if request.echo:
            extra["prompt_logprobs"] = request.logprobs
        prepared = []
        for prompt in request.prompt:
            token_ids = self._token_ids(prompt, request.parse_special is not False)
            sampling = self._sampling(request, len(token_ids), DEFAULT_MAX_TOKENS, extra)
            prepared.append(PreparedPrompt(token_ids, prompt if isinstance(prompt, str) else None, sampling))
        return prepared

    def chat(self, request: ChatRequest) -> list[PreparedPrompt]:
        """Return the one tokenised prompt of a chat, in a list. Without max_tokens, the answer may fill the context.

        Raises RequestError for a bad parameter, and for messages that the template refuses or that cannot fit.
        """
        messages = self._messages(request.messages)
        token_ids = render_chat(self._tokenizer, messages, **request.template_kwargs())
        extra = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
        return [PreparedPrompt(token_ids, None, self._sampling(request, len(token_ids), self._max_model_len, extra))]

    def prefix(self, request: PrefixRequest) -> list[int]:
        """Return the token ids of a prefix. Raises RequestError if the prefix is too long or not valid.

        If the last message is from the user, the prefix is the whole prompt of the chat. Otherwise it is the common
        beginning of all chats that continue these messages with one from the user.
        """
        if request.messages is None:
            assert request.prompt is not None
            return self._token_ids(request.prompt)
        messages = self._messages(request.messages)
        options = request.chat_template_kwargs or {}
        if messages[-1]["role"] == "user":
            return render_chat(self._tokenizer, messages, **options)
        one, two = (
            render_chat(self._tokenizer, [*messages, {"role": "user", "content": text}], **options) for text in "ab"
        )
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))]

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as dicts for the chat template. Raises RequestError if they cannot fit the context."""
        characters = 0
        for message in messages:
            if isinstance(message.content, str):
                characters += len(message.content)
            else:  # render_chat refuses parts that are not text
                texts = [part.get("text") for part in message.content]
                characters += sum(len(text) for text in texts if isinstance(text, str))
        self._refuse_surely_too_long(characters, "messages")
        return [message.model_dump(exclude_none=True) for message in messages]

    def _token_ids(self, prompt: Prompt, parse_special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self._refuse_surely_too_long(len(prompt), "prompt")
        if parse_special:
            return self._tokenizer.encode(prompt)
        return self._tokenizer.encode(self._tokenizer.escape(prompt), escaped=True)

    def _refuse_surely_too_long(self, characters: int, param: str) -> None:
        """Raise RequestError if a text exceeds the context even if all tokens are the longest of the vocabulary."""
        at_least = characters // self._longest_token
        if at_least > self._max_model_len:
            raise RequestError(
                param,
                f"the context of this server is {self._max_model_len} tokens; "
                f"{param} has {characters} characters, which are more than {at_least} tokens; shorten it",
                code="context_length_exceeded",
            )

    def _sampling(
        self, request: GenerationRequest, prompt_tokens: int, default_max_tokens: int, extra: dict[str, Any]
    ) -> SamplingParams:
        """Return the sampling parameters. Omitted fields come from generation_config.json, else the API's defaults.

        A default of max_tokens is cut to the room that the prompt leaves, and a default of min_tokens to max_tokens.
        """
        fields = {"max_tokens": default_max_tokens, **self._defaults, **request.sampling_fields(), **extra}
        if (most := request.most_tokens) is None:
            most = min(fields["max_tokens"], max(1, self._max_model_len - prompt_tokens))
        if request.min_tokens is None and "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], max(most, 0))
        return SamplingParams(**{**fields, "max_tokens": most})
