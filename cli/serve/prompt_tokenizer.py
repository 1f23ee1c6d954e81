"""Conversion of the prompts in validated requests to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmsched.cli.serve.chat_messages import Message
from llmsched.cli.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, Prompt
from llmsched.engine.errors import RequestError
from llmsched.engine.text.chat_template import render_chat
from llmsched.engine.text.tokenizer import Tokenizer, check_unicode


class PromptTokenizer:
    """Converter of prompts to token ids. It is slow, so use it in threads.

    A prompt that surely has more than `max_model_len` tokens is refused before it is tokenised.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def prompts(self, request: GenerationRequest, known: Iterable[list[int]] | None = None) -> Iterator[list[int]]:
        """Yield the token ids of each prompt of a request. Raises RequestError if a prompt cannot be served.

        `known` are the token ids of the prompts, if an ingress has computed them.
        """
        for token_ids in known or self._tokenised(request):
            yield self._truncated(token_ids, request)

    def _tokenised(self, request: GenerationRequest) -> Iterator[list[int]]:
        any_length = request.truncate_prompt_tokens is not None
        match request:
            case ChatRequest():
                options = request.template_kwargs()
                if request.reasoning_effort is not None:
                    options = self._effort_options(request.reasoning_effort) | options
                yield self.chat_ids(dumped(request.messages), options, any_length=any_length)
            case CompletionRequest():
                for prompt in request.prompt:
                    yield self.token_ids(prompt, request.parse_special is not False, any_length=any_length)

    def _effort_options(self, effort: str) -> dict[str, Any]:
        """Return the options that stand for reasoning_effort.

        Raises RequestError if the chat template has no such options.
        """
        template = self._tokenizer.chat_template or ""
        if "reasoning_effort" in template:
            return {"reasoning_effort": effort}
        if "enable_thinking" in template:
            return {"enable_thinking": effort != "none"}
        raise RequestError(
            "reasoning_effort", "reasoning_effort is not supported by this model's chat template; leave it out"
        )

    def chat_ids(
        self, messages: list[dict[str, Any]], options: dict[str, Any], *, any_length: bool = False
    ) -> list[int]:
        """Return the token ids of a chat.

        Raises RequestError if the template refuses the chat or, unless `any_length`, if the chat cannot fit.
        """

        def check(text: str) -> None:
            if not any_length:
                self._refuse_surely_too_long(text, "messages")

        return render_chat(self._tokenizer, messages, check, **options)

    def token_ids(
        self, prompt: Prompt, parse_special: bool = True, add_special_tokens: bool = True, *, any_length: bool = False
    ) -> list[int]:
        """Return the token ids of a prompt.

        Raises RequestError if the prompt is not valid Unicode or, unless `any_length`, if it cannot fit.
        """
        if not isinstance(prompt, str):
            return prompt
        check_unicode(prompt, "prompt")
        if not any_length:
            self._refuse_surely_too_long(prompt, "prompt")
        text = prompt if parse_special else self._tokenizer.escape(prompt)
        return self._tokenizer.encode(text, add_special_tokens, escaped=not parse_special)

    def _truncated(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        """Return the last tokens, as many as truncate_prompt_tokens allows."""
        most = request.truncate_prompt_tokens
        if most == -1:
            most = max(1, self._max_model_len - max(1, request.most_tokens or 0))
        return token_ids if most is None else token_ids[max(0, len(token_ids) - most) :]

    def _refuse_surely_too_long(self, text: str, param: str) -> None:
        at_least = self._tokenizer.least_tokens(text)
        if at_least > self._max_model_len:
            raise RequestError(
                param,
                f"the context of this server is {self._max_model_len} tokens; "
                f"{param} has {len(text)} characters, which are at least {at_least} tokens; shorten it",
                code="context_length_exceeded",
            )


def dumped(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as dictionaries without fields that are None, the form that chat templates expect."""
    return [message.model_dump(exclude_none=True) for message in messages]
