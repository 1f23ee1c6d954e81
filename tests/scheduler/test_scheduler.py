"""Scheduler with a fake executor that checks the KV of every row; tokens are compared with a reference."""

from __future__ import annotations

import pytest
from fakes import Harness, assert_right, make_request, tokens


def test_equal_prompts_in_one_step_share_their_blocks_afterwards() -> None:
    harness = Harness(num_blocks=32, budget=256)
    pair = [harness.add(make_request(f"p{i}", tokens(40), 20)) for i in range(2)]
    harness.step()
    assert pair[1].num_computed_tokens == 0, "waits for what the first is writing"
    harness.step()
    assert pair[1].num_cached_tokens == 39
    assert harness.scheduler.kv.pool.num_used == 2 + 2, "two whole blocks shared, one partial block each"
    harness.run()
    assert_right(*pair)
    assert sum(plan.num_tokens for plan in harness.executor.plans) == 40 + 1 + 2 * 19


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([66] * 16 + [7, 8, 9], [322] * 16 + [7, 8, 9]),
        ([1, 23] * 8 + [5], [12, 3] * 8 + [5]),
        ([5] * 16 + [6], [5 + 2**16] * 16 + [6]),
        (tokens(33), tokens(34)[1:]),
    ],
)
def test_different_ids_never_share(one: list[int], two: list[int]) -> None:
    harness = Harness(num_blocks=16)
    harness.add(make_request("one", one))
    harness.run()
    other = harness.add(make_request("two", two))
    harness.run()
    assert other.num_cached_tokens == 0
    assert_right(other)


def test_prompt_that_waits_for_memory_is_not_computed_in_vain() -> None:
    harness = Harness(num_blocks=40, budget=64)
    first = harness.add(make_request("first", tokens(400), 100))
    for _ in range(8):
        harness.step()
    second = harness.add(make_request("second", tokens(400, seed=1), 20, arrival=8))
    harness.run()
    assert_right(first, second)
    assert first.num_preemptions == second.num_preemptions == 0
    assert sum(plan.num_tokens for plan in harness.executor.plans) == 400 + 99 + 400 + 19


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(767, 1, True), (768, 1, True), (768, 2, False), (769, 1, False)]
)
def test_what_can_never_fit(prompt: int, max_tokens: int, fits: bool) -> None:
    assert Harness(num_blocks=48).scheduler.fits_alone(prompt, max_tokens) is fits
