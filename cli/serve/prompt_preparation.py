"""Conversion of validated requests to token ids and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from llmsched.cli.serve.call_constraints import Wanted, chat_grammar, schemas, wanted_output
from llmsched.cli.serve.prompt_tokenizer import PromptTokenizer, dumped
from llmsched.cli.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, ModelRequest, PrefixRequest
from llmsched.cli.serve.responses_request import ResponsesRequest, renamed
from llmsched.engine import Engine, SamplingParams
from llmsched.engine.errors import RequestError
from llmsched.engine.grammar.compiler import Grammar
from llmsched.engine.text.parsers.notation import Notation
from llmsched.engine.text.parsers.output_parser import OutputParser

#: Tokens at the end of a prompt in which the beginning of reasoning is looked for.
_PROMPT_END = 16


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    token_ids: list[int]
    text: str | None  # None if the client sent token ids or messages
    sampling: SamplingParams
    make_parser: Callable[[], OutputParser | None] = lambda: None  # for one choice; None: its text is content
    reasoning_end_id: int | None = None  # the token that ends reasoning; None: there is none


class Preparer:
    """Converter of requests to token ids and sampling parameters. It is slow, so use it in threads.

    `known` are the token ids of a request's prompts, if an ingress has computed them.
    """

    def __init__(self, engine: Engine, notation: Notation | None = None) -> None:
        self._notation = notation or Notation()
        self._check = engine.check
        self._grammars = engine.grammars
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.config.max_model_len
        self.prompt_tokenizer = PromptTokenizer(engine.tokenizer, engine.config.max_model_len)
        self._defaults = dict(engine.model.sampling_defaults)

    def may_compile(self, request: ModelRequest, *, large: bool) -> bool:
        """Return True if a grammar may have to be compiled, which can take seconds.

        Whether the grammar of a large request is kept is not looked up, because that would take long.
        """
        if isinstance(request, ResponsesRequest):
            return request.text is not None or bool(request.tools)
        if not isinstance(request, GenerationRequest):
            return False
        has_tools = isinstance(request, ChatRequest) and bool(request.tools)
        if not has_tools and request.response_format is None and request.structured_outputs is None:
            return False
        if large:
            return True
        wanted = wanted_output(request, self._notation) if isinstance(request, ChatRequest) else request.grammar_spec()
        return wanted is not None and not self._grammars.has(wanted[1])

    def _grammar(self, wanted: Wanted | None) -> Grammar | None:
        return None if wanted is None else self._grammars.compile(wanted[1], param=wanted[0])

    def completion(
        self, request: CompletionRequest, known: Iterable[list[int]] | None = None
    ) -> Iterator[PreparedPrompt]:
        """Yield the prompts of a completion. Raises RequestError for a bad parameter or an unservable prompt."""
        extra: dict[str, Any] = {"logprobs": request.logprobs, "grammar": self._grammar(request.grammar_spec())}
        if request.echo:
            extra["prompt_logprobs"] = request.logprobs
        keeps_text = request.truncate_prompt_tokens is None
        for prompt, token_ids in zip(request.prompt, self.prompt_tokenizer.prompts(request, known), strict=True):
            sampling = self._sampling(request, len(token_ids), request.default_max_tokens, extra)
            self._check(token_ids, sampling)
            yield PreparedPrompt(token_ids, prompt if isinstance(prompt, str) and keeps_text else None, sampling)

    def chat(self, request: ChatRequest, known: Iterable[list[int]] | None = None) -> Iterator[PreparedPrompt]:
        """Yield the one tokenised prompt of a chat. Raises RequestError if it cannot be served."""
        tools, notation = request.callable_tools(), self._notation
        if tools and notation.call_parser is None:
            raise RequestError(
                "tools",
                "this server knows no notation for this model's tool calls, or runs with --tool-call-parser none; "
                'leave tools out, or set tool_choice to "none"',
            )
        (token_ids,) = self.prompt_tokenizer.prompts(request, known)
        if request.template_kwargs().get("continue_final_message"):
            opened = notation.ends_in_reasoning(str(request.messages[-1].content))
        else:
            end = self._tokenizer.decode(token_ids[-_PROMPT_END:], skip_special_tokens=False)
            opened = notation.opens_reasoning(end)
        after = notation.reasoning_end_id
        extra: dict[str, Any] = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
        extra["grammar"] = grammar = chat_grammar(request, notation, self._grammars)
        if opened and grammar is not None:
            # If no single token ends the reasoning, the grammar applies from the beginning.
            opened, extra["grammar_after"] = after is not None, after
        make_parser = partial(notation.parser, schemas(tools), opened=opened, in_forced_notation=grammar is not None)
        if make_parser() is not None:
            extra["shown_token_ids"] = frozenset(notation.special_ids.values())
        sampling = self._sampling(request, len(token_ids), self._max_model_len, extra)
        yield PreparedPrompt(token_ids, None, sampling, make_parser, after)

    def response(self, request: ResponsesRequest, known: Iterable[list[int]] | None = None) -> Iterator[PreparedPrompt]:
        """Yield the one tokenised prompt of a response. Raises RequestError if it cannot be served."""
        try:
            yield from self.chat(request.chat, known)
        except RequestError as error:
            raise renamed(error) from error

    def prefix(self, request: PrefixRequest) -> Iterator[list[int]]:
        """Yield the token ids of a prefix. Raises RequestError if the prefix is too long or not valid.

        A prefix of messages extends to the text of the next user message or, if the last message is from the user, to
        the beginning of the answer.
        """
        if request.messages is None:
            assert request.prompt is not None
            yield self.prompt_tokenizer.token_ids(request.prompt)
            return
        messages = dumped(request.messages)
        options = request.chat_template_kwargs or {}
        if messages[-1]["role"] == "user":
            yield self.prompt_tokenizer.chat_ids(messages, options)
            return
        one, two = (
            self.prompt_tokenizer.chat_ids([*messages, {"role": "user", "content": text}], options) for text in "ab"
        )
        yield [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))]

    def _sampling(
        self, request: GenerationRequest, prompt_tokens: int, default_max_tokens: int, extra: dict[str, Any]
    ) -> SamplingParams:
        """Return the sampling parameters. Omitted fields come from generation_config.json, else the API's defaults."""
        fields = {"max_tokens": default_max_tokens, **self._defaults, **request.sampling_fields(), **extra}
        if (most := request.most_tokens) is None:
            most = min(fields["max_tokens"], max(1, self._max_model_len - prompt_tokens))
        if request.min_tokens is None and "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], max(most, 0))
        return SamplingParams(**{**fields, "max_tokens": most})
