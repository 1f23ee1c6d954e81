"""What the engine's outputs look like as choices of the two APIs.

A whole answer is made by joining the very gains that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmsched.cli.serve.prepare import PreparedPrompt
from llmsched.cli.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from llmsched.cli.serve.tokens import TokenWriter, finite
from llmsched.engine.request import RequestOutput, TokenLogprob

Logprobs = dict[str, list[Any]]


@dataclass(slots=True)
class Gain:
    """What one choice has gained: a part of it in a stream, all of it in a whole answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None

    def add(self, later: Gain) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        for key, values in (later.logprobs or {}).items():
            assert self.logprobs is not None
            self.logprobs[key] += values
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class Style(ABC):
    """One of the two APIs: how the outputs for one HTTP request become choices. `n` choices belong to each prompt."""

    request: GenerationRequest
    prompts: Sequence[PreparedPrompt]
    writer: TokenWriter
    begun: set[int] = field(default_factory=set)

    id_prefix = ""
    whole_object = ""
    chunk_object = ""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Choices that a stream begins with, before any output."""
        return ()

    def gain(self, prompt_index: int, output: RequestOutput) -> Gain:
        """What `output`, of the prompt with that index, adds to its choice. Call in the order of the outputs."""
        gain = Gain(
            index=prompt_index * (self.request.n or 1) + output.index,
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason and output.finish_reason.value,
            stop_reason=output.stop_reason,
        )
        first = gain.index not in self.begun
        self.begun.add(gain.index)
        if first:
            gain.prompt_token_ids = self.prompts[prompt_index].token_ids
        self.fill(gain, output, self.prompts[prompt_index] if first else None)
        return gain

    @abstractmethod
    def fill(self, gain: Gain, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        """Add what the API knows beside the text; `prompt` is given with the first gain of a choice."""

    def chunk(self, gain: Gain) -> dict[str, Any] | None:
        """A choice of a stream's chunk; None if there is nothing to tell yet."""
        told = gain.text or gain.finish_reason or any((gain.logprobs or {}).values())
        if not told and not (self.request.return_token_ids and gain.token_ids):
            return None
        return self._choice(gain, self.content(gain, whole=False))

    def whole(self, gain: Gain) -> dict[str, Any]:
        """A choice of a whole answer."""
        return self._choice(gain, self.content(gain, whole=True))

    @abstractmethod
    def content(self, gain: Gain, whole: bool) -> dict[str, Any]:
        """The part of a choice that carries the text."""

    def _choice(self, gain: Gain, content: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": gain.index, **content, "logprobs": gain.logprobs}
        choice |= {"finish_reason": gain.finish_reason, "stop_reason": gain.stop_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = gain.token_ids
            if gain.prompt_token_ids is not None:
                choice["prompt_token_ids"] = gain.prompt_token_ids
        return choice


@dataclass(slots=True)
class CompletionStyle(Style):
    """/v1/completions: plain text, the prompt before it on demand (echo), log-probabilities as parallel lists."""

    request: CompletionRequest
    offsets: dict[int, int] = field(default_factory=dict)

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def content(self, gain: Gain, whole: bool) -> dict[str, Any]:
        return {"text": gain.text}

    def fill(self, gain: Gain, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        if self.request.logprobs is not None:
            gain.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if prompt is not None and self.request.echo:
            gain.text = self._echo(gain, prompt, output.prompt_logprobs) + gain.text
        if gain.logprobs is not None:
            self._list(gain, gain.logprobs, output.pieces, output.logprobs or [])

    def _echo(self, gain: Gain, prompt: PreparedPrompt, entries: Sequence[TokenLogprob | None] | None) -> str:
        """The prompt as it is written before the output; with log-probabilities, exactly what its tokens join to."""
        if gain.logprobs is None and prompt.text is not None:
            return prompt.text
        pieces = self.writer.prompt_pieces(prompt)
        if gain.logprobs is not None:
            self._list(gain, gain.logprobs, pieces, entries or [])
        return "".join(pieces)

    def _list(self, gain: Gain, lists: Logprobs, pieces: Sequence[str], entries: Sequence[TokenLogprob | None]) -> None:
        """Append tokens; `text_offset` counts characters from the beginning of the choice's text."""
        offset = self.offsets.get(gain.index, 0)
        for piece, entry in zip(pieces, entries, strict=True):
            lists["tokens"].append(piece)
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._best(entry))
            lists["text_offset"].append(offset)
            offset += len(piece)
        self.offsets[gain.index] = offset

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the chosen one if it is not among them."""
        best = {self.writer.text(token_id): finite(logprob) for token_id, logprob in entry.top}
        best.setdefault(self.writer.text(entry.token_id), finite(entry.logprob))
        return best


@dataclass(slots=True)
class ChatStyle(Style):
    """/v1/chat/completions: messages, log-probabilities as one object per token."""

    request: ChatRequest

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterable[dict[str, Any]]:
        for index in range(self.request.n or 1):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def content(self, gain: Gain, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": gain.text, "refusal": None}}
        return {"delta": {"content": gain.text} if gain.text else {}}

    def fill(self, gain: Gain, output: RequestOutput, prompt: PreparedPrompt | None) -> None:
        if self.request.logprobs:
            rows = zip(output.logprobs or [], output.pieces, strict=True)
            gain.logprobs = {"content": [self._row(entry, piece) for entry, piece in rows]}

    def _row(self, entry: TokenLogprob, piece: str) -> dict[str, Any]:
        skip = self.request.skip_special_tokens is not False
        return {
            "token": self.writer.text(entry.token_id),
            "logprob": finite(entry.logprob),
            "bytes": self.writer.emitted(entry.token_id, piece, skip),
            "top_logprobs": [
                {"token": self.writer.text(i), "logprob": finite(logprob), "bytes": self.writer.raw(i)}
                for i, logprob in entry.top
            ],
        }
