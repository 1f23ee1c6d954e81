"""Cases of the parity check: all ways of scheduling, and prompts that end near block boundaries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_cache import MIN_COPIED
from llmsched.engine.text.tokenizer import Tokenizer

#: Texts from which prompts are made: prose, code, numbers, other scripts.
TEXTS = (
    "The first thing she noticed was the silence. No birds, no wind, only the slow ticking of the cooling engine. ",
    "def merge(left, right):\n    while left and right:\n        yield min(left, right).pop(0)\n",
    "Question: a train leaves at 9:45 and needs 3 hours and 50 minutes. When does it arrive? Let us think. ",
    "Zürich, 12. März: Die Brücke ist gesperrt. En été, les marchés ouvrent à sept heures. 东京的春天很短。",
)


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """Prompt with a name for reports."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    general: tuple[ParityPrompt, ...]  # prompts of varied lengths; the first is exactly 3 blocks long
    edges: tuple[ParityPrompt, ...]  # prompts that begin with tokens of the first general prompt
    shared: tuple[int, ...]  # number of these tokens for each prompt in `edges`: close to 1 or 2 blocks

    @property
    def all(self) -> tuple[ParityPrompt, ...]:
        return self.general + self.edges


def make_prompts(tokenizer: Tokenizer, vocab_size: int, *, count: int, block_size: int, seed: int) -> PromptSet:
    """Make `count` general prompts, and six that begin with about one or two blocks of the first general prompt.

    Equal arguments give equal prompts.
    """
    generator, id_limit = random.Random(seed), min(vocab_size, tokenizer.vocab_size)

    def text(length: int) -> tuple[int, ...]:
        known = tokenizer.encode("".join(generator.sample(TEXTS, len(TEXTS))), add_special_tokens=True)
        known = [token_id for token_id in known if token_id < vocab_size] or [0]
        return tuple((known * -(-length // len(known)))[:length])

    def random_ids(length: int, other_than: tuple[int, ...] = ()) -> tuple[int, ...]:
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
    """Case of the parity check: an engine's settings and the prompts that it gets."""

    name: str
    #: The prompts of a wave are added together after the previous wave has finished.
    waves: tuple[tuple[ParityPrompt, ...], ...]
    token_budget: int  # max_num_batched_tokens
    num_blocks: int
    num_tokens: int  # length of each output
    caching: bool = False
    cached_tokens: tuple[int, ...] | None = None  # expected prefix hits of the last wave, in tokens
    preempted: Literal["recompute", "swap"] | None = None  # how at least one request must be preempted


def make_cases(prompts: PromptSet, num_tokens: int, layout: KVLayout) -> Iterator[ParityCase]:
    """Yield cases with single requests, a mixed batch, chunked prefills, prefix hits and preemption."""
    longest = max(len(prompt.token_ids) for prompt in prompts.all)
    block_size = layout.block_size
    width = sum(layout.width(len(prompt.token_ids) + num_tokens) for prompt in prompts.all)
    # Twice as many blocks, because finished waves leave blocks in the cache, even blocks outside the sliding windows.
    plenty = 2 * layout.num_groups * (width + 1)
    one_by_one = tuple((prompt,) for prompt in prompts.general)
    yield ParityCase("alone", one_by_one, longest, plenty, num_tokens)
    # The first prompt fills a step. Later prompts are split into chunks, which share steps with decodes.
    yield ParityCase("mixed batch", (prompts.all,), 3 * block_size, plenty, num_tokens)
    for size in sorted({1, 7, block_size, block_size + 1}):
        yield ParityCase(f"chunks of {size}", (prompts.general,), size, plenty, num_tokens)

    # The first wave is the first prompt. The second wave is the same prompt again, with the prompts that begin like it.
    # A hit includes a part of a block if it has at least MIN_COPIED tokens, but never the prompt's last token.
    again = (prompts.general[0], *prompts.edges)
    shared = (len(prompts.general[0].token_ids), *prompts.shared)
    known = (min(length, len(prompt.token_ids) - 1) for length, prompt in zip(shared, again, strict=True))
    hits = tuple(num if num % block_size >= MIN_COPIED else num // block_size * block_size for num in known)
    if layout.recurrent:  # the recurrent state of the first prompt is saved at the end of its last block but one
        hits = tuple(num // (2 * block_size) * 2 * block_size for num in hits)
    budget = sum(
        len(prompt.token_ids) for prompt in again
    )  # all prompts in one step, so that none of them hits the prefix of another
    waves = (again[:1], again)
    yield ParityCase("prefix hits", waves, budget, plenty, num_tokens, caching=True, cached_tokens=hits)

    if not layout.num_groups:  # without blocks, no request is ever preempted
        return
    # Four prompts of two blocks in a pool of eight blocks (per group of layers). Each prompt needs a third block for
    # its second token, so a request must be preempted. With prefix caching, preempted requests find some of their
    # blocks again; with swap, their blocks are copied back.
    wave, length = (prompts.edges[:4],), 2 * block_size
    pool, budget = 4 * layout.num_blocks(length), 4 * length
    most = min(num_tokens, layout.longest(pool) - length + 1)  # the longest output: its last token needs no KV
    yield ParityCase("preemption", wave, budget, pool, most, preempted="recompute")
    yield ParityCase("preemption, prefix cache", wave, budget, pool, most, caching=True, preempted="recompute")
    yield ParityCase("preemption, swap", wave, budget, pool, most, preempted="swap")
