"""Lengths, times and prompts of a load as numbers, whether it is a trace or synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder
from llmsched.cli.load.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Requests of a load in the order of their times.

    `inputs` and `outputs` are lengths in tokens, None if not stated. `offsets` are in seconds, None if the load has no
    times. Each of the `prompts` is a row of units; a unit stands for `unit` tokens, the last one for as many or fewer,
    and equal units stand for equal tokens. It is None if the prompts are unknown. `texts` are the prompts as text, if
    they are text. `tokens` says in words what counts as a token.
    """

    name: str
    format: str
    tokens: str
    inputs: Sequence[int]
    outputs: Sequence[int | None]
    offsets: Sequence[float] | None = None
    prompts: Sequence[Sequence[int]] | None = None
    unit: int = 1
    texts: Sequence[str] | None = None


def sample_trace(trace: Trace, encode: TextEncoder | None, tokenizer: str | None) -> RequestSample:
    """Return the requests of a trace; texts are encoded with `encode`, named `tokenizer`, or split into words."""
    offsets = [request.offset for request in trace.requests] if trace.timed else None
    if trace.of_text:
        return _sample_texts(trace, encode, tokenizer, offsets)
    blocks = [request.hash_ids for request in trace.requests]
    return RequestSample(
        name=trace.name,
        format=trace.format,
        tokens="as the trace states them",
        inputs=[request.input_len or 0 for request in trace.requests],
        outputs=[request.output_len for request in trace.requests],
        offsets=offsets,
        prompts=blocks if any(blocks) else None,
        unit=trace.block_tokens,
    )


def _sample_texts(
    trace: Trace, encode: TextEncoder | None, tokenizer: str | None, offsets: Sequence[float] | None
) -> RequestSample:
    known: dict[str, int] = {}
    prompts, outputs, texts = [], [], []
    for request in trace.requests:
        assert request.content is not None
        if encode is None:
            prompts.append([known.setdefault(word, len(known)) for word in request.content.words])
            outputs.append(request.words_out)
        else:
            prompts.append(encode.prompt(request.content))
            counted = request.output_len is None and request.answer is not None
            outputs.append(encode.count(request.answer or "") if counted else request.output_len)
        texts.append(request.content.text)
    return RequestSample(
        name=trace.name,
        format=trace.format,
        tokens="words (name a model with --tokenizer for its tokens)" if encode is None else f"of {tokenizer}",
        inputs=[len(prompt) for prompt in prompts],
        outputs=outputs,
        offsets=offsets,
        prompts=prompts,
        texts=texts,
    )


def sample_load(name: str, load: Load) -> RequestSample:
    """Return the requests of a synthetic load as they are drawn."""
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
