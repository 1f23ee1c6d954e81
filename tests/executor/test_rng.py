"""Random numbers: known answers, uniformity, independence of neighbouring seeds, positions and names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmsched.engine.executor.rng import keys, philox4x32
from llmsched.kernels.reference import hashed

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
    """Return the standardised chi-square, about N(0, 1) for numbers that are uniform in [0, 1)."""
    counts = np.bincount((numbers * bins).astype(int).ravel(), minlength=bins)
    expected = numbers.size / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / (2 * (bins - 1)) ** 0.5


def paired(first: np.ndarray, second: np.ndarray) -> float:
    """Return chi_square of the pairs on a grid of 16 x 16."""
    return chi_square((np.floor(first * 16) * 16 + np.floor(second * 16)) / 256)


def fractions(seeds: range | list[int], positions: range | np.ndarray | list[int]) -> np.ndarray:
    """Return both words of each key as numbers in [0, 1): [2, N]."""
    return keys(seeds, positions) * 2.0**-32


def test_uniform_along_positions_and_along_seeds() -> None:
    along_positions = fractions([7] * 100_000, range(100_000))
    along_seeds = fractions(range(-50_000, 50_000), [3] * 100_000)
    for words in (along_positions, along_seeds):
        for numbers in words:
            assert numbers.min() >= 0
            assert numbers.max() < 1
            assert abs(chi_square(numbers)) < 4
            assert abs(numbers.mean() - 0.5) < 0.004
        assert abs(paired(*words)) < 4


def test_neighbours_are_independent() -> None:
    here = keys(range(50_000), range(50_000))
    for seed_step, position_step in ((1, 0), (0, 1), (1, 1), (1, -1)):
        there = fractions(range(seed_step, 50_000 + seed_step), np.arange(50_000) + max(position_step, 0))
        here_again = fractions(range(50_000), np.arange(50_000) + max(-position_step, 0))
        for first, second in zip(here_again, there, strict=True):
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
            assert abs(paired(first, second)) < 4
    assert len(np.unique(here, axis=1).T) == len(here.T)


def test_a_pair_gives_the_same_key_whatever_else_is_asked() -> None:
    alone = keys([-5], [11])[:, 0].tolist()
    among_others = keys([1, -5, 1 << 40], [0, 11, 1 << 33]).T.tolist()
    assert among_others[1] == alone
    assert keys([(1 << 64) - 5], [11])[:, 0].tolist() == alone
    assert keys([1 << 40], [1 << 33])[:, 0].tolist() == among_others[2] != keys([1 << 40], [0])[:, 0].tolist()


def reference_hash(name: int, first: int, second: int) -> int:
    """Return `hashed`, computed with Python integers."""
    mixed = name ^ first
    mixed = (mixed ^ (mixed >> 16)) * 0x604BAA5D % 2**32
    mixed = (mixed ^ (mixed >> 15) ^ second) * 0x43D6CE97 % 2**32
    return mixed ^ (mixed >> 15)


def test_hash_equals_arithmetic_without_limits() -> None:
    words = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x9E3779B9, 0x12345678]
    triples = [(name, first, second) for name in words for first in words for second in words]
    names, firsts, seconds = torch.tensor(triples).T
    assert hashed(names, firsts, seconds).tolist() == [reference_hash(*triple) for triple in triples]


def name_hashes(seeds: range, positions: list[int] | range, count: int = 320) -> np.ndarray:
    """Return hashes of the names 0 .. count - 1 as numbers in [0, 1), one row per key: [N, count]."""
    words = torch.from_numpy(keys(seeds, positions).astype(np.int64))
    return hashed(torch.arange(count), words[0][:, None], words[1][:, None]).numpy() * 2.0**-32


def test_hashes_of_a_key_are_uniform_and_differ() -> None:
    hashes = name_hashes(range(100), [0] * 100, 4096)
    assert all(abs(chi_square(row)) < 5 for row in hashes)
    assert all(len(np.unique(row)) == 4096 for row in hashes)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_hashes_of_a_name_are_uniform_and_independent_of_its_neighbours(along: str) -> None:
    one, many = [9] * 20_000, range(20_000)
    hashes = name_hashes(many, one) if along == "seeds" else name_hashes(one, many)
    assert all(abs(chi_square(hashes[:, name])) < 5 for name in range(0, 320, 16))
    for step in (1, 2, 3, 16, 64, 256):
        assert abs(paired(hashes[:, :-step], hashes[:, step:])) < 5
        # The smallest hashes decide draws: two of them meet as often as chance has it.
        small = hashes < 2.0**-6
        met, expected = (small[:, :-step] & small[:, step:]).sum(), 20_000 * (320 - step) * 2.0**-12
        assert abs(met - expected) < 5 * expected**0.5
    assert abs(paired(hashes[:-1], hashes[1:])) < 5
    smallest = np.bincount(hashes.argmin(1), minlength=320)
    assert abs(((smallest - 62.5) ** 2 / 62.5).sum() - 319) < 5 * (2 * 319) ** 0.5
