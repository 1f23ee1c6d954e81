"""Steps that an executor computes before it serves requests, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmsched.kernels.reference import AttentionShape

#: Sampling parameters that use every feature of the sampler. Their rows are sampled from fp32 copies of the logits.
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=1
)
#: Sampling parameters whose rows are sampled from the model's logits as they are.
PLAIN = SamplingParams(temperature=1.0, top_p=0.95)

_BLOCK = 16  # contexts are expanded in whole blocks


class WarmupStep(NamedTuple):
    name: str
    rows: list[tuple[int, int]]  # (context tokens, new tokens) of each sequence
    sampling: SamplingParams


def warmup_steps(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[WarmupStep]:
    """Return steps that together compile all variants of all kernels and reach the peak of memory."""
    # The first two are the step with the most tokens and the step with the most decodes that the scheduler may plan.
    # The others have one sequence: a decode and the smallest prefill.
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_rows * max_model_len)
    lengths = [(num_tokens + row) // num_rows for row in range(num_rows)]
    steps = [
        WarmupStep(f"prefill of {num_tokens} tokens", [(0, length) for length in lengths], EVERYTHING),
        WarmupStep(f"decode of {num_rows} sequences", [(0, 1)] * num_rows, EVERYTHING),
    ]
    for name, count in (("decode", 1), ("prefill", 2)):
        if count <= min(max_num_batched_tokens, max_model_len):
            steps.append(WarmupStep(f"short {name}", [(0, count)], PLAIN))
    return steps


def expanding_steps(
    layers: Iterable[AttentionShape], max_num_batched_tokens: int, max_model_len: int
) -> list[WarmupStep]:
    """Return prefills that compile the kernels for long contexts in layers with latent attention."""
    # A GPU kernel has a variant for all heads at one time and one for single heads. Long contexts also divide the keys
    # of a tile, most of all if the chunk is short.
    found: dict[tuple[int, int], WarmupStep] = {}
    for layer in layers:
        if layer.latent is None:
            continue
        limit = layer.latent.longest_at_once(layer.heads, layer.item_size)
        for context in (limit - _BLOCK, limit + _BLOCK, max_model_len):
            count = layer.latent.fewest_expanded(context, max_num_batched_tokens)
            if count is not None and context <= max_model_len:
                row = (context - count, count)
                found[row] = WarmupStep(f"prefill after {row[0]} tokens", [row], PLAIN)
    return list(found.values())
