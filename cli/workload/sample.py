"""What is analysed: the lengths, times and prompts of a trace or of a synthetic load, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, Encode
from llmsched.cli.load.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests of a load in the order in which they come.

    `inputs` and `outputs` are in tokens (None: not stated), `offsets` in seconds; None where the load has no times.
    `prompts` are rows of units of `unit` tokens each, the last one maybe shorter; equal units are equal tokens. None
    where the prompts are not known. `begins` is the beginning of each prompt as text, where it is text.
    """

    name: str
    format: str
    tokens: str
    inputs: Sequence[int]
    outputs: Sequence[int | None]
    offsets: Sequence[float] | None = None
    prompts: Sequence[Sequence[int]] | None = None
    unit: int = 1
    begins: Sequence[str] | None = None


def sample_trace(trace: Trace, encode: Encode | None, tokenizer: str | None) -> Sample:
    """A trace; texts are counted by `encode`, whose name is `tokenizer`, or word by word where there is none."""
    offsets = [request.offset for request in trace.requests] if trace.timed else None
    if trace.of_text:
        return _sample_texts(trace, encode, tokenizer, offsets)
    blocks = [request.hash_ids for request in trace.requests]
    return Sample(
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
    trace: Trace, encode: Encode | None, tokenizer: str | None, offsets: Sequence[float] | None
) -> Sample:
    known: dict[str, int] = {}
    prompts, outputs, begins = [], [], []
    for request in trace.requests:
        assert request.content is not None
        if encode is None:
            prompts.append([known.setdefault(word, len(known)) for word in request.content.words])
            outputs.append(request.words_out)
        else:
            prompts.append(encode.prompt(request.content))
            counted = request.output_len is None and request.answer is not None
            outputs.append(encode.count(request.answer or "") if counted else request.output_len)
        begins.append(request.content.text)
    return Sample(
        name=trace.name,
        format=trace.format,
        tokens="words (name a model with --tokenizer for its tokens)" if encode is None else f"of {tokenizer}",
        inputs=[len(prompt) for prompt in prompts],
        outputs=outputs,
        offsets=offsets,
        prompts=prompts,
        begins=begins,
    )


def sample_load(name: str, load: Load) -> Sample:
    """A synthetic load, as it is drawn."""
    planned = load.plan(COMMON_IDS)
    prompts = [request.prompt.token_ids or [] for request in planned]
    return Sample(
        name=name,
        format="synthetic",
        tokens="as drawn",
        inputs=[len(prompt) for prompt in prompts],
        outputs=[request.output_len for request in planned],
        prompts=prompts,
    )
