"""Prompts that are drawn when they are sent."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from llmsched.cli.load.prompts import (
    BLOCK,
    COMMON_IDS,
    OWN,
    PREFIX,
    WORDS,
    EncodedPrompt,
    Part,
    Prompt,
    RandomPrompt,
    TextPrompt,
    Vocabulary,
    repeated_share,
)
from llmsched.cli.load.traces.trace import Content


def ids(*parts: Part, seed: int = 0) -> list[int]:
    found = RandomPrompt(seed, parts, Vocabulary(COMMON_IDS)).token_ids
    assert found is not None
    return found


def test_symbols_depend_only_on_seed_family_and_number() -> None:
    first = ids(Part(OWN, 7, 100))
    assert first == ids(Part(OWN, 7, 100))
    others = [ids(Part(OWN, 7, 100), seed=1), ids(Part(OWN, 8, 100)), ids(Part(BLOCK, 7, 100))]
    assert all(sum(a == b for a, b in zip(first, other, strict=True)) < 5 for other in others)


def test_parts_follow_each_other_and_a_shorter_part_is_the_beginning() -> None:
    whole = ids(Part(BLOCK, 3, 512), Part(BLOCK, 9, 512), Part(BLOCK, 4, 10))
    assert whole == ids(Part(BLOCK, 3, 512)) + ids(Part(BLOCK, 9, 512)) + ids(Part(BLOCK, 4, 512))[:10]


def test_every_id_is_drawn_equally_often() -> None:
    few = Vocabulary(range(50, 60))
    drawn = few.draw(3, [Part(OWN, number, 1000) for number in range(20)])
    counts = np.bincount(drawn, minlength=60)
    assert counts[:50].sum() == 0
    assert (abs(counts[50:] - 2000) < 200).all()
    pairs = {(before, after) for before, after in pairwise(drawn)}
    assert len(pairs) == 100


def test_words_for_targets_that_take_no_ids() -> None:
    prompt = RandomPrompt(0, (Part(OWN, 0, 12),), Vocabulary(None))
    assert prompt.token_ids is None
    assert set(prompt.text.split(" ")) <= set(WORDS)
    assert len(prompt.text.split(" ")) == 12


def test_huge_seeds_and_numbers() -> None:
    assert len(ids(Part(BLOCK, 2**63, 5), seed=2**80)) == 5
    assert ids(Part(BLOCK, 2**63, 50)) != ids(Part(BLOCK, 2**63 + 1, 50))


def drawn(*parts: Part) -> Prompt:
    return RandomPrompt(0, parts, Vocabulary(COMMON_IDS))


@pytest.mark.parametrize(
    ("prompts", "share"),
    [
        ([], 0),
        ([drawn(Part(PREFIX, 0, 40), Part(OWN, n, 60)) for n in range(4)], 3 * 40 / 400),
        ([drawn(Part(BLOCK, 1, 16), Part(BLOCK, last, 4)) for last in (2, 3, 2)], (16 + 20) / 60),
        ([drawn(Part(BLOCK, 1, 16), Part(BLOCK, 2, 16)), drawn(Part(BLOCK, 2, 16)), drawn(Part(BLOCK, 1, 5))], 5 / 53),
        ([EncodedPrompt([1, 2, 300, 4]), EncodedPrompt([1, 2, 999999, 4]), EncodedPrompt([7, 2])], 0.2),
        ([TextPrompt(Content(text)) for text in ("be kind: b", "x", "be kind: a")], 9 / 21),
    ],
)
def test_the_share_that_prompts_repeat(prompts: list[Prompt], share: float) -> None:
    assert repeated_share(prompts) == pytest.approx(share, abs=0.02)
    assert repeated_share(prompts[::-1]) == repeated_share(prompts)
