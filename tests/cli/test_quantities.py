"""Quantities with units."""

from __future__ import annotations

import pytest

from llmsched.cli import quantities
from llmsched.engine.errors import LlmschedError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("800ms", 0.8), ("1.5s", 1.5), ("250us", 0.00025), ("2min", 120), ("2m", 120), ("1h", 3600), (" 5 ms ", 0.005)],
)
def test_durations(text: str, seconds: float) -> None:
    assert quantities.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["800", "-1s", "1.5 parsecs", "", "ms", "nan", "1e999s", "1s2", "1e-320s", "1e30h"])
def test_a_duration_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(LlmschedError, match=r"duration|unit"):
        quantities.duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 1024**3),
        ("24GB", 24 * 1000**3),
        ("24gib", 24 * 1024**3),
        ("1.5 MiB", 1572864),
        ("7B", 7),
        ("1TiB", 1024**4),
        ("2097152", 2097152),
    ],
)
def test_sizes_keep_binary_and_decimal_units_apart(text: str, count: int) -> None:
    assert quantities.size(text) == count


@pytest.mark.parametrize("text", ["24", "24G", "-1GiB", "0GiB", "GiB", "24 chickens", "inf"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(LlmschedError, match="GiB"):
        quantities.size(text)


@pytest.mark.parametrize("text", ["1e30", "1e30GiB", "0.1B", "1e-320GiB"])
def test_a_size_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(LlmschedError, match="allowed is 1B to 1048576TiB"):
        quantities.size(text)


def test_shares() -> None:
    assert quantities.fraction("0.9") == 0.9
    assert quantities.fraction("90%") == pytest.approx(0.9)
    with pytest.raises(LlmschedError, match="share"):
        quantities.fraction("0.9GiB")


@pytest.mark.parametrize(
    ("text", "count"), [("8192", 8192), ("8k", 8192), ("8K", 8192), ("0.5k", 512), ("1M", 1 << 20)]
)
def test_tokens(text: str, count: int) -> None:
    assert quantities.tokens(text) == count
    assert quantities.context_length(text) == count


@pytest.mark.parametrize("text", ["0", "-8k", "1.5", "8q", "k", "nan", "auto", "1e30", "17M"])
def test_an_invalid_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(LlmschedError, match="tokens"):
        quantities.tokens(text)
