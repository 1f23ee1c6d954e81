from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder
from llmsched.cli.load.traces.trace import Content, Trace


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Requests of a load, in the order of their times. None means unknown."""

    name: str
    format: str
    tokens: str  # what counts as a token
    inputs: Sequence[int]  # lengths of prompts in tokens
    outputs: Sequence[int | None]  # lengths of answers in tokens
    offsets: Sequence[float] | None = None  # seconds
    prompts: Sequence[Sequence[int]] | None = None  # ids for each request; equal ids stand for equal tokens
    unit: int = 1  # tokens per id
    texts: Sequence[str] | None = None
    notes: Sequence[str] = ()
    in_words: bool = False  # True if each word counts as a token


class _WordIds:
    """TextEncoder that needs no tokenizer, because every distinct word has its own id."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def prompt(self, content: Content) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in content.words]

    def count(self, text: str) -> int:
        return len(text.split())


def sample_trace(trace: Trace, encode: TextEncoder | None, tokenizer: str | None) -> RequestSample:
    """Return the requests of a trace. If `encode` is None, each word of a text counts as a token.

    `tokenizer` is the name of the model whose tokenizer `encode` uses.
    """
    inputs: Sequence[int] = [request.input_len or 0 for request in trace.requests]
    prompts: Sequence[Sequence[int]] = [request.hash_ids for request in trace.requests]
    encoder = encode or _WordIds()
    tokens, texts = "as the trace states them", None
    if trace.of_text:
        contents = [request.content for request in trace.requests if request.content is not None]
        prompts = [encoder.prompt(content) for content in contents]
        inputs, texts = [len(prompt) for prompt in prompts], [content.text for content in contents]
        tokens = "one per word; --tokenizer MODEL counts a model's tokens" if encode is None else f"of {tokenizer}"
    return RequestSample(
        name=trace.name,
        format=trace.format,
        tokens=tokens,
        inputs=inputs,
        outputs=[request.answer_len(encoder.count) for request in trace.requests],
        offsets=[request.offset for request in trace.requests] if trace.timed else None,
        prompts=prompts if any(prompts) or trace.of_text else None,
        unit=1 if trace.of_text else trace.block_tokens,
        texts=texts,
        in_words=trace.of_text and encode is None,
        notes=trace.notes,
    )


def sample_load(name: str, load: Load) -> RequestSample:
    planned = load.plan(COMMON_IDS)
    prompts = [request.prompt.token_ids or [] for request in planned]
    return RequestSample(
        name=name,
        format="synthetic",
        tokens="as drawn",
        inputs=[len(prompt) for prompt in prompts],
        outputs=[request.output_len for request in planned],
        prompts=prompts,
    )
