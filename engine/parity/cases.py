"""Prompts whose lengths lie where paging goes wrong: around the edges of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_cache import MIN_COPIED

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

#: What is cut up for prompts that read like text: prose, code, numbers, other scripts.
TEXTS = (
    "The first thing she noticed was the silence. No birds, no wind, only the slow ticking of the cooling engine. ",
    "def merge(left, right):\n    while left and right:\n        yield min(left, right).pop(0)\n",
    "Question: a train leaves at 9:45 and needs 3 hours and 50 minutes. When does it arrive? Let us think. ",
    "Zürich, 12. März: Die Brücke ist gesperrt. En été, les marchés ouvrent à sept heures. 东京的春天很短。",
)


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """A prompt and what reports call it."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """`general` have varied lengths, the first of exactly 3 blocks. `edges` begin with the first one's tokens.

    `shared` says how many of them each of `edges` shares: block_size -1, +0, +1 and 2 x block_size -1, +0, +1. The
    first four of `edges` are two blocks long, so each needs one more block for its second output token.
    """

    general: tuple[ParityPrompt, ...]
    edges: tuple[ParityPrompt, ...]
    shared: tuple[int, ...]

    @property
    def all(self) -> tuple[ParityPrompt, ...]:
        return self.general + self.edges


def make_prompts(tokenizer: Tokenizer, vocab_size: int, *, count: int, block_size: int, seed: int) -> PromptSet:
    """`count` general prompts and six at block edges; the same arguments give the same prompts."""
    source = _Source(tokenizer, vocab_size, random.Random(seed))
    lengths = [3 * block_size, 1, *(source.random.randint(2, 4 * block_size) for _ in range(count))][:count]
    general = tuple(
        ParityPrompt(f"text {index}", source.text(length))
        if index % 2 == 0
        else ParityPrompt(f"ids {index}", source.ids(length))
        for index, length in enumerate(lengths)
    )
    base = general[0].token_ids
    shared = tuple(blocks * block_size + offset for blocks in (1, 2) for offset in (-1, 0, 1))
    totals = (*[2 * block_size] * 4, 2 * block_size + 5, 2 * block_size + 4)
    edges = tuple(
        ParityPrompt(
            f"edge {index} ({length} shared)",
            base[:length] + source.ids(total - length, other_than=base[length : length + 1]),
        )
        for index, (length, total) in enumerate(zip(shared, totals, strict=True))
    )
    return PromptSet(general, edges, shared)


@dataclass(frozen=True, slots=True)
class _Source:
    tokenizer: Tokenizer
    vocab_size: int
    random: random.Random

    def text(self, length: int) -> tuple[int, ...]:
        """Tokens of real text, repeated as often as it takes."""
        known = self.tokenizer.encode("".join(self.random.sample(TEXTS, len(TEXTS))), add_special_tokens=True)
        known = [token_id for token_id in known if token_id < self.vocab_size] or [0]
        return tuple((known * -(-length // len(known)))[:length])

    def ids(self, length: int, other_than: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Random tokens; the first is not in `other_than`."""
        limit = min(self.vocab_size, self.tokenizer.vocab_size)
        ids = [self.random.randrange(limit) for _ in range(length)]
        if ids and ids[0] in other_than:
            ids[0] = (ids[0] + 1) % limit
        return tuple(ids)


#: Chunk sizes besides one block and one block and a token.
ODD_CHUNKS = (1, 7)


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One engine, and the prompts it gets in waves: each wave at once, when the one before has ended.

    `token_budget` and `num_blocks` are the engine's. `num_tokens` bounds the output below what was asked for.
    `cached_tokens` are the prefix hits that the last wave must have. `preempted` says how somebody must be preempted.
    """

    name: str
    waves: tuple[tuple[ParityPrompt, ...], ...]
    token_budget: int
    num_blocks: int
    num_tokens: int
    caching: bool = False
    cached_tokens: tuple[int, ...] | None = None
    preempted: Literal["recompute", "swap"] | None = None


def make_checks(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[ParityCase]:
    """Alone, mixed, chunked, with prefix hits, preempted; see the functions below."""
    longest = max(len(prompt.token_ids) for prompt in prompts.all)
    block_size = layout.block_size
    width = sum(layout.width(len(prompt.token_ids) + num_tokens) for prompt in prompts.all)
    # Twice: a wave leaves its blocks cached, what has left a window among them.
    plenty = 2 * layout.num_groups * (width + 1)
    one_by_one = tuple((prompt,) for prompt in prompts.general)
    yield ParityCase("alone", one_by_one, longest, plenty, num_tokens)
    # The first prompt fills a step; those behind it are chunked around the decodes of those before.
    yield ParityCase("mixed batch", (prompts.all,), 3 * block_size, plenty, num_tokens)
    for size in sorted({*ODD_CHUNKS, block_size, block_size + 1}):
        yield ParityCase(f"chunks of {size}", (prompts.general,), size, plenty, num_tokens)
    yield _prefix_check(prompts, plenty, num_tokens, block_size)
    yield from _preemption_checks(prompts, num_tokens, layout)


def _prefix_check(prompts: PromptSet, num_blocks: int, num_tokens: int, block_size: int) -> ParityCase:
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
    return ParityCase("prefix hits", ((base,), again), budget, num_blocks, num_tokens, caching=True, cached_tokens=hits)


def _hit(num_known: int, block_size: int) -> int:
    """The prefix hit where so many leading tokens are known."""
    return num_known if num_known % block_size >= MIN_COPIED else num_known // block_size * block_size


def _preemption_checks(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[ParityCase]:
    """Four prompts of two blocks in a pool of eight (of each group of layers): each needs a third for its second
    token, so somebody must go.

    With prefix caching, the preempted find some of their blocks again; with swap, they get back what they lost.
    """
    wave, length = (prompts.edges[:4],), 2 * layout.block_size
    pool, budget = 4 * layout.num_blocks(length), 4 * length
    most = min(num_tokens, layout.longest(pool) - length + 1)  # what one of them can have: its last token needs no KV
    yield ParityCase("preemption", wave, budget, pool, most, preempted="recompute")
    yield ParityCase("preemption, prefix cache", wave, budget, pool, most, caching=True, preempted="recompute")
    yield ParityCase("preemption, swap", wave, budget, pool, most, preempted="swap")
