"""Cases of the comparison: ways of scheduling, and prompts whose lengths lie around the edges of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_cache import MIN_COPIED
from llmsched.engine.text.tokenizer import Tokenizer

#: Sources of prompts that are text: prose, code, numbers, other scripts.
_TEXTS = (
    "The first thing she noticed was the silence. No birds, no wind, only the slow ticking of the cooling engine. ",
    "def merge(left, right):\n    while left and right:\n        yield min(left, right).pop(0)\n",
    "Question: a train leaves at 9:45 and needs 3 hours and 50 minutes. When does it arrive? Let us think. ",
    "Zürich, 12. März: Die Brücke ist gesperrt. En été, les marchés ouvrent à sept heures. 东京的春天很短。",
)


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """A prompt and its name in reports."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of all cases.

    `general` prompts have varied lengths; the first is exactly 3 blocks long. Each of the `edges` begins with tokens of
    that first prompt; `shared` says with how many: 1 and 2 blocks, each -1, +0 and +1 token. The first four `edges` are
    two blocks long, so that each needs another block for its second output token.
    """

    general: tuple[ParityPrompt, ...]
    edges: tuple[ParityPrompt, ...]
    shared: tuple[int, ...]

    @property
    def all(self) -> tuple[ParityPrompt, ...]:
        return self.general + self.edges


def make_prompts(tokenizer: Tokenizer, vocab_size: int, *, count: int, block_size: int, seed: int) -> PromptSet:
    """Make `count` general prompts and six at block edges; equal arguments make equal prompts."""
    generator, id_limit = random.Random(seed), min(vocab_size, tokenizer.vocab_size)

    def text(length: int) -> tuple[int, ...]:
        """Return `length` tokens of text, repeated as needed."""
        known = tokenizer.encode("".join(generator.sample(_TEXTS, len(_TEXTS))), add_special_tokens=True)
        known = [token_id for token_id in known if token_id < vocab_size] or [0]
        return tuple((known * -(-length // len(known)))[:length])

    def random_ids(length: int, other_than: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return `length` random tokens; the first is not in `other_than`."""
        ids = [generator.randrange(id_limit) for _ in range(length)]
        if ids and ids[0] in other_than:
            ids[0] = (ids[0] + 1) % id_limit
        return tuple(ids)

    lengths = [3 * block_size, 1, *(generator.randint(2, 4 * block_size) for _ in range(count))][:count]
    general = tuple(
        ParityPrompt(f"text {index}", text(length))
        if index % 2 == 0
        else ParityPrompt(f"ids {index}", random_ids(length))
        for index, length in enumerate(lengths)
    )
    base = general[0].token_ids
    shared = tuple(blocks * block_size + offset for blocks in (1, 2) for offset in (-1, 0, 1))
    totals = (*[2 * block_size] * 4, 2 * block_size + 5, 2 * block_size + 4)
    edges = tuple(
        ParityPrompt(
            f"edge {index} ({length} shared)",
            base[:length] + random_ids(total - length, other_than=base[length : length + 1]),
        )
        for index, (length, total) in enumerate(zip(shared, totals, strict=True))
    )
    return PromptSet(general, edges, shared)


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One engine, and the prompts it gets: all of a wave together, once the wave before has finished.

    `token_budget` and `num_blocks` are the engine's, `num_tokens` is the length of each output. `cached_tokens` are the
    prefix hits that the prompts of the last wave must have. `preempted` is how at least one request must be preempted.
    """

    name: str
    waves: tuple[tuple[ParityPrompt, ...], ...]
    token_budget: int
    num_blocks: int
    num_tokens: int
    caching: bool = False
    cached_tokens: tuple[int, ...] | None = None
    preempted: Literal["recompute", "swap"] | None = None


def make_cases(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[ParityCase]:
    """Yield cases of requests alone, in a mixed batch, in chunks, with prefix hits and with preemption."""
    longest = max(len(prompt.token_ids) for prompt in prompts.all)
    block_size = layout.block_size
    width = sum(layout.width(len(prompt.token_ids) + num_tokens) for prompt in prompts.all)
    # Twice as many, because a wave leaves its blocks cached, those outside the windows included.
    plenty = 2 * layout.num_groups * (width + 1)
    one_by_one = tuple((prompt,) for prompt in prompts.general)
    yield ParityCase("alone", one_by_one, longest, plenty, num_tokens)
    # The first prompt fills a step; later ones are split into chunks beside the decodes of earlier ones.
    yield ParityCase("mixed batch", (prompts.all,), 3 * block_size, plenty, num_tokens)
    for size in sorted({1, 7, block_size, block_size + 1}):
        yield ParityCase(f"chunks of {size}", (prompts.general,), size, plenty, num_tokens)

    # The first prompt, followed by the same prompt beside prompts that share a beginning with it. Hits count single
    # tokens where that is worth a copy, and leave at least the last token to compute.
    again = (prompts.general[0], *prompts.edges)
    shared = (len(prompts.general[0].token_ids), *prompts.shared)
    known = (min(length, len(prompt.token_ids) - 1) for length, prompt in zip(shared, again, strict=True))
    hits = tuple(num if num % block_size >= MIN_COPIED else num // block_size * block_size for num in known)
    budget = sum(len(prompt.token_ids) for prompt in again)  # one step for all: no prompt finds another's blocks
    waves = (again[:1], again)
    yield ParityCase("prefix hits", waves, budget, plenty, num_tokens, caching=True, cached_tokens=hits)

    # Four prompts of two blocks in a pool of eight blocks (per group of layers). Each needs a third block for its
    # second token, so that a request must be preempted. With prefix caching, preempted requests find some of their
    # blocks again; with swap, their blocks are copied back.
    wave, length = (prompts.edges[:4],), 2 * block_size
    pool, budget = 4 * layout.num_blocks(length), 4 * length
    most = min(num_tokens, layout.longest(pool) - length + 1)  # the longest output: its last token needs no KV
    yield ParityCase("preemption", wave, budget, pool, most, preempted="recompute")
    yield ParityCase("preemption, prefix cache", wave, budget, pool, most, caching=True, preempted="recompute")
    yield ParityCase("preemption, swap", wave, budget, pool, most, preempted="swap")
