"""F19: every trial lies inside the bounds, both ends are tried, each value once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsched.cli.tune.space import largest_useful, powers_of_two
from llmsched.engine.errors import LlmschedError


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (3, 90, [3, 4, 8, 16, 32, 64, 90]),
        (32, 256, [32, 64, 128, 256]),
        (1, 1, [1]),
        (64, 64, [64]),
        (90, 90, [90]),
        (5, 7, [5, 7]),
        (1, 3, [1, 2, 3]),
    ],
)
def test_powers_of_two_and_both_ends(low: int, high: int, values: list[int]) -> None:
    assert powers_of_two(low, high) == values


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_any_bounds(one: int, other: int) -> None:
    low, high = sorted((one, other))
    values = powers_of_two(low, high)
    assert values[0] == low
    assert values[-1] == high
    assert values == sorted(set(values))
    assert {1 << power for power in range(21) if low <= 1 << power <= high} <= set(values)
    assert all(value & (value - 1) == 0 for value in values[1:-1])


@pytest.mark.parametrize(("low", "high"), [(90, 3), (0, 8), (-4, 8)])
def test_reversed_or_empty_bounds_are_refused(low: int, high: int) -> None:
    with pytest.raises(LlmschedError, match=f"from {low} to {high}"):
        powers_of_two(low, high)


@pytest.mark.parametrize(("concurrency", "input_len", "tokens"), [(4, 256, 1024), (1, 1, 1), (3, 100, 512)])
def test_a_step_need_not_hold_more_than_all_prompts(concurrency: int, input_len: int, tokens: int) -> None:
    assert largest_useful(concurrency, input_len) == tokens
