"""Faults of prefix caches that other engines have had, on the real executor: tokens are as without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import Choice, Collector, generate, make_engine, prompt, sampling

from llmsched.engine.core import Engine
from llmsched.engine.executor.base import Executor, RowResult, StepPlan, StepResult


def alone(token_ids: list[int], **fields: Any) -> Choice:
    return generate(make_engine(enable_prefix_caching=False), (token_ids, sampling(**fields)))[0]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_prompt_that_is_cached_whole(length: int) -> None:  # A01
    engine = make_engine()
    first, second = (generate(engine, (prompt(length), sampling(max_tokens=8)))[0] for _ in range(2))
    expected = alone(prompt(length), max_tokens=8)
    assert first.tokens == second.tokens == expected.tokens
    assert second.text == expected.text
    assert second.num_cached_tokens == length - 1, "the last token is always computed"
    longer = [*prompt(length), *prompt(16, seed=1)]
    third = generate(engine, (longer, sampling(max_tokens=8)))[0]
    assert third.num_cached_tokens >= length // 16 * 16, "its last block is still found"
    assert third.tokens == alone(longer, max_tokens=8).tokens


def test_equal_prompts_that_arrive_together() -> None:  # A03
    """The second starts at the position up to which the first has written, or computes all itself."""
    tails = ([], prompt(20, seed=4), [])
    requests = [[*prompt(40), *tail] for tail in tails]
    found = generate(make_engine(), *((token_ids, sampling(max_tokens=12)) for token_ids in requests))
    for token_ids, choice in zip(requests, found, strict=True):
        assert choice.tokens == alone(token_ids, max_tokens=12).tokens
    assert [choice.num_cached_tokens for choice in found] == [0, 40, 39]


class FailingOnce:
    """The executor, except that the first row that it computes yields nothing and an error."""

    def __init__(self, executor: Executor) -> None:
        self._executor: Any = executor
        self.failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failed:
            result: StepResult = self._executor.execute(plan)
            return result
        self.failed = True
        return StepResult([RowResult(error="injected") for _ in plan.rows], 0.0)


def abort(engine: Engine) -> None:
    engine.step()
    engine.abort("gone")


def fail(engine: Engine) -> None:
    """Nothing is written, and the request ends."""
    right = engine.executor
    engine.executor = FailingOnce(right)
    engine.step()
    engine.executor = right


def preempt(engine: Engine) -> None:
    """A more urgent request takes the only slot."""
    engine.step()
    engine.add_request("urgent", prompt(20, seed=8), sampling(max_tokens=1), priority=-5)
    engine.step()
    assert engine.stats().num_preemptions == 1
    engine.abort("gone")


@pytest.mark.parametrize(("leave", "computed"), [(abort, 64), (fail, 0), (preempt, 64)])
def test_blocks_that_were_never_written_are_not_found(leave: Callable[[Engine], None], computed: int) -> None:  # A05
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=1, fast_lane_share=0.0)
    engine.add_request("gone", prompt(400), sampling(), priority=1)
    leave(engine)
    collector = Collector(engine)
    engine.add_request("same", prompt(400), sampling())
    collector.run()
    (choice,) = collector.all("same")
    assert choice.num_cached_tokens == computed
    assert choice.tokens == alone(prompt(400)).tokens
