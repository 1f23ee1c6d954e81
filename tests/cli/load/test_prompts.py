"""Prompts that are drawn when they are sent."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from llmsched.cli.load.prompts import BLOCK, COMMON_IDS, OWN, WORDS, Part, RandomPrompt, Vocabulary


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
    assert prompt.text is not None
    assert set(prompt.text.split(" ")) <= set(WORDS)
    assert len(prompt.text.split(" ")) == 12


def test_huge_seeds_and_numbers() -> None:
    assert len(ids(Part(BLOCK, 2**63, 5), seed=2**80)) == 5
    assert ids(Part(BLOCK, 2**63, 50)) != ids(Part(BLOCK, 2**63 + 1, 50))
