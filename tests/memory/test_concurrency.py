"""Preemption probability of mixed lengths, against enumeration and simulation, and its invariants."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.concurrency import LengthDistribution, Occupancy, lognormal_lengths

BLOCK = 16


def lengths(*requests: tuple[int, int]) -> LengthDistribution:
    prompts, outputs = zip(*requests, strict=True)
    return LengthDistribution("test", np.array(prompts), np.array(outputs))


def totals(*values: int) -> LengthDistribution:
    return LengthDistribution("test", np.array(values))


def held_blocks(mix: LengthDistribution, block_size: int = BLOCK) -> list[int]:
    """Return the blocks held at each step of each request: of p, p + 1, ... p + o - 1 tokens."""
    pairs = zip(mix.prompts.tolist(), mix.outputs.tolist(), strict=True)
    return [-(-(prompt + step) // block_size) for prompt, output in pairs for step in range(output)]


def test_one_length_is_all_or_nothing() -> None:
    occupancy = Occupancy(totals(1600), KVLayout(BLOCK), 1000)  # 100 blocks each
    assert [occupancy.preemption_probability(count) for count in (1, 10, 11)] == [0, 0, pytest.approx(1)]
    assert occupancy.most_seqs(0.01, limit=500) == 10
    assert occupancy.most_seqs(0.01, limit=7) == 7


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (2, 1), (17, 1), (18, 2), (1601, 100), (1602, 101)])
def test_the_last_token_takes_no_block(length: int, blocks: int) -> None:
    assert Occupancy(totals(length), KVLayout(BLOCK), blocks).preemption_probability(1) == 0
    if blocks > 1:
        assert Occupancy(totals(length), KVLayout(BLOCK), blocks - 1).preemption_probability(1) == pytest.approx(1)


def test_every_way_that_few_sequences_can_stand() -> None:
    mix = lengths((3, 40), (20, 10), (70, 5))
    ways = held_blocks(mix)
    for count in (1, 2, 3):
        sums = [sum(way) for way in product(ways, repeat=count)]
        for pool in range(1, 6 * count):
            wanted = sum(total > pool for total in sums) / len(sums)
            assert Occupancy(mix, KVLayout(BLOCK), pool).preemption_probability(count) == pytest.approx(
                wanted, abs=1e-9
            )


def test_long_outputs_are_seen_more_often() -> None:
    mix = lengths((16, 1), (160, 99))
    # One step of the first request at one block, 99 steps of the second at ten or more.
    assert Occupancy(mix, KVLayout(BLOCK), 5).preemption_probability(1) == pytest.approx(0.99)


def test_a_large_mix_agrees_with_simulation() -> None:
    generator = np.random.default_rng(7)
    mix = LengthDistribution("test", generator.integers(1, 4000, 500), generator.integers(1, 800, 500))
    ways = np.array(held_blocks(mix))
    count, pool = 60, int(60 * ways.mean() * 1.08)
    drawn = generator.choice(ways, (20_000, count)).sum(axis=1)
    simulated = (drawn > pool).mean()
    assert 0.02 < simulated < 0.5
    assert Occupancy(mix, KVLayout(BLOCK), pool).preemption_probability(count) == pytest.approx(simulated, abs=0.015)


def test_coarser_units_of_large_pools_change_little() -> None:
    mix = lognormal_lengths(1500, 1.0)
    fine = Occupancy(mix, KVLayout(BLOCK), 16_000)
    coarse = Occupancy(mix, KVLayout(1), 16_000 * BLOCK)  # the same tokens, in units of 16 blocks of one token
    for count in (155, 165, 175):
        assert coarse.preemption_probability(count) == pytest.approx(fine.preemption_probability(count), abs=0.06)


mixes = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(mixes, st.integers(1, 2000), st.integers(1, 200))
def test_more_sequences_are_never_safer_and_more_blocks_never_riskier(
    requests: list[tuple[int, int]], pool: int, count: int
) -> None:
    occupancy, larger = (
        Occupancy(lengths(*requests), KVLayout(BLOCK), pool),
        Occupancy(lengths(*requests), KVLayout(BLOCK), pool + 50),
    )
    risk = occupancy.preemption_probability(count)
    assert 0 <= risk <= 1
    assert occupancy.preemption_probability(count + 1) >= risk - 1e-9
    assert larger.preemption_probability(count) <= risk + 1e-9


@settings(max_examples=40, deadline=None)
@given(mixes, st.integers(1, 2000), st.sampled_from([0.001, 0.01, 0.05, 0.5]))
def test_most_seqs_is_the_largest_safe_number(requests: list[tuple[int, int]], pool: int, risk: float) -> None:
    occupancy = Occupancy(lengths(*requests), KVLayout(BLOCK), pool)
    most = occupancy.most_seqs(risk, limit=4096)
    assert occupancy.preemption_probability(most) <= risk + 1e-9
    assert most == 4096 or occupancy.preemption_probability(most + 1) > risk - 1e-9


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = LengthDistribution("some", np.arange(1, 101))
    assert [lengths.percentile(percent) for percent in (50, 90, 95, 99, 100)] == [50, 90, 95, 99, 100]


def test_requests_beyond_a_limit_are_left_out() -> None:
    lengths = LengthDistribution("some", np.array([374, 396, 879]), np.array([44, 109, 1]))
    kept = lengths.within(505)
    assert kept.totals.tolist() == [418, 505]
    assert lengths.within(417) is None


@pytest.mark.parametrize(("mean", "variation"), [(1500, 0.5), (1500, 1.0), (300, 2.0), (8000, 0.0)])
def test_a_log_normal_has_the_mean_and_the_variation_asked_for(mean: float, variation: float) -> None:
    lengths = lognormal_lengths(mean, variation)
    assert lengths.mean == pytest.approx(mean, rel=0.02)
    assert lengths.variation == pytest.approx(variation, rel=0.12, abs=1e-3)
    assert lengths.totals.min() >= 1
