"""Parts of the scheduler on their own: prediction, peak forecast, pacing, ledger, baselines."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from configs import resolved
from fakes import Harness, assert_right, make_request, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.executor.base import ObservedExecutor, StepPlan, StepResult
from llmsched.engine.executor.cost import StepShape, StepTimeModel
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.ledger import MAX_ENTRIES, MAX_REQUESTS, Ledger
from llmsched.engine.scheduler.prediction import (
    MAX_PRIORITIES,
    MIN_SAMPLES,
    WINDOW,
    OutputPredictor,
    expected_peak,
    future_peak,
    saturating_peak,
)
from llmsched.engine.scheduler.token_budget import LEAST_PREFILL, WARN_AFTER, Pacer


class Growth(NamedTuple):
    """Sequence that holds `held` tokens now and will add `remaining`."""

    held: int
    remaining: int


def simulated_peak(growths: list[Growth]) -> int:
    """Return the peak token by token: all grow together, and each ends when it has added its remaining tokens."""
    peak = 0
    for step in range(max(g.remaining for g in growths) + 1):
        peak = max(peak, sum(g.held + step for g in growths if g.remaining >= step))
    return peak


@pytest.mark.parametrize(
    "growths",
    [
        [Growth(10, 5)],
        [Growth(10, 5), Growth(3, 9), Growth(7, 1)],
        [Growth(100, 1), Growth(1, 100)],
        [Growth(4, 4)] * 5,
        [Growth(i * 7 % 13, i * 5 % 11) for i in range(20)],
    ],
)
def test_peak_is_what_a_token_by_token_simulation_gives(growths: list[Growth]) -> None:
    assert future_peak(*np.array(growths).T) == simulated_peak(growths)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=12),
    st.sampled_from([KVLayout(4), KVLayout(4, 1, 1, 9), KVLayout(4, 2, 3, 30)]),
)
def test_peak_with_windows_is_what_a_token_by_token_simulation_gives(
    drawn: list[tuple[int, int]], layout: KVLayout
) -> None:
    growths = [Growth(*each) for each in drawn]
    most = 0
    for step in range(max(g.remaining for g in growths) + 1):
        held = np.array([g.held + step for g in growths if g.remaining >= step])
        most = max(most, int(layout.room(held).sum()))
    held, remaining = np.array(growths).T
    assert saturating_peak(held, remaining, layout) == most
    if layout.num_groups == 1:
        assert saturating_peak(held, remaining, layout) == future_peak(held, remaining)


def test_windows_let_more_in_where_lengths_are_predicted() -> None:
    """With two groups, of which one keeps 3 blocks, requests that grow to 10 blocks need 13 each, not 20."""
    for layout, blocks in ((KVLayout(16, 1, 1, 20), 20 * (10 + 3)), (KVLayout(16, 2), 20 * 2 * 10)):
        harness = Harness(
            blocks, budget=400, max_num_seqs=40, headroom=0.0, output_prediction="max_tokens", layout=layout
        )
        for i in range(40):
            harness.add(make_request(f"r{i:02}", tokens(20, seed=i), 140))
        most = 0
        while harness.scheduler.has_work():
            harness.step()
            most = max(most, len(harness.scheduler.running))
        assert most == 20
        assert harness.scheduler.counters.num_preemptions == 0


def test_one_that_runs_is_predicted_to_hold_no_more_of_a_window_than_it_ever_will() -> None:
    layout = KVLayout(16, 1, 2, 20)
    harness = Harness(
        2 * layout.num_blocks(319), budget=400, headroom=0.0, output_prediction="max_tokens", layout=layout
    )
    first = harness.add(make_request("first", tokens(300), 20))
    while first.num_output_tokens == 0:
        harness.step()
    second = harness.add(make_request("second", tokens(300, seed=1), 20, arrival=harness.time))
    harness.step()
    assert second.status is RequestStatus.RUNNING
    harness.run()
    assert_right(first, second)
    assert harness.scheduler.counters.num_preemptions == 0


def test_pinned_blocks_are_nobodys_to_grow_into_and_shared_ones_count_once() -> None:
    knobs = {"budget": 400, "headroom": 0.0, "output_prediction": "max_tokens", "fast_lane_share": 0.0}
    pinned = Harness(40, max_pinned_blocks=20, **knobs)
    pinned.scheduler.kv.pins.pin(tokens(160), "", None, 0.0)
    pinned.add(make_request("writes", tokens(160), 0))
    pinned.run()
    assert pinned.scheduler.kv.pins.num_blocks == 10
    three = [pinned.add(make_request(f"r{i}", tokens(100, seed=i + 1), 100, arrival=1.0)) for i in range(3)]
    pinned.step()
    assert sum(request.status is RequestStatus.RUNNING for request in three) == 2, "13 blocks each beside 10"
    pinned.run()
    assert pinned.scheduler.counters.num_preemptions == 0
    shared = Harness(20, **knobs)
    pair = [shared.add(make_request(f"s{i}", [*tokens(160), i], 30, arrival=float(i))) for i in range(2)]
    shared.step()
    shared.step()
    assert {request.status for request in pair} == {RequestStatus.RUNNING}, "10 blocks together, 2 each"
    shared.run()
    assert shared.scheduler.counters.num_preemptions == 0
    assert_right(*three, *pair)


def test_what_a_chunk_gives_back_lets_others_in_though_nobody_has_come_or_gone() -> None:
    """The first chunk takes 13 blocks in the window group; the second needs 10 and keeps three behind it."""
    knobs = {"headroom": 0.0, "output_prediction": "none", "fast_lane_share": 0.0}
    harness = Harness(20 + 13, budget=200, layout=KVLayout(16, 1, 1, 20), **knobs)
    long = harness.add(make_request("long", tokens(310), 8))
    short = harness.add(make_request("short", tokens(64, seed=1), 4))
    harness.step()
    harness.step()
    assert (long.num_output_tokens, short.status) == (1, RequestStatus.WAITING)
    assert harness.executor.plans[-1].num_tokens < 200, "it was offered a place, and did not fit"
    harness.step()
    assert (long.status, short.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)
    harness.run()
    assert_right(long, short)


def ended(length: int, max_tokens: int = 1000, priority: int = 0) -> Request:
    request = make_request("r", [1] * 4, max_tokens, priority=priority)
    request.sampling = type(request.sampling)(max_tokens=max_tokens)
    request.token_ids += [1] * length
    request.finish_reason = FinishReason.STOP
    return request


def test_prediction_is_a_quantile_of_those_that_got_as_far() -> None:
    predictor = OutputPredictor("learned")
    fresh = ended(0)
    assert predictor.remaining(fresh) == 1000, "nothing learned yet: max_tokens"
    for length in range(1, 101):
        predictor.learn(ended(length))
    assert predictor.remaining(fresh) == 65
    assert predictor.remaining(ended(60)) == 86 - 60
    assert predictor.remaining(ended(200)) == 800, "longer than all seen: max_tokens"
    assert predictor.remaining(ended(0, max_tokens=30)) == 30


def test_survival_is_the_share_of_those_that_got_further() -> None:
    predictor = OutputPredictor("learned")
    for length in range(1, 101):
        predictor.learn(ended(length))
    steps = np.array([1, 10, 40, 41])
    alive = predictor.outlook([ended(0), ended(60), ended(60, max_tokens=70)]).survival(steps)
    assert alive[0] == pytest.approx([1.0, 0.91, 0.61, 0.6])
    assert alive[1] == pytest.approx([1.0, 31 / 40, 1 / 40, 0.0])
    assert alive[2] == pytest.approx([1.0, 31 / 40, 0.0, 0.0])


def test_expected_peak_is_the_certain_one_where_nothing_is_uncertain() -> None:
    held, remaining = np.array([10, 3, 7]), np.array([5, 9, 1])
    steps = np.arange(1, 10)
    alive = (steps <= remaining[:, None]).astype(float)
    assert expected_peak(held, alive, steps, KVLayout(16)) == future_peak(held, remaining)
    assert expected_peak(held, alive * 0.5, steps, KVLayout(16)) < future_peak(held, remaining)


def test_expected_peak_leaves_room_for_chance() -> None:
    """A hundred requests hold ten blocks each with probability one half: the peak is the mean plus a deviation."""
    held, steps = np.full(100, 159), np.array([1])
    alive = np.full((100, 1), 0.5)
    assert expected_peak(held, alive, steps, KVLayout(16)) == pytest.approx(160 * (50 + 5))


def test_what_is_learned_is_the_latest_and_of_those_that_ended_by_themselves() -> None:
    predictor = OutputPredictor("learned")
    ignoring = make_request("r", [1] * 4, 1000)
    ignoring.token_ids += [1] * 9
    ignoring.finish_reason = FinishReason.LENGTH
    for _ in range(WINDOW):
        predictor.learn(ignoring)
    assert predictor.remaining(ended(0)) == 1000, "they would have gone on for ever"
    for length in [500] * WINDOW + [20] * WINDOW:
        predictor.learn(ended(length))
    assert predictor.remaining(ended(0)) == 20
    assert predictor.remaining(ended(20)) == 980, "the others are forgotten"


def test_lengths_are_kept_for_the_latest_priorities() -> None:
    predictor = OutputPredictor("learned")
    kept = 10
    for priority in range(MAX_PRIORITIES + 5):
        for _ in range(MIN_SAMPLES):
            predictor.learn(ended(20, priority=priority))
            predictor.learn(ended(20, priority=kept))
    known = [p for p in range(MAX_PRIORITIES + 5) if predictor.remaining(ended(0, priority=p)) == 20]
    assert known == [*range(5, MAX_PRIORITIES + 5)]


def test_the_scheduler_learns_from_those_that_end() -> None:
    harness = Harness(64, budget=256)
    for i in range(MIN_SAMPLES):
        request = harness.add(make_request(f"r{i:02}", tokens(10, seed=i), 9, arrival=float(i)))
        request.sampling = replace(request.sampling, ignore_eos=False)
    harness.run()
    request.sampling = replace(request.sampling, max_tokens=500)
    request.token_ids = request.token_ids[: request.num_prompt_tokens]
    assert harness.scheduler.predictor.remaining(request) == 9


@pytest.mark.parametrize(("length", "count"), [(5, MIN_SAMPLES - 1), (0, MIN_SAMPLES)])
def test_prediction_needs_enough_samples_with_output(length: int, count: int) -> None:
    predictor = OutputPredictor("learned")
    for _ in range(count):
        predictor.learn(ended(length))
    assert predictor.remaining(ended(0)) == 1000


def test_step_time_model_finds_the_coefficients() -> None:
    model = StepTimeModel()
    for i in range(60):
        shape = StepShape(i * 37 % 500, i * 11 % 64, i * 977 % 20000)
        model.learn(shape, 0.004 + 20e-6 * shape.prefill_tokens + 50e-6 * shape.decode_seqs + 1e-7 * shape.kv_tokens)
    assert model.predict(StepShape(256, 32, 5000)) == pytest.approx(0.004 + 0.00512 + 0.0016 + 0.0005, rel=0.02)
    assert model.prefill_tokens_within(0.010, 32, 5000) == pytest.approx(195, abs=6)


def seconds(shape: StepShape, decode: float = 1.0) -> float:
    """Return the time of a step. `decode` multiplies the part that does not depend on prefill tokens."""
    return decode * (0.012 + 1e-4 * shape.decode_seqs + 2e-7 * shape.kv_tokens) + 4e-5 * shape.prefill_tokens


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64), st.integers(100, 2000))
def test_step_time_model_remembers_prefills_during_decodes(seed: int, most_seqs: int, most_context: int) -> None:
    model, random = StepTimeModel(), Random(seed)
    whole = StepShape(2048, most_seqs, most_seqs * most_context // 2)

    def learn(count: int, prefills: tuple[int, ...], decode: float = 1.0) -> None:
        for _ in range(count):
            seqs = random.randint(1, most_seqs)
            shape = StepShape(random.choice(prefills), seqs, seqs * random.randint(100, most_context))
            model.learn(shape, seconds(shape, decode) * random.uniform(0.9, 1.1))

    learn(300, (0, 0, 16, 200, 512, 2048))
    before = model.predict(whole)
    assert before == pytest.approx(seconds(whole), rel=0.1)
    learn(10_000, (0,))
    assert model.predict(whole) == pytest.approx(before, rel=0.1)
    learn(800, (0,), decode=2.0)
    decodes = StepShape(0, most_seqs, most_seqs * most_context // 2)
    assert model.predict(decodes) == pytest.approx(seconds(decodes, 2.0), rel=0.1)
    learn(800, (0, 512, 2048))
    assert model.predict(whole) == pytest.approx(seconds(whole), rel=0.1)


def test_pacer_sizes_steps_only_with_a_target_a_model_and_decodes() -> None:
    request = make_request("r", [1] * 100)
    pacer = Pacer(resolved(target_itl=0.010))
    assert pacer.next_budget([request], [], 1) == 2048, "not trusted yet"
    for i in range(32):
        pacer.model.learn(StepShape(i * 13 % 300, 1, 100), 0.004 + 20e-6 * (i * 13 % 300))
    assert pacer.next_budget([request], [], 1) == pytest.approx(300, abs=10)
    assert pacer.next_budget([], [request], 0) == 2048, "nobody waits for a next token"
    tight = Pacer(resolved(target_itl=0.001))
    tight.model = pacer.model
    assert tight.next_budget([request], [], 1) == tight.step_budget == 1 + LEAST_PREFILL


def test_a_target_that_decodes_alone_miss_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    request, pacer = make_request("r", [1] * 100), Pacer(resolved(target_itl=0.006))
    for i in range(32):
        pacer.model.learn(StepShape(i * 13 % 300, 1 + i % 8, 100), 0.004 + 20e-6 * (i * 13 % 300) + 1e-3 * (1 + i % 8))
    for _ in range(4 * WARN_AFTER):
        pacer.next_budget([request], [], 1)
    assert not caplog.records
    for steps in (WARN_AFTER - 1, 1, WARN_AFTER, WARN_AFTER):
        for _ in range(steps):
            pacer.next_budget([request] * 8, [], 1)
        pacer.next_budget([request], [], 1)
    (record,) = caplog.records
    assert "target_itl 6 ms is missed by decodes alone (8 of them)" in record.getMessage()


def test_ledger_merges_what_repeats_and_forgets_the_oldest() -> None:
    time = 0.0
    ledger = Ledger(lambda: time)
    for step in range(10):
        time = float(step)
        ledger.note("a", "does not fit", missing_blocks=10 - step)
    (entry,) = ledger.entries("a")
    assert (entry.time, entry.until, entry.count, entry.details) == (0.0, 9.0, 10, {"missing_blocks": 1})
    for i in range(2 * MAX_ENTRIES):
        ledger.note("a", str(i % 2))
    assert len(ledger.entries("a")) == MAX_ENTRIES
    ledger.note("a", "finished")
    assert (len(ledger.entries("a")), ledger.entries("a")[-1].what) == (MAX_ENTRIES, "finished")
    for i in range(2 * MAX_REQUESTS):
        ledger.note(f"r{i}", "queued")
    assert ledger.entries("a"), "nobody has ended"
    ledger.end("a")
    for i in range(MAX_REQUESTS):
        ledger.end(f"r{i}")
    assert ledger.entries("a") == []
    assert ledger.entries("r1")


@pytest.mark.parametrize("policy", ["fcfs", "sptf", "serial", "static", "fair"])
def test_every_policy_gives_the_right_tokens(policy: str) -> None:
    harness = Harness(40, budget=64, max_num_seqs=4, scheduling_policy=policy, max_model_len=160)
    requests = [
        harness.add(make_request(f"r{i:02}", tokens(10 + 13 * i % 90, seed=i), 5 + 7 * i % 60, arrival=float(i)))
        for i in range(16)
    ]
    harness.run()
    assert_right(*requests)


def test_serial_runs_one_at_a_time_and_sptf_the_shortest_first() -> None:
    harness = Harness(64, scheduling_policy="serial")
    for i in range(3):
        harness.add(make_request(f"r{i}", tokens(10, seed=i), 4, arrival=float(i)))
    while harness.scheduler.has_work():
        harness.step()
        assert len(harness.scheduler.running) <= 1
    harness = Harness(64, max_num_seqs=1, scheduling_policy="sptf")
    long = harness.add(make_request("long", tokens(100), 50, arrival=0.0))
    short = harness.add(make_request("short", tokens(10, seed=1), 4, arrival=1.0))
    harness.step()
    assert (short.status, long.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


def test_static_batch_lives_until_its_longest_member_ends_and_reserves_for_the_maximum() -> None:
    harness = Harness(40, budget=256, max_num_seqs=4, scheduling_policy="static", max_model_len=160)
    short = harness.add(make_request("short", tokens(10), 2, arrival=0.0))
    long = harness.add(make_request("long", tokens(10, seed=1), 30, arrival=1.0))
    late = harness.add(make_request("late", tokens(10, seed=2), 2, arrival=2.0))
    other = harness.add(make_request("other", tokens(10, seed=3), 2, arrival=3.0))
    after = harness.add(make_request("after", tokens(10, seed=4), 2, arrival=4.0))
    harness.step()
    assert harness.scheduler.kv.pool.num_used == 40
    while long.status is not RequestStatus.FINISHED:
        assert after.status is RequestStatus.WAITING
        harness.step()
    harness.run()
    assert_right(short, long, late, other, after)
    assert harness.scheduler.kv.pool.num_used == 0


def test_a_static_batch_of_one_that_needs_the_whole_pool() -> None:
    """No block is left to reserve beside its window groups, and none of its blocks are taken away."""
    layout = KVLayout(16, 1, 2, 40)
    harness = Harness(layout.num_blocks(160), 400, 2, scheduling_policy="static", max_model_len=160, layout=layout)
    requests = [harness.add(make_request(f"r{i}", tokens(145, seed=i), 15)) for i in range(2)]
    harness.run()
    assert_right(*requests)
    assert harness.scheduler.kv.pool.num_used == 0


def test_a_member_of_a_static_batch_that_fails_amid_a_chunk_keeps_nothing_that_others_count_on() -> None:
    """During its chunk it holds more blocks in window groups than the batch reserved for it."""
    layout = KVLayout(16, 1, 2, 40)
    blocks = 2 * layout.num_blocks(160)
    harness = Harness(blocks, 400, 2, scheduling_policy="static", max_model_len=160, layout=layout)
    failing = harness.add(make_request("failing", tokens(120), 8))
    other = harness.add(make_request("other", tokens(5, seed=1), 150))
    held = 0

    def fails(plan: StepPlan, result: StepResult) -> None:
        nonlocal held
        for row, found in zip(plan.rows, result.rows, strict=True):
            if row.sequence is failing and row.sample:
                held, found.error = failing.table.num_blocks, "not a number"

    harness.executor = ObservedExecutor(harness.executor, fails)  # type: ignore[assignment]
    harness.run()
    assert held > layout.num_blocks(160)
    assert failing.finish_reason is FinishReason.ERROR
    assert_right(other)
    assert harness.scheduler.kv.pool.num_used == 0
