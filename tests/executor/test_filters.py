"""Temperature, min_p, top_k, top_p and the draw, against the plain formula for one row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from llmsched.engine.executor import filters
from llmsched.engine.executor.filters import Filters, draw

WIDTH = 600


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that nuclei of this small vocabulary are found at the first, second and last try."""
    monkeypatch.setattr(filters, "CANDIDATES", 8)
    monkeypatch.setattr(filters, "CANDIDATES_GROWTH", 8)


def probabilities(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution that a row is drawn from, in plain Python."""
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


def drawn(logits: torch.Tensor, uniform: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """Draws with parameters that are numbers for all rows or arrays."""
    rows = len(logits)
    settings = [
        np.broadcast_to(np.asarray(value, dtype=np.float64), rows) for value in (temperature, top_k, top_p, min_p)
    ]
    return draw(logits, Filters(*settings, uniform)).tolist()


def shares(logits: torch.Tensor, grid: int = 4096, **settings: float) -> np.ndarray:
    """How much of [0, 1) leads to each token: the distribution, to 1 / grid."""
    uniform = (np.arange(grid) + 0.5) / grid
    tokens = drawn(logits.expand(grid, -1), uniform, **settings)
    return np.bincount(tokens, minlength=logits.shape[0]) / grid


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
def test_distribution_equals_the_formula(settings: dict[str, float]) -> None:
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) * 2
    expected = probabilities(logits.tolist(), **{"temperature": 1.0, **settings})
    assert np.abs(shares(logits, **settings) - expected).max() < 2 / 4096


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_ties_go_to_the_lower_id(settings: dict[str, float]) -> None:
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4)).mul(2).round() / 2
    expected = probabilities(logits.tolist(), **{"temperature": 1.0, **settings})
    assert np.abs(shares(logits, **settings) - expected).max() < 2 / 4096


def test_tokens_come_in_the_order_of_their_ids() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    uniform = np.array([0.0, 0.05, 0.15, 0.49, 0.51, 0.69, 0.71, 1 - 2.0**-53])
    assert drawn(logits.expand(8, -1), uniform) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_row_gets_the_same_alone_and_among_any_others() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(12, WIDTH, generator=generator) * 2).bfloat16().float()
    temperature = np.linspace(0.3, 2, 12)
    top_k = np.array([0, 3, 0, 0, 400, 1, 0, 50, 0, 2, 0, 0])
    top_p = np.array([1, 1, 0.9, 0.999, 0.8, 1, 1e-9, 0.5, 1, 1, 0.3, 1])
    min_p = np.array([0, 0, 0, 0, 0.01, 0, 0, 0.2, 0.3, 0, 0, 1.0])
    uniform = np.linspace(0.01, 0.99, 12)
    together = drawn(logits, uniform, temperature, top_k, top_p, min_p)
    backwards = drawn(logits.flip(0), uniform[::-1], temperature[::-1], top_k[::-1], top_p[::-1], min_p[::-1])
    alone = [
        drawn(logits[row : row + 1], uniform[row : row + 1], temperature[row], top_k[row], top_p[row], min_p[row])[0]
        for row in range(12)
    ]
    assert together == alone == backwards[::-1]


def test_barred_tokens_are_never_drawn() -> None:
    logits = torch.full((WIDTH,), float("-inf"))
    logits[[4, 590]] = torch.tensor([1.0, 1.0])
    for settings in CASES:
        tokens = np.flatnonzero(shares(logits, grid=64, **settings))
        assert set(tokens.tolist()) <= {4, 590}


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_extreme_logits_give_a_token_that_can_be(uniform: float) -> None:
    rows = torch.zeros(6, 300)
    rows[0, 17] = 3e38
    rows[1] = torch.linspace(-3, 3, 300) * 1e38
    rows[2, :] = 1e-30
    rows[3, 1:] = float("-inf")
    rows[4] = float("nan")
    rows[5] = float("-inf")
    tokens = drawn(rows, np.full(6, uniform), temperature=np.array([1e-5, 2, 1, 1, 1, 1]), top_p=0.9)
    assert tokens[0] == 17
    assert tokens[1] == 299
    assert 0 <= tokens[2] < 270
    assert tokens[3] == 0
    assert all(0 <= token < 300 for token in tokens[4:])
