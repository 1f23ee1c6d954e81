"""The ways of scheduling that are compared, and what each must have seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_cache import MIN_COPIED
from llmsched.engine.parity.prompts import Prompt, PromptSet

#: Chunk sizes besides one block and one block and a token.
ODD_CHUNKS = (1, 7)


@dataclass(frozen=True, slots=True)
class Check:
    """One engine, and the prompts it gets in waves: each wave at once, when the one before has ended.

    `token_budget` and `num_blocks` are the engine's. `num_tokens` bounds the output below what was asked for.
    `cached_tokens` are the prefix hits that the last wave must have. `preempted` says how somebody must be preempted.
    """

    name: str
    waves: tuple[tuple[Prompt, ...], ...]
    token_budget: int
    num_blocks: int
    num_tokens: int
    caching: bool = False
    cached_tokens: tuple[int, ...] | None = None
    preempted: Literal["recompute", "swap"] | None = None


def make_checks(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[Check]:
    """Alone, mixed, chunked, with prefix hits, preempted; see the functions below."""
    longest = max(len(prompt.token_ids) for prompt in prompts.all)
    block_size = layout.block_size
    width = sum(layout.width(len(prompt.token_ids) + num_tokens) for prompt in prompts.all)
    # Twice: a wave leaves its blocks cached, what has left a window among them.
    plenty = 2 * layout.num_groups * (width + 1)
    one_by_one = tuple((prompt,) for prompt in prompts.general)
    yield Check("alone", one_by_one, longest, plenty, num_tokens)
    # The first prompt fills a step; those behind it are chunked around the decodes of those before.
    yield Check("mixed batch", (prompts.all,), 3 * block_size, plenty, num_tokens)
    for size in sorted({*ODD_CHUNKS, block_size, block_size + 1}):
        yield Check(f"chunks of {size}", (prompts.general,), size, plenty, num_tokens)
    yield _prefix_check(prompts, plenty, num_tokens, block_size)
    yield from _preemption_checks(prompts, num_tokens, layout)


def _prefix_check(prompts: PromptSet, num_blocks: int, num_tokens: int, block_size: int) -> Check:
    """The first prompt, then the same again beside prompts that share a beginning with it.

    Hits are exact to the token where that is worth a copy, and leave at least the last token to compute.
    """
    base = prompts.general[0]
    again = (base, *prompts.edges)
    shared = (len(base.token_ids), *prompts.shared)
    hits = tuple(
        _hit(min(length, len(prompt.token_ids) - 1), block_size) for length, prompt in zip(shared, again, strict=True)
    )
    budget = sum(len(prompt.token_ids) for prompt in again)  # all in one step, so none finds another's blocks
    return Check("prefix hits", ((base,), again), budget, num_blocks, num_tokens, caching=True, cached_tokens=hits)


def _hit(num_known: int, block_size: int) -> int:
    """The prefix hit where so many leading tokens are known."""
    return num_known if num_known % block_size >= MIN_COPIED else num_known // block_size * block_size


def _preemption_checks(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[Check]:
    """Four prompts of two blocks in a pool of eight (of each group of layers): each needs a third for its second
    token, so somebody must go.

    With prefix caching, the preempted find some of their blocks again; with swap, they get back what they lost.
    """
    wave, length = (prompts.edges[:4],), 2 * layout.block_size
    pool, budget = 4 * layout.num_blocks(length), 4 * length
    most = min(num_tokens, layout.longest(pool) - length + 1)  # what one of them can have: its last token needs no KV
    yield Check("preemption", wave, budget, pool, most, preempted="recompute")
    yield Check("preemption, prefix cache", wave, budget, pool, most, caching=True, preempted="recompute")
    yield Check("preemption, swap", wave, budget, pool, most, preempted="swap")
