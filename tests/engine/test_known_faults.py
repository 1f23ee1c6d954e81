"""Prefix cache bugs known from other engines, on the real executor: outputs are equal to those without a cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import Collector, alone, generate, make_engine, prompt, sampling

from llmsched.engine.core import Engine
from llmsched.engine.executor.base import Executor, RowResult, StepPlan, StepResult, SynchronousExecutor


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_fully_cached_prompt(length: int) -> None:
    engine = make_engine()
    first, second = (generate(engine, (prompt(length), sampling(max_tokens=8)))[0] for _ in range(2))
    expected = alone(prompt(length), sampling(max_tokens=8))
    assert first.tokens == second.tokens == expected.tokens
    assert second.text == expected.text
    assert second.num_cached_tokens == length - 1, "the last token is always computed"
    longer = [*prompt(length), *prompt(16, seed=1)]
    third = generate(engine, (longer, sampling(max_tokens=8)))[0]
    assert third.num_cached_tokens >= length // 16 * 16, "its last block is still found"
    assert third.tokens == alone(longer, sampling(max_tokens=8)).tokens


def test_equal_prompts_that_arrive_together() -> None:
    """The second request starts where the first has written up to, or computes its whole prompt."""
    tails = ([], prompt(20, seed=4), [])
    requests = [[*prompt(40), *tail] for tail in tails]
    found = generate(make_engine(), *((token_ids, sampling(max_tokens=12)) for token_ids in requests))
    for token_ids, choice in zip(requests, found, strict=True):
        assert choice.tokens == alone(token_ids, sampling(max_tokens=12)).tokens
    assert [choice.num_cached_tokens for choice in found] == [0, 40, 39]


class FailingOnce(SynchronousExecutor):
    """Executor whose first row fails without writing KV."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failed:
            return self._executor.execute(plan)
        self.failed = True
        return StepResult([RowResult(error="injected") for _ in plan.rows], 0.0)


def abort(engine: Engine) -> None:
    engine.step()
    engine.abort("gone")


def fail(engine: Engine) -> None:
    """Let the request fail before any KV is written."""
    right = engine.executor
    engine.executor = FailingOnce(right)
    engine.step()
    engine.executor = right


def preempt(engine: Engine) -> None:
    """Preempt the running request by one of a higher priority."""
    engine.step()
    engine.add_request("urgent", prompt(20, seed=8), sampling(max_tokens=1), priority=-5)
    engine.step()
    assert engine.stats().num_preemptions == 1
    engine.abort("gone")


@pytest.mark.parametrize(("leave", "computed"), [(abort, 64), (fail, 0), (preempt, 64)])
def test_blocks_that_were_never_written_are_not_found(leave: Callable[[Engine], None], computed: int) -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=1, fast_lane_share=0.0)
    engine.add_request("gone", prompt(400), sampling(), priority=1)
    leave(engine)
    collector = Collector(engine)
    engine.add_request("same", prompt(400), sampling())
    collector.run()
    (choice,) = collector.all("same")
    assert choice.num_cached_tokens == computed
    assert choice.tokens == alone(prompt(400), sampling()).tokens
