"""Every trial lies inside the bounds, both bounds are tried, each value once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsched.cli.tune.knobs import (
    PeakDemand,
    Setting,
    describe,
    headroom_settings,
    largest_budget,
    parse_knobs,
    powers_of_two,
    seqs_settings,
    target_settings,
)
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo


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


@pytest.mark.parametrize(
    ("kind", "concurrency", "input_len", "tokens"),
    [
        ("cuda", 4, 1000, 4096),
        ("cuda", 1, 1, 2048),
        ("cuda", 64, 4096, 8192),
        ("cpu", 3, 100, 512),
        ("cpu", 64, 256, 1024),
    ],
)
def test_the_largest_budget_holds_all_prompts(kind: str, concurrency: int, input_len: int, tokens: int) -> None:
    assert largest_budget(kind, concurrency, input_len) == tokens


@pytest.mark.parametrize(
    ("cap", "running", "most", "tried"),
    [
        (128, 40, 128, [128, 32, 16, 8]),
        (128, 4, 128, [128, 2, 1]),
        (128, 1, 128, [128]),
        (4, 4, 16, [4, 16, 8, 2, 1]),  # the cap was what ended the peak: more may be better
        (4, 4, 4, [4, 2, 1]),
        (4, 4, 6, [4, 6, 2, 1]),
        (1, 1, 1, [1]),
    ],
)
def test_caps_that_can_make_a_difference(cap: int, running: int, most: int, tried: list[int]) -> None:
    settings = seqs_settings(Setting(64, cap), PeakDemand(running, 0.1), most)
    assert [setting.max_num_seqs for setting in settings] == tried


def test_headroom_matters_only_where_kv_is_scarce() -> None:
    setting = Setting(64, 8, 0.1)
    assert headroom_settings(setting, PeakDemand(8, 0.65), 0.25) == [setting]
    for demand in (PeakDemand(8, 0.7), PeakDemand(8, 0.5, preempted=True)):
        assert [s.headroom for s in headroom_settings(setting, demand, 0.25)] == [0.1, 0.02, 0.05, 0.2]
    assert [s.headroom for s in headroom_settings(setting, PeakDemand(8, 0.7), 0.1)] == [0.1, 0.02, 0.05]


def test_targets_follow_from_the_tightest_slo_of_gaps() -> None:
    setting = Setting(64, 8)
    assert target_settings(setting, Slo(ttft=1.0), 256) == target_settings(setting, Slo(itl=0.0), 256) == [setting]
    tried = target_settings(setting, Slo(itl=0.1, tpot=0.05), 256)
    assert [(s.max_num_batched_tokens, s.target_itl) for s in tried] == [
        (64, None),
        (64, 0.05),
        (256, 0.05),
        (64, pytest.approx(0.03)),
        (256, pytest.approx(0.03)),
    ]
    aimed = Setting(256, 8, target_itl=0.05)
    assert Setting(256, 8) in target_settings(aimed, Slo(ttft=1.0), 256)


def test_knobs_are_read_and_ordered() -> None:
    assert parse_knobs("headroom, max-num-seqs") == ("max_num_seqs", "headroom")
    with pytest.raises(LlmschedError, match="'luck' is not a knob; choose from max_num_batched_tokens, max_num_seqs"):
        parse_knobs("luck")


def test_a_setting_is_described_by_what_differs() -> None:
    one, other = Setting(64, 8, target_itl=0.05), Setting(32, 8)
    assert describe(one, [one, other]) == "max_num_batched_tokens 64, target_itl 50 ms"
    assert describe(other, [one, other]) == "max_num_batched_tokens 32, target_itl auto"
    assert describe(one, [one]) == "max_num_batched_tokens 64"
