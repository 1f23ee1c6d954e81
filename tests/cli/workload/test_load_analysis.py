"""Figures of loads that are small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmsched.cli.workload.load_analysis import advise, arrival_figures, headroom, length_figures
from llmsched.cli.workload.request_sample import RequestSample
from llmsched.cli.workload.shared_prefixes import Pin, shared_prefixes


def tokens(*prompts: Sequence[int]) -> RequestSample:
    """Prompts of known token ids."""
    return RequestSample("s", "log", "t", [len(p) for p in prompts], [1] * len(prompts), prompts=prompts)


def blocks(*prompts: tuple[int, Sequence[int]]) -> RequestSample:
    """Prompts of a length in tokens and blocks of 512."""
    lengths = [length for length, _ in prompts]
    return RequestSample(
        "s", "mooncake", "t", lengths, [1] * len(prompts), prompts=[ids for _, ids in prompts], unit=512
    )


def hit_rate(sample: RequestSample, block_size: int) -> float:
    found = shared_prefixes(sample, block_size)
    return found.hit_rate


def coverage(sample: RequestSample) -> dict[int, float]:
    found = shared_prefixes(sample, 16)
    return {row.tokens: row.share for row in found.coverage}


def test_lengths() -> None:
    found = length_figures([10, 20, 30, 40, 100])
    assert (found.mean, found.p50, found.p75, found.max) == (40, 30, 40, 100)
    assert (found.p90, found.p95, found.p99) == (pytest.approx(76), pytest.approx(88), pytest.approx(97.6))
    assert found.tail == pytest.approx(97.6 / 40)
    assert length_figures([]) is length_figures([0, 0]) is None


def test_arrivals() -> None:
    """Six in 30 s; gaps 1, 1, 8, 10, 10 have mean 6 and deviation sqrt(17.2); three come within 10 s of the first."""
    found = arrival_figures([0, 1, 2, 10, 20, 30])
    assert (found.duration_s, found.rate) == (30, 5 / 30)
    assert found.gap_cv == pytest.approx(math.sqrt(17.2) / 6)
    assert found.peak_over_mean == pytest.approx(3 / (10 * 5 / 30))


def test_arrivals_too_few_for_figures() -> None:
    assert arrival_figures([0, 0]).rate is None
    assert arrival_figures([0]).rate is None
    short = arrival_figures([0, 1, 3])
    assert (short.rate, short.peak_over_mean) == (pytest.approx(2 / 3), None)


def test_coverage_is_the_share_of_the_most_frequent_prefix() -> None:
    shared, other = list(range(64)), list(range(100, 164))
    sample = tokens(shared + [1] * 64, [*shared, 2], shared[:40], other)
    found = coverage(sample)
    assert [found[n] for n in (32, 64, 128, 256)] == [0.75, 0.5, 0.25, 0]


def test_coverage_of_blocks() -> None:
    sample = blocks((1024, [0, 1]), (1500, [0, 1, 2]), (600, [0, 7]), (100, [0]), (512, [9]))
    found = coverage(sample)
    assert (found[512], found[1024], found[2048]) == (0.6, 0.4, 0)
    assert (found[32], found[64], found[128]) == (0.8, 0.8, 0.6)
    rows = shared_prefixes(sample, 16)
    assert [row.tokens for row in rows.coverage if row.exact] == [512, 1024, 2048, 4096]


def test_the_ideal_hit_rate_counts_whole_blocks_of_earlier_prompts() -> None:
    """The second prompt shares 20 tokens with the first, the third all its 24; the last token is always computed."""
    first, second = list(range(24)), [*range(20), 99, 98, 97, 96]
    sample = tokens(first, second, first)
    assert hit_rate(sample, 16) == (16 + 16) / 72
    assert hit_rate(sample, 4) == (20 + 23) / 72
    assert hit_rate(sample, 1) == (20 + 23) / 72
    assert hit_rate(sample, 32) == 0


def test_a_prompt_of_whole_blocks_that_is_all_cached_still_computes_one_token() -> None:
    same = list(range(32))
    assert hit_rate(tokens(same, same), 16) == 31 / 64


def test_blocks_of_a_trace_are_divided_by_the_block_size() -> None:
    """1,000 tokens are a block of 512 and 488 of another; 40 tokens of a third are less than a block of 64."""
    sample = blocks((1000, [0, 1]), (1000, [0, 1]), (552, [0, 5]), (552, [0, 5]))
    assert hit_rate(sample, 16) == (992 + 512 + 544) / 3104
    assert hit_rate(sample, 64) == (960 + 512 + 512) / 3104
    assert hit_rate(sample, 1024) == 0


def test_an_equal_block_after_another_prefix_is_not_a_hit() -> None:
    assert hit_rate(blocks((1024, [0, 1]), (1024, [1, 0]), (1024, [2, 1])), 16) == 0


def test_an_unlimited_cache_holds_each_prefix_once() -> None:
    found = shared_prefixes(blocks((1024, [0, 1]), (700, [0, 2]), (1024, [0, 1])), 16)
    assert found.distinct_tokens == 512 + 512 + 188


def test_the_pin_is_the_prefix_that_saves_the_most_tokens() -> None:
    """Three prompts that share 16 tokens save less than two that share 48."""
    long, short = list(range(48)), list(range(16))
    found = shared_prefixes(tokens([7] * 20, [*short, *[9] * 8], [*long, 1], [*long, 2], [5]), 16)
    assert found.pin == Pin(tokens=48, requests=2, example=2)
    alone = shared_prefixes(tokens([1] * 40, [2] * 40), 16)
    assert alone.pin is None


def test_a_prefix_of_few_requests_is_not_pinned() -> None:
    prompts = [[number] * 16 for number in range(58)] + [[99] * 16] * 2
    assert shared_prefixes(tokens(*prompts), 16).pin is None  # type: ignore[union-attr]
    assert shared_prefixes(tokens(*prompts, [99] * 16, [99] * 16), 16).pin == Pin(16, 4, 58)  # type: ignore[union-attr]


def test_unknown_prompts() -> None:
    sample = replace(tokens([1]), prompts=None)
    assert shared_prefixes(sample, 16) is None
    assert advise(sample, None).prefix_caching is None


def test_max_model_len_fits_the_longest_request() -> None:
    sample = RequestSample("s", "azure", "t", [10, 250, 600], [5, 6, 100])
    advice = advise(sample, None)
    assert (advice.max_model_len, advice.refused_by_half) == (768, pytest.approx(1 / 3))
    assert advise(replace(sample, outputs=[None, None, 168]), None).max_model_len == 768
    assert advise(replace(sample, inputs=[0, 0, 0], outputs=[0, 0, 0]), None).max_model_len == 256


def test_headroom_covers_answers_longer_than_the_mean() -> None:
    """Outputs 10 and 30: deviation 10; a running request holds (10 x 105 + 30 x 115) / 40 = 112.5 tokens."""
    excess = 2.326 * 10 / (4 * 112.5)
    assert headroom([(100, 10), (100, 30)], 16) == pytest.approx(excess / (1 + excess))
    assert headroom([(100, 10), (100, 10)], 16) == 0
    advice = advise(RequestSample("s", "azure", "t", [100, 100], [10, 30]), None)
    assert advice.headroom_by_running is not None
    assert list(advice.headroom_by_running) == [16, 64, 256]
    assert advise(RequestSample("s", "log", "t", [5], [None]), None).headroom_by_running is None


def test_caching_is_advised_if_prefixes_repeat() -> None:
    same = list(range(64))
    for prompts, pays in (((same, same), True), (([1] * 64, [2] * 64), False)):
        sample = tokens(*prompts)
        assert advise(sample, shared_prefixes(sample, 16)).prefix_caching is pays
