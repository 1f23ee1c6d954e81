"""Steps that are planned and launched before the results of the step before them are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import BLOCK, Harness, assert_right, make_request, reference, tokens

from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import StepPlan
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.request import FinishReason, Request, RequestStatus


class Ahead(Harness):
    """Harness that looks ahead, and records (number of rows, number of rows with a pending token) of each launch."""

    def __init__(self, num_blocks: int = 100, **settings: Any) -> None:
        super().__init__(num_blocks, looks_ahead=True, **settings)
        self.launched: list[tuple[int, int]] = []
        launch = self.executor.launch

        def watched(plan: StepPlan) -> Any:
            pending = [row for row in plan.rows if row.start + row.num_tokens > len(row.sequence.token_ids)]
            self.launched.append((len(plan.rows), len(pending)))
            return launch(plan)

        self.executor.launch = watched  # type: ignore[method-assign]

    def rows_of(self, request: Request) -> int:
        return sum(row.sequence is request for plan in self.executor.plans for row in plan.rows)


def changed(request: Request, **sampling: Any) -> Request:
    request.sampling = replace(request.sampling, **sampling)
    return request


def test_each_step_is_launched_before_the_results_of_the_one_before() -> None:
    it = Ahead()
    requests = [it.add(make_request(f"r{i}", tokens(10, seed=i), 6)) for i in range(3)]
    it.step()
    assert it.launched == [(3, 0), (3, 3)], "the first step launches two"
    assert [request.num_output_tokens for request in requests] == [1, 1, 1], "and applies one"
    for number in range(3, 7):
        it.step()
        assert it.launched[-1] == (3, 3)
        assert len(it.launched) == number
    assert it.run() == 1, "the last token is known to be the last: nothing is launched behind it"
    assert len(it.launched) == 6
    assert_right(*requests)


def test_nothing_is_launched_ahead_without_async_scheduling() -> None:
    it = Ahead(async_scheduling=False)
    request = it.add(make_request("r", tokens(10), 6))
    it.run()
    assert it.launched == [(1, 0)] * 6
    assert_right(request)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_no_step_has_a_row_of_a_request_that_is_sure_to_end(max_tokens: int) -> None:
    it = Ahead()
    it.add(make_request("other", tokens(20, seed=1), 12))
    request = it.add(make_request("short", tokens(70), max_tokens))
    it.run()
    assert it.rows_of(request) == 2 + max(0, max_tokens - 1)
    assert_right(request)


def test_the_token_after_a_stop_is_discarded() -> None:
    """Its block is free at once, and is used again while the step in flight may still write to it."""
    output = reference(tokens(15), 10)
    it = Ahead(num_blocks=4)
    request = make_request("stops", tokens(15), 10)
    request.stop_ids = frozenset({output[4]})
    it.add(request)
    for number in range(3):
        it.add(make_request(f"next{number}", tokens(30, seed=3 + number), 5))
    it.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.token_ids[15:] == output[:5]
    assert it.rows_of(request) == 1 + 4 + 1, "the prompt, the tokens after it, and one for nothing"
    assert it.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_wait_for_the_tokens_on_which_they_depend(penalty: str) -> None:
    it = Ahead()
    it.add(make_request("free", tokens(10, seed=1), 20))
    it.step()
    request = it.add(changed(make_request("held", tokens(10), 4), **{penalty: 1.5}))
    it.step()
    assert it.launched[-1] == (2, 1), "its prompt is known"
    before = len(it.launched)
    while request.status is not RequestStatus.FINISHED:
        it.step()
    assert [pending for _, pending in it.launched[before:]] == [0, 0, 0, 1], "nothing depends on its last token"


def test_memory_that_is_short_waits_for_results() -> None:
    """A request that would be preempted may be about to end, and the ids of its pending tokens are not known."""
    it = Ahead(num_blocks=6, headroom=0.0, output_prediction="none")
    requests = [it.add(make_request(f"r{i}", tokens(40, seed=i), 30)) for i in range(2)]
    it.run()
    assert it.scheduler.counters.num_preemptions > 0
    assert sum(pending > 0 for _, pending in it.launched) > 20
    assert_right(*requests)


def test_a_request_of_a_higher_class_takes_its_place_between_two_steps() -> None:
    it = Ahead(max_num_seqs=1)
    low = it.add(make_request("low", tokens(10), 20, priority=5))
    for _ in range(3):
        it.step()
    high = it.add(make_request("high", tokens(10, seed=1), 3, arrival=it.time))
    it.step()
    assert low.status is RequestStatus.RUNNING, "its step is in flight"
    it.step()
    assert (low.status, high.status) == (RequestStatus.WAITING, RequestStatus.RUNNING)
    it.run()
    assert_right(low, high)


@pytest.mark.parametrize("layout", [KVLayout(BLOCK, 1, 2, 9), KVLayout(BLOCK, 0, 1, 40)], ids=["some", "all"])
def test_sliding_windows_do_not_hold_it_up(layout: KVLayout) -> None:
    """The token at the start of a block is scheduled before the block behind the window is released."""
    it = Ahead(num_blocks=20 * layout.num_groups, layout=layout)
    request = it.add(make_request("long", tokens(50), 100))
    it.run()
    assert_right(request)
    assert [pending for _, pending in it.launched[1:]] == [1] * 99


def test_an_abort_in_flight_leaves_nothing_behind() -> None:
    it = Ahead(num_blocks=8)
    gone = it.add(make_request("gone", tokens(20), 20))
    for _ in range(3):
        it.step()
    it.scheduler.finish(gone, FinishReason.ABORT)
    it.scheduler.check_integrity()
    assert it.scheduler.kv.pool.num_used == 0
    assert it.has_work(), "the step in flight"
    assert it.idle_until() is None
    other = it.add(make_request("other", tokens(60, seed=1), 20))
    it.step()
    assert other.num_computed_tokens == 0, "the step was that of the aborted request"
    assert it.launched[-1] == (1, 0), "and the next one is under way"
    it.run()
    assert gone.num_output_tokens == 3
    assert_right(other)


def test_limits_change_while_the_last_step_is_in_flight() -> None:
    it = Ahead()
    gone = it.add(make_request("gone", tokens(20), 20))
    it.step()
    with pytest.raises(ConfigError, match="while requests run"):
        it.reconfigure(max_num_seqs=2)
    it.scheduler.finish(gone, FinishReason.ABORT)
    it.reconfigure(max_num_seqs=2)
    assert not it.has_work()
    requests = [it.add(make_request(f"r{i}", tokens(10, seed=i), 5)) for i in range(4)]
    it.run()
    assert_right(*requests)
    assert max(rows for rows, _ in it.launched) == 2


def test_a_window_of_time_for_more_requests_is_kept_behind_a_step_in_flight() -> None:
    it = Ahead(schedule_window=5.0, min_schedule_batch=2)
    gone = it.add(make_request("gone", tokens(20), 20, arrival=-5.0))
    it.step()
    it.scheduler.finish(gone, FinishReason.ABORT)
    it.add(make_request("early", tokens(10), 3, arrival=it.time))
    it.step()
    assert len(it.launched) == 2, "no more than for the first request"
    assert not it.scheduler.running
    assert it.idle_until() == 6.0


def test_an_error_of_a_launch_does_not_take_the_results_of_the_step_before() -> None:
    it = Ahead()
    request = it.add(make_request("r", tokens(10), 20))
    it.step()
    launch = it.executor.launch

    def broken(plan: StepPlan) -> Any:
        raise RuntimeError("an illegal memory access")

    it.executor.launch = broken  # type: ignore[method-assign]
    it.step()
    assert request.num_output_tokens == 2
    it.executor.launch = launch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal"):
        it.step()


def test_running_out_of_memory_in_a_step_for_nothing_does_not_end_the_engine() -> None:
    it = Ahead()
    gone = it.add(make_request("gone", tokens(20), 20))
    for _ in range(3):
        it.step()
    it.scheduler.finish(gone, FinishReason.ABORT)
    it.executor._queue[-1].exhausted = 3
    assert it.run_step() == (StepPlan(()), [])
    assert not it.has_work()
    other = it.add(make_request("other", tokens(20, seed=1), 20))
    it.run()
    assert_right(other)
    assert [name for plan in it.executor.plans for name in plan.finished] == ["gone"]


@pytest.mark.parametrize("others", [0, 1], ids=["collect", "launch"])
def test_running_out_of_memory_undoes_the_step_and_the_one_behind_it(others: int) -> None:
    """Steps of two rows run out of memory in `launch`, steps of one row in `collect`."""
    it = Ahead(budget=16)
    requests = [it.add(make_request(f"r{i}", tokens(10, seed=i), 12)) for i in range(1 + others)]
    for _ in range(4):
        it.step()
    it.executor.exhausted = [4]
    it.step()
    it.step()
    assert it.scheduler.pacer.limit == 1
    assert len(it.scheduler.running) == 1
    it.run()
    assert_right(*requests)
    assert it.scheduler.kv.pool.num_used == 0
