"""Formats of the choices in an answer. A whole answer joins the deltas that a stream would send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llmsched.cli.serve.parsed_output import CallDelta, ParsedOutput
from llmsched.cli.serve.prompt_preparation import PreparedPrompt
from llmsched.cli.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from llmsched.engine.request import FinishReason, RequestOutput, TokenLogprob
from llmsched.engine.text.detokenizer import Detokenizer
from llmsched.engine.text.parsers.parts import Kind, Part

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

Logprobs = dict[str, list[Any]]


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no minus infinity; OpenAI writes this number for it


def _joined(parts: Iterable[Part | CallDelta], kind: Kind) -> str:
    return "".join(part.text for part in parts if isinstance(part, Part) and part.kind is kind)


class TokenWriter:
    """Converter of single tokens to text and bytes, for log-probabilities and for an echoed prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=65536)(self._text)

    def _text(self, token_id: int) -> str:
        """Return the token's text or, if its bytes are not valid UTF-8, OpenAI's notation for them."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))

    def emitted(self, token_id: int, piece: str, skip_special_tokens: bool) -> list[int]:
        """Return the bytes that a generated token adds to the text. The joined bytes of all tokens decode to the text.

        With a byte-level tokenizer, these are the token's own bytes. With another tokenizer, the text that a token adds
        depends on its context, so these are the bytes of `piece`.
        """
        if skip_special_tokens and self._tokenizer.is_special(token_id):
            return []
        return self.raw(token_id) if self._tokenizer.byte_level else list(piece.encode())

    def prompt_pieces(self, prompt: PreparedPrompt) -> list[str]:
        """Return the text of each prompt token, also of special tokens. A BOS that the tokenizer added becomes ""."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        first, text = prompt.token_ids[0], prompt.text
        is_bos = first == self._tokenizer.bos_token_id
        added = text is not None and is_bos and not text.startswith(self._text(first))
        pieces = [""] if added else [detokenizer.push(first)]
        pieces += [detokenizer.push(token_id) for token_id in prompt.token_ids[1:]]
        pieces[-1] += detokenizer.flush()
        return pieces


@dataclass(slots=True)
class ChoiceDelta:
    """Part of a choice, from one output of the engine. The choice of a whole answer is the sum of its deltas."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    #: The text, the reasoning and the calls in their order, of a chat.
    parts: list[Part | CallDelta] = field(default_factory=list)

    def add(self, later: ChoiceDelta) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        for call in later.calls:
            if call.id is None:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)
        self.token_ids += later.token_ids
        for key, values in (later.logprobs or {}).items():
            assert self.logprobs is not None
            self.logprobs[key] += values
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class ChoiceFormat(ABC):
    """Format in which an API route answers one HTTP request. Each prompt has `n` choices."""

    request: GenerationRequest
    prompts: Sequence[PreparedPrompt]
    writer: TokenWriter
    begun: set[int] = field(default_factory=set)

    id_prefix = ""
    whole_object = ""
    chunk_object = ""

    def has_only_text(self, index: int) -> bool:
        """Return True if the chunks of choice `index` from now on, except the last, contain nothing but text."""
        return not (self.request.return_token_ids or self.has_logprobs)

    @property
    @abstractmethod
    def has_logprobs(self) -> bool: ...

    def usage_details(self) -> dict[str, int]:
        """Return {name: tokens} of kinds of output tokens."""
        return {}

    def opening(self) -> Iterable[dict[str, Any]]:
        return ()

    def delta(self, prompt_index: int, output: RequestOutput) -> ChoiceDelta:
        """Return the delta that `output` adds to its choice. Call it once per output, in the engine's order."""
        delta = ChoiceDelta(
            index=prompt_index * (self.request.n or 1) + output.index,
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason and output.finish_reason.value,
            stop_reason=output.stop_reason,
        )
        first = delta.index not in self.begun
        self.begun.add(delta.index)
        if first:
            delta.prompt_token_ids = self.prompts[prompt_index].token_ids
        self.add_details(delta, output, self.prompts[prompt_index] if first else None)
        return delta

    @abstractmethod
    def add_details(self, delta: ChoiceDelta, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        """Add log-probabilities and the echoed prompt to `delta`. `prompt` is given for a choice's first delta only."""

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return the delta as a choice for a chunk of a stream, or None if the delta adds nothing."""
        has_content = any(
            (delta.text, delta.reasoning, delta.calls, delta.finish_reason, *(delta.logprobs or {}).values())
        )
        if not has_content and not (self.request.return_token_ids and delta.token_ids):
            return None
        return self.choice(delta, whole=False)

    @abstractmethod
    def content(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        """Return {name: value} of the field that holds a choice's text. `whole` is False for a chunk of a stream."""

    def choice(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        """Return the delta as a choice of a whole answer or, if `whole` is False, of a chunk of a stream."""
        choice = {"index": delta.index, **self.content(delta, whole), "logprobs": delta.logprobs}
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.prompt_token_ids is not None:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice


@dataclass(slots=True)
class CompletionFormat(ChoiceFormat):
    """Format of /v1/completions: text, and log-probabilities in parallel lists. With `echo`, the prompt comes first."""

    request: CompletionRequest
    offsets: dict[int, int] = field(default_factory=dict)

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    @property
    def has_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def content(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        return {"text": delta.text}

    def add_details(self, delta: ChoiceDelta, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        if self.has_logprobs:
            delta.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if prompt is not None and self.request.echo:
            if delta.logprobs is None and prompt.text is not None:
                echo = prompt.text
            else:  # log-probabilities need an echo that is exactly the joined texts of the prompt's tokens
                pieces = self.writer.prompt_pieces(prompt)
                echo = "".join(pieces)
                if delta.logprobs is not None:
                    self._append(delta, delta.logprobs, pieces, output.prompt_logprobs or [])
            delta.text = echo + delta.text
        if delta.logprobs is not None:
            self._append(delta, delta.logprobs, output.pieces, output.logprobs or [])

    def _append(
        self, delta: ChoiceDelta, lists: Logprobs, pieces: Sequence[str], entries: Sequence[TokenLogprob | None]
    ) -> None:
        """Append an entry per token to each of `lists`. A text_offset counts from the beginning of the choice."""
        offset = self.offsets.get(delta.index, 0)
        for piece, entry in zip(pieces, entries, strict=True):
            best = None
            if entry is not None:  # the best tokens, and the chosen one if it is not among them
                best = {self.writer.text(token_id): _finite(logprob) for token_id, logprob in entry.top}
                best.setdefault(self.writer.text(entry.token_id), _finite(entry.logprob))
            lists["tokens"].append(piece)
            lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            lists["top_logprobs"].append(best)
            lists["text_offset"].append(offset)
            offset += len(piece)
        self.offsets[delta.index] = offset


@dataclass(slots=True)
class ChatFormat(ChoiceFormat):
    """Format of /v1/chat/completions: messages, and log-probabilities as one object per token."""

    request: ChatRequest
    outputs: dict[int, ParsedOutput | None] = field(default_factory=dict)

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @property
    def has_logprobs(self) -> bool:
        return bool(self.request.logprobs)

    def has_only_text(self, index: int) -> bool:
        output = self.outputs.get(index)
        return (output is None or output.is_plain) and ChoiceFormat.has_only_text(self, index)

    def usage_details(self) -> dict[str, int]:
        if self.prompts[0].reasoning_end_id is None:
            return {}
        counts = (output.num_reasoning_tokens for output in self.outputs.values() if output is not None)
        return {"reasoning_tokens": sum(counts)}

    def opening(self) -> Iterable[dict[str, Any]]:
        for index in range(self.request.n or 1):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def content(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            fields["tool_calls"] = [call.body(whole) for call in delta.calls]
        if whole:
            empty = None if delta.calls else ""
            return {"message": {"role": "assistant", "content": empty, "refusal": None} | fields}
        return {"delta": fields}

    def add_details(self, delta: ChoiceDelta, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        if prompt is not None:
            parser = prompt.make_parser()
            most_calls = 1 if self.request.parallel_tool_calls is False else None
            end = prompt.reasoning_end_id
            self.outputs[delta.index] = None if parser is None else ParsedOutput(parser, most_calls, end)
        if (parsed := self.outputs[delta.index]) is not None:
            is_last = delta.finish_reason is not None
            delta.parts = parsed.divide(delta.text, is_last)
            delta.reasoning = _joined(delta.parts, Kind.REASONING)
            delta.text = _joined(delta.parts, Kind.CONTENT)
            delta.calls = [part for part in delta.parts if isinstance(part, CallDelta)]
            parsed.count(delta.token_ids)
            if parsed.has_whole_calls and delta.finish_reason == FinishReason.STOP:
                delta.finish_reason = "tool_calls"
        elif delta.text:
            delta.parts = [Part(Kind.CONTENT, delta.text)]
        if self.has_logprobs:
            rows = zip(output.logprobs or [], output.pieces, strict=True)
            delta.logprobs = {"content": [self._row(entry, piece) for entry, piece in rows]}

    def _row(self, entry: TokenLogprob, piece: str) -> dict[str, Any]:
        skip = self.request.skip_special_tokens is not False
        return {
            "token": self.writer.text(entry.token_id),
            "logprob": _finite(entry.logprob),
            "bytes": self.writer.emitted(entry.token_id, piece, skip),
            "top_logprobs": [
                {"token": self.writer.text(i), "logprob": _finite(logprob), "bytes": self.writer.raw(i)}
                for i, logprob in entry.top
            ],
        }
