"""Prompts of an exact length, the same for the same seed and never seen before for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

#: Ids that nearly every vocabulary has and that are neither special nor single bytes.
COMMON_IDS = range(1_000, 30_000)

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back face"
)

#: Words that are one token, with the blank before them, in nearly every vocabulary.
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids or, for targets that take none, as text. Exactly one of the two is set."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None


def usable_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The ids of a vocabulary that stand for text."""
    size = min(tokenizer.vocab_size, vocab_size)
    return [
        token_id for token_id in range(size) if not tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id)
    ]


def id_prompts(
    count: int, length: int, *, prefix_len: int, ids: Sequence[int], generator: np.random.Generator
) -> list[Prompt]:
    """`count` prompts of exactly `length` random tokens, of which the first `prefix_len` are the same in all."""
    known = np.asarray(ids, dtype=np.int64)
    prefix = generator.choice(known, prefix_len).tolist()
    rest = generator.choice(known, (count, length - prefix_len)).tolist()
    return [Prompt(token_ids=(*prefix, *own)) for own in rest]


def text_prompts(count: int, length: int, *, prefix_len: int, generator: np.random.Generator) -> list[Prompt]:
    """`count` prompts of `length` common words; how many tokens they are, the target's usage says."""
    prefix = generator.choice(WORDS, prefix_len).tolist()
    rest = generator.choice(WORDS, (count, length - prefix_len)).tolist()
    return [Prompt(text=" ".join((*prefix, *own))) for own in rest]
