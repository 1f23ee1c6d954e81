"""Random lengths: parsing and drawing."""

from __future__ import annotations

import numpy as np
import pytest

from llmsched.cli.load.random_lengths import RandomLengths, parse_lengths
from llmsched.engine.errors import LlmschedError


def draw(text: str, count: int = 20_000) -> np.ndarray:
    lengths = parse_lengths(text, "input_len")
    assert isinstance(lengths, RandomLengths)
    assert str(lengths) == text
    return lengths.draw(np.random.default_rng(0), count)


def test_one_number_is_a_number() -> None:
    assert parse_lengths("128", "input_len") == 128
    assert parse_lengths("7..7", "input_len") == 7


def test_a_range_is_uniform_and_has_both_ends() -> None:
    drawn = draw("64..67")
    assert np.bincount(drawn)[64:].tolist() == pytest.approx([5000] * 4, rel=0.1)
    assert (drawn.min(), drawn.max()) == (64, 67)


def test_lognormal_has_the_mean_and_the_spread() -> None:
    drawn = draw("lognormal:512,0.5")
    assert drawn.mean() == pytest.approx(512, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)


def test_lognormal_is_clipped_to_one_and_max() -> None:
    drawn = draw("lognormal:10,3,100")
    assert (drawn.min(), drawn.max()) == (1, 100)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "1..", "5..4", "0..4", "64-512", "12 8"),
        *("lognormal:0,1", "lognormal:5", "lognormal:5,-1", "lognormal:nan,1", "lognormal:9,nan"),
        *("lognormal:9,1,0", "normal:5,1", "16777217", "1..99999999999", "²", "lognormal:1e9999,1"),
    ],
)
def test_an_invalid_length_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(LlmschedError, match=r"input_len: .* allowed are 1 to 16777216 tokens: 128, 64\.\.512"):
        parse_lengths(text, "input_len")
