"""Prompts whose lengths lie where paging goes wrong: around the edges of blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
class Prompt:
    """A prompt and what reports call it."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """`general` have varied lengths, the first of exactly 3 blocks. `edges` begin with the first one's tokens.

    `shared` says how many of them each of `edges` shares: block_size -1, +0, +1 and 2 x block_size -1, +0, +1. The
    first four of `edges` are two blocks long, so each needs one more block for its second output token.
    """

    general: tuple[Prompt, ...]
    edges: tuple[Prompt, ...]
    shared: tuple[int, ...]

    @property
    def all(self) -> tuple[Prompt, ...]:
        return self.general + self.edges


def make_prompts(tokenizer: Tokenizer, vocab_size: int, *, count: int, block_size: int, seed: int) -> PromptSet:
    """`count` general prompts and six at block edges; the same arguments give the same prompts."""
    source = _Source(tokenizer, vocab_size, random.Random(seed))
    lengths = [3 * block_size, 1, *(source.random.randint(2, 4 * block_size) for _ in range(count))][:count]
    general = tuple(
        Prompt(f"text {index}", source.text(length)) if index % 2 == 0 else Prompt(f"ids {index}", source.ids(length))
        for index, length in enumerate(lengths)
    )
    base = general[0].token_ids
    shared = tuple(blocks * block_size + offset for blocks in (1, 2) for offset in (-1, 0, 1))
    totals = (*[2 * block_size] * 4, 2 * block_size + 5, 2 * block_size + 4)
    edges = tuple(
        Prompt(
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
