"""Sampling on the CPU: the reference and the compiled kernel, against the plain formula for one row and each other.

test_triton.py compares the Triton kernel with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmsched.engine.executor.rng import keys
from llmsched.kernels import reference
from llmsched.kernels.cpu import sampling
from llmsched.kernels.reference import CHUNK, race

WIDTH, DRAWS = 600, 4096

pytestmark = pytest.mark.usefixtures("one_thread")

Sample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Setting = float | npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]


@pytest.fixture(params=[reference.sample, sampling.sample], ids=["reference", "cpu"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return request.param  # type: ignore[no-any-return]


def probabilities(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Return the distribution from which a row is drawn, in plain Python."""
    best = max(logits)
    weights = [math.exp((value - best) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if weights[token] >= min_p * weights[order[0]]]
    if top_k:
        kept = kept[:top_k]
    total = math.fsum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in set(nucleus) else 0.0 for token in range(len(logits))]


def parameters_of(
    words: UInt64, temperature: Setting = 1.0, top_k: Setting = 0, top_p: Setting = 1.0, min_p: Setting = 0.0
) -> torch.Tensor:
    """Return parameters for keys [2, S]; the others are one number for all rows, or an array."""
    rows = words.shape[1]
    settings = [
        np.broadcast_to(np.asarray(value, dtype=np.float64), rows) for value in (temperature, top_k, top_p, min_p)
    ]
    return torch.from_numpy(np.vstack([*settings, words.astype(np.float64)]))


def drawn(sample: Sample, logits: torch.Tensor, words: UInt64, **settings: Setting) -> list[int]:
    """Draw with keys [2, S]; see `parameters_of` for the settings."""
    tokens: list[int] = sample(logits, parameters_of(words, **settings)).tolist()
    return tokens


def seeds_and_positions(count: int) -> UInt64:
    """Return the keys of 64 neighbouring seeds at neighbouring positions."""
    return keys([index % 64 for index in range(count)], [index // 64 for index in range(count)])


def deviation(tokens: list[int] | np.ndarray, expected: list[float] | np.ndarray) -> float:
    """Return the standardised chi-square, about N(0, 1), of draws from probabilities `expected`, rare tokens as one.

    Infinite if a token was drawn that has no probability.
    """
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    means = np.asarray(expected) * len(tokens)
    if counts[means == 0].any():
        return math.inf
    rare = means < 5
    counts, means = np.append(counts[~rare], counts[rare].sum()), np.append(means[~rare], means[rare].sum())
    counts, means = counts[means > 0], means[means > 0]
    freedom = max(len(means) - 1, 1)
    return float((((counts - means) ** 2 / means).sum() - freedom) / (2 * freedom) ** 0.5)


CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.5},
    {"top_p": 0.97, "temperature": 2.0},
    {"top_p": 0.999999, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.9, "temperature": 1.5},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 100_000},
    {"top_p": 1e-9},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_distribution_equals_the_formula(sample: Sample, settings: dict[str, float]) -> None:
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) * 2
    expected = probabilities(logits.tolist(), **{"temperature": 1.0, **settings})
    tokens = drawn(sample, logits.expand(DRAWS, -1), seeds_and_positions(DRAWS), **settings)
    assert deviation(tokens, expected) < 4
    assert len(set(tokens)) > 1 or max(expected) == 1


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_ties_go_to_the_lower_id(sample: Sample, settings: dict[str, float]) -> None:
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4)).mul(2).round() / 2
    expected = probabilities(logits.tolist(), **{"temperature": 1.0, **settings})
    tokens = drawn(sample, logits.expand(DRAWS, -1), seeds_and_positions(DRAWS), **settings)
    assert deviation(tokens, expected) < 4
    assert len(set(tokens)) > 1 or max(expected) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_minus_one_turns_top_k_off(sample: Sample, top_p: float) -> None:
    logits = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))
    words = seeds_and_positions(8)
    mixed = np.array([-1.0, 3.0] * 4)
    off = drawn(sample, logits, words, top_k=np.maximum(mixed, 0), top_p=top_p)
    assert drawn(sample, logits, words, top_k=mixed, top_p=top_p) == off


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_a_small_vocabulary_along_seeds_and_along_positions(sample: Sample, along: str) -> None:
    shares = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3])
    one, many = [5] * 50_000, range(50_000)
    words = keys(many, one) if along == "seeds" else keys(one, many)
    tokens = np.array(drawn(sample, shares.log().expand(50_000, -1), words))
    assert abs(deviation(tokens, shares.tolist())) < 4
    pairs = np.outer(shares, shares).ravel()
    assert abs(deviation(tokens[:-1] * 5 + tokens[1:], pairs)) < 4


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_a_flat_vocabulary_of_many_chunks(along: str) -> None:
    width, one, many = 16 * CHUNK, [5] * 40_000, range(40_000)
    words = torch.from_numpy((keys(many, one) if along == "seeds" else keys(one, many)).astype(np.int64)).T
    tokens = torch.cat(
        [race(torch.ones(len(part), width, dtype=torch.int64), part) for part in words.split(1000)]
    ).numpy()
    flat = [1 / width] * width
    assert abs(deviation(tokens, flat)) < 4
    # The chunk tells nothing of the place within it.
    assert abs(deviation(tokens // CHUNK * 16 + tokens % CHUNK // 16, [1 / 256] * 256)) < 4


def test_rounding_of_the_logits_changes_hardly_any_draw() -> None:
    """Relative noise of 1e-6 may change at most 2 of 2,000 draws from a flat distribution over 49,152 tokens.

    The logits are about 10, so the noise is 1e-5. A draw changes only if the two best tokens of a race differ by less;
    fewer than 0.1 such draws are expected. One kind of noise is independent for each token. The other, "tilt", has one
    sign in the first half of the vocabulary, as if hidden states differed. To show that draws could change, the test
    also samples by the inverse of the cumulative distribution, which is sensitive to the tilt.
    """
    generator = torch.Generator().manual_seed(6)
    logits = 10 + torch.randn(49152, generator=generator) * 0.1
    independent = torch.rand(49152, generator=generator) * 2 - 1
    tilt = torch.where(torch.arange(49152) < 49152 // 2, 1.0, -1.0)
    changed = {"independent": 0, "tilt": 0, "inverse": 0}
    for start in range(0, 2000, 50):
        words = keys(range(start, start + 50), [7] * 50)
        plain = np.array(drawn(sampling.sample, logits.expand(50, -1), words))
        for name, noise in (("independent", independent), ("tilt", tilt)):
            moved = logits * (1 + 1e-6 * noise)
            changed[name] += int((np.array(drawn(sampling.sample, moved.expand(50, -1), words)) != plain).sum())
    numbers = torch.from_numpy(keys(range(2000), [7] * 2000)[0] * 2.0**-32)
    inverse = [torch.searchsorted(values.double().softmax(0).cumsum(0), numbers) for values in (logits, moved)]
    changed["inverse"] = int((inverse[0] != inverse[1]).sum())
    assert changed["independent"] <= 2
    assert changed["tilt"] <= 2
    assert changed["inverse"] > 50


def test_a_row_gets_the_same_alone_and_among_any_others(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(12, WIDTH, generator=generator) * 2).bfloat16().float()
    temperature = np.linspace(0.3, 2, 12)
    top_k = np.array([0, 3, 0, 0, 400, 1, 0, 50, 0, 2, 0, 0])
    top_p = np.array([1, 1, 0.9, 0.999, 0.8, 1, 1e-9, 0.5, 1, 1, 0.3, 1])
    min_p = np.array([0, 0, 0, 0, 0.01, 0, 0, 0.2, 0.3, 0, 0, 1.0])
    for position in range(20):
        words = keys(range(12), [position] * 12)
        parameters = parameters_of(words, temperature, top_k, top_p, min_p)
        together = sample(logits, parameters).tolist()
        backwards = sample(logits.flip(0), parameters.flip(1)).tolist()
        alone = [int(sample(logits[row : row + 1], parameters[:, row : row + 1])) for row in range(12)]
        assert together == alone == backwards[::-1]


def test_barred_tokens_are_never_drawn(sample: Sample) -> None:
    logits = torch.full((WIDTH,), float("-inf"))
    logits[[4, 590]] = torch.tensor([1.0, 1.0])
    for settings in CASES:
        assert set(drawn(sample, logits.expand(64, -1), seeds_and_positions(64), **settings)) <= {4, 590}


@pytest.mark.parametrize("word", [0, 1 << 31, (1 << 32) - 1])
def test_extreme_logits_give_a_token_that_can_be(sample: Sample, word: int) -> None:
    rows = torch.zeros(6, 300)
    rows[0, 17] = 3e38
    rows[1] = torch.linspace(-3, 3, 300) * 1e38
    rows[2, :] = 1e-30
    rows[3, 1:] = float("-inf")
    rows[4] = float("nan")
    rows[5] = float("-inf")
    words = np.full((2, 6), word, dtype=np.uint64)
    tokens = drawn(sample, rows, words, temperature=np.array([1e-5, 2, 1, 1, 1, 1]), top_p=0.9)
    assert tokens[0] == 17
    assert tokens[1] == 299
    assert 0 <= tokens[2] < 270
    assert tokens[3] == 0
    assert tokens[4:] == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 255, 49152, 70000])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, width: int) -> None:
    """Sharp and flat rows, greedy rows and rows without a finite best, with every filter and many ties."""
    rng = np.random.default_rng(width)
    rows = 40
    spread = torch.from_numpy(rng.choice([0.0, 0.02, 0.5, 3.0, 30.0], (rows, 1)))
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * spread
    logits[1::8] = logits[1::8].round()
    logits[2, :] = float("-inf")
    logits[3, width // 2] = float("nan")
    logits[4, width - 1] = float("inf")
    logits[5, : width // 2] = float("-inf")
    logits[6, ::2] = -0.0
    logits[7, 0] = -float("nan")
    parameters = parameters_of(
        keys(range(rows), range(rows)),
        temperature=rng.choice([0, 0.3, 1, 2], rows),
        top_k=rng.choice([-1, 0, 1, 7, 50, 3000, 1 << 20], rows),
        top_p=rng.choice([1e-9, 0.5, 0.9, 0.99999, 1], rows),
        min_p=rng.choice([0, 0.001, 0.3, 1], rows),
    )
    expected = reference.sample(logits.to(dtype), parameters)
    assert sampling.sample(logits.to(dtype), parameters).tolist() == expected.tolist()
    assert expected[2:5].tolist() == [-1, -1, -1]


def test_rows_do_not_depend_on_the_threads() -> None:
    logits = torch.randn(7, 20000, generator=torch.Generator().manual_seed(1))
    parameters = parameters_of(keys(range(7), [3] * 7), top_p=0.9)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(sampling.sample(logits, parameters).tolist())
    assert found[0] == found[1] == found[2] == reference.sample(logits, parameters).tolist()
