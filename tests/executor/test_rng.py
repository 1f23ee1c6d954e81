"""The random numbers: known answers, uniformity, and independence of neighbouring seeds and positions."""

from __future__ import annotations

import numpy as np
import pytest

from llmsched.engine.executor.rng import philox4x32, uniform

#: From the authors' kat_vectors: counter words, key words, result words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = [np.array([word], dtype=np.uint64) for word in (*counter, *key)]
    assert tuple(int(word[0]) for word in philox4x32(*words)) == expected


def chi_square(numbers: np.ndarray, bins: int = 256) -> float:
    """Standardised: about N(0, 1) for uniform numbers."""
    counts = np.bincount((numbers * bins).astype(int), minlength=bins)
    expected = len(numbers) / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / (2 * (bins - 1)) ** 0.5


def test_uniform_along_positions_and_along_seeds() -> None:
    along_positions = uniform([7] * 100_000, range(100_000))
    along_seeds = uniform(range(-50_000, 50_000), [3] * 100_000)
    for numbers in (along_positions, along_seeds):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert abs(chi_square(numbers)) < 4
        assert abs(numbers.mean() - 0.5) < 0.004


def test_neighbours_are_independent() -> None:
    here = uniform(range(50_000), range(50_000))
    for seed_step, position_step in ((1, 0), (0, 1), (1, 1), (1, -1)):
        there = uniform(range(seed_step, 50_000 + seed_step), np.arange(50_000) + max(position_step, 0))
        here_again = uniform(range(50_000), np.arange(50_000) + max(-position_step, 0))
        assert abs(np.corrcoef(here_again, there)[0, 1]) < 0.02
        pairs = np.floor(here_again * 16) * 16 + np.floor(there * 16)
        assert abs(chi_square(pairs / 256)) < 4
    assert len(np.unique(here)) == len(here)


def test_a_pair_gives_the_same_number_whatever_else_is_asked() -> None:
    alone = uniform([-5], [11])
    among_others = uniform([1, -5, 1 << 40], [0, 11, 1 << 33])
    assert among_others[1] == alone[0]
    assert uniform([(1 << 64) - 5], [11]) == alone
    assert uniform([1 << 40], [1 << 33]) == among_others[2] != uniform([1 << 40], [0])
