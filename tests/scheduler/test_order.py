"""Order of admission: ranks, arrival quota, fast lane, classes."""

from __future__ import annotations

from itertools import islice

import pytest
from fakes import Harness, assert_right, make_request, tokens

from llmsched.engine.config import EngineConfig
from llmsched.engine.request import Request, RequestStatus
from llmsched.engine.scheduler.waiting_queue import WaitingQueue, initial_rank

CONFIG = EngineConfig()


def queue(*requests: Request) -> WaitingQueue:
    waiting = WaitingQueue(lambda: 0.0)
    for request in requests:
        request.rank = initial_rank(request, CONFIG)
        waiting.add(request, short=False)
    return waiting


def names(waiting: WaitingQueue, count: int = 99) -> list[str]:
    return [offer.request.request_id for offer in waiting.offers(count, lambda _: 0.0, 0.0)]


def test_a_priority_level_is_worth_its_waiting_and_no_more() -> None:
    waiting = queue(
        make_request("batch", [1], arrival=0, priority=1),
        make_request("soon", [1], arrival=9),
        make_request("late", [1], arrival=11),
    )
    assert names(waiting) == ["soon", "batch", "late"]


def take(waiting: WaitingQueue, count: int) -> list[str]:
    """Admit the next requests, considering `count` of them, and return their names."""
    taken = []
    for offer in islice(waiting.offers(count, lambda _: 0.0, 0.0), count):
        waiting.remove(offer.request)
        waiting.count_taken(offer)
        taken.append(offer.request.request_id)
    return taken


def test_a_part_of_the_places_goes_by_waiting_time_alone() -> None:
    cold = make_request("cold", [1], arrival=0, priority=5)
    waiting = queue(cold, *(make_request(f"hot{i:02}", [1], arrival=1 + i / 10) for i in range(20)))
    assert ["cold"] in [take(waiting, 1) for _ in range(4)]


def test_a_round_that_admits_many_gives_its_share_to_the_longest_waiting() -> None:
    cold = [make_request(f"cold{i:02}", [1], arrival=i / 10, priority=5) for i in range(10)]
    hot = [make_request(f"hot{i:02}", [1], arrival=1 + i / 10) for i in range(30)]
    assert sum(name.startswith("cold") for name in take(queue(*cold, *hot), 20)) == 6


def test_a_turn_that_is_not_taken_is_not_spent() -> None:
    hot = [make_request(f"hot{i}", [1], arrival=1.0) for i in range(5)]
    waiting = queue(make_request("cold", [1], priority=5), *hot)
    for _ in range(3):
        take(waiting, 1)
    assert names(waiting)[0] == "cold"
    assert names(waiting)[0] == "cold"


def test_cache_bonus_moves_only_those_that_are_near() -> None:
    waiting = queue(*(make_request(f"r{i}", [1], arrival=float(i)) for i in range(6)))
    offers = waiting.offers(9, lambda r: 2.5 if r.request_id in ("r2", "r5") else 0.0, 2.5)
    assert [offer.request.request_id for offer in offers] == ["r2", "r0", "r1", "r3", "r4", "r5"]


@pytest.mark.parametrize(("cached", "goes_first"), [(496, False), (512, True)])
def test_the_cache_bonus_is_for_hits_that_are_worth_it(cached: int, goes_first: bool) -> None:
    harness = Harness(200, budget=64, max_num_seqs=1, cache_bonus=5.0, fast_lane_share=0.0)
    harness.add(make_request("warm", tokens(cached), 0))
    harness.run()
    cold = harness.add(make_request("cold", tokens(700, seed=1), 1, arrival=harness.time))
    hot = harness.add(make_request("hot", [*tokens(cached), *tokens(200, seed=2)], 1, arrival=harness.time + 1))
    harness.step()
    assert (hot.status is RequestStatus.RUNNING) is goes_first
    assert (cold.status is RequestStatus.RUNNING) is not goes_first


def test_preempted_requests_come_before_their_class() -> None:
    waiting = queue(*(make_request(f"r{i}", [1], arrival=float(i)) for i in range(3)))
    victim = make_request("victim", [1], arrival=9)
    victim.rank = 9.0
    waiting.add_at_head_of_class(victim, short=False)
    assert names(waiting)[0] == "victim"


def first_steps(harness: Harness, *requests: Request) -> dict[str, int]:
    """Return the step in which each request computed its last prompt token."""
    steps: dict[str, int] = {}
    for step in range(1000):
        if not harness.scheduler.has_work():
            break
        harness.step()
        for request in requests:
            if request.num_output_tokens and request.request_id not in steps:
                steps[request.request_id] = step
    return steps


def test_fast_lane_lets_a_short_request_through_long_prefills() -> None:
    steps = {}
    for share in (0.0, 0.3):
        harness = Harness(600, budget=100, fast_lane_share=share)
        long = [harness.add(make_request(f"long{i}", tokens(2000, seed=i), 1, arrival=float(i))) for i in range(3)]
        short = harness.add(make_request("short", tokens(16, seed=9), 1, arrival=3.0))
        steps[share] = first_steps(harness, short)["short"]
        assert_right(short, *long)
    assert steps[0.3] == 0
    assert steps[0.0] >= 59


def test_fast_lane_takes_only_its_share_and_leaves_the_rest() -> None:
    harness = Harness(600, budget=100, fast_lane_share=0.3, max_num_seqs=64)
    long = harness.add(make_request("long", tokens(1000), 1, arrival=0.0))
    short = [harness.add(make_request(f"s{i}", tokens(60, seed=i + 1), 1, arrival=1.0)) for i in range(8)]
    harness.step()
    assert long.num_computed_tokens == 70
    assert sum(r.num_computed_tokens for r in short) == 30
    harness.run()
    assert_right(long, *short)


def test_prefills_of_several_steps_share_the_lane() -> None:
    """Together they get no more than the lane; the more urgent one gets it first."""
    harness = Harness(600, budget=100, fast_lane_share=0.3, fast_lane_prompt=80)
    long = harness.add(make_request("long", tokens(2000), 1, arrival=0.0))
    later, first = (
        harness.add(make_request(f"s{i}", tokens(70, seed=i + 1), 2, arrival=1.0, priority=1 - i)) for i in range(2)
    )
    for step, computed in enumerate([(30, 0), (60, 0), (70, 20)]):
        harness.step()
        assert (first.num_computed_tokens, later.num_computed_tokens) == computed
        assert long.num_computed_tokens == 70 * (step + 1)
    harness.run()
    assert_right(long, later, first)


def test_fast_lane_takes_only_its_share_of_scarce_places() -> None:
    harness = Harness(600, budget=100, fast_lane_share=0.3, fast_lane_prompt=20, max_num_seqs=2, max_passes=1000)
    long = [harness.add(make_request(f"l{i:02}", tokens(30, seed=i), 1, arrival=float(i))) for i in range(14)]
    short = [harness.add(make_request(f"s{i:02}", tokens(10, seed=50 + i), 1, arrival=99.0)) for i in range(50)]
    while any(request.status is not RequestStatus.FINISHED for request in long):
        harness.step()
    taken = sum(request.first_scheduled_time is not None for request in short)
    assert 5 <= taken <= 7, "3 of 10 places"
    harness.run()
    assert_right(*long, *short)


def test_a_burst_does_not_close_the_fast_lane_for_later_requests() -> None:
    """Places that the lane took in an earlier burst do not count once no request waits."""
    harness = Harness(600, budget=100, fast_lane_share=0.3, fast_lane_prompt=20, max_num_seqs=1)
    burst = [harness.add(make_request(f"b{i}", tokens(length, seed=i), 1)) for i, length in enumerate((30, 10))]
    harness.run()
    long = [harness.add(make_request(f"l{i}", tokens(250, seed=9 + i), 1, arrival=1.0 + i)) for i in range(2)]
    harness.step()
    short = harness.add(make_request("short", tokens(10, seed=12), 1, arrival=3.0))
    steps = first_steps(harness, *long, short)
    assert steps["l0"] < steps["short"] < steps["l1"]
    assert_right(*burst, *long, short)


def test_fast_lane_takes_the_places_that_no_other_request_can() -> None:
    harness = Harness(30, budget=100, headroom=0.0, max_num_seqs=2, max_passes=1000, output_prediction="none")
    running = harness.add(make_request("running", tokens(300), 100, arrival=0.0))
    for _ in range(5):
        harness.step()
    large = [harness.add(make_request(f"l{i:02}", tokens(400, seed=i + 1), 1, arrival=1.0)) for i in range(20)]
    short = [harness.add(make_request(f"s{i:02}", tokens(10, seed=50 + i), 1, arrival=2.0)) for i in range(40)]
    for _ in range(50):
        harness.step()
    assert sum(request.status is RequestStatus.FINISHED for request in short) >= 20, "they fit beside what runs"
    harness.run()
    assert_right(running, *large, *short)


def test_one_that_does_not_fit_does_not_close_the_fast_lane() -> None:
    harness = Harness(30, budget=400, headroom=0.0, max_num_seqs=2, output_prediction="max_tokens")
    running = harness.add(make_request("running", tokens(280), 60, arrival=0.0))
    harness.step()
    large = [harness.add(make_request(f"l{i:02}", tokens(400, seed=i + 1), 1, arrival=1.0)) for i in range(12)]
    blocked = harness.add(make_request("short1", tokens(250, seed=53), 1, arrival=2.0))
    fits = harness.add(make_request("short2", tokens(10, seed=54), 4, arrival=3.0))
    harness.step()
    assert (blocked.status, fits.status) == (RequestStatus.WAITING, RequestStatus.RUNNING)
    harness.run()
    assert_right(running, *large, blocked, fits)


def test_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    harness = Harness(64, max_num_seqs=1)
    low = harness.add(make_request("low", tokens(20), 40, arrival=0.0, priority=1))
    for _ in range(5):
        harness.step()
    high = harness.add(make_request("high", tokens(20, seed=1), 4, arrival=5.0))
    done = first_steps(harness, high, low)
    assert done["high"] <= 2
    assert low.num_preemptions == 1
    assert_right(low, high)


def test_a_class_takes_no_place_of_a_request_that_was_preempted_twice() -> None:
    harness = Harness(64, max_num_seqs=1)
    low = harness.add(make_request("low", tokens(20), 40, arrival=0.0, priority=1))
    for i in range(4):
        for _ in range(5):
            harness.step()
        harness.add(make_request(f"high{i}", tokens(20, seed=i + 1), 1, arrival=1.0))
    harness.run()
    assert low.num_preemptions == 2
    assert_right(low)


def test_a_cold_request_is_served_among_hot_ones_that_keep_coming() -> None:
    harness = Harness(200, budget=256, max_num_seqs=2, cache_bonus=20.0)
    shared = tokens(600)
    harness.add(make_request("warm", shared, 1))
    harness.run()
    cold = harness.add(make_request("cold", tokens(600, seed=7), 4, arrival=harness.time))
    admitted = 0
    while cold.status is RequestStatus.WAITING:
        while len(harness.scheduler.waiting) < 8:
            admitted += 1
            harness.add(make_request(f"hot{admitted:03}", [*shared, admitted], 2, arrival=harness.time))
        harness.step()
    assert cold.num_passed <= harness.scheduler.config.max_passes


def test_an_idle_engine_may_wait_for_a_batch() -> None:
    harness = Harness(64, schedule_window=2.0, min_schedule_batch=3)
    harness.add(make_request("a", tokens(20), 4, arrival=0.0))
    assert harness.scheduler.idle_until() == 2.0
    harness.time = 2.0
    assert harness.scheduler.idle_until() is None
    harness.run()
    harness.time = 10.0
    for i in range(3):
        harness.add(make_request(f"b{i}", tokens(20, seed=i), 4, arrival=10.0))
    assert harness.scheduler.idle_until() is None


def test_a_lone_short_request_gets_the_whole_step() -> None:
    harness = Harness(64, budget=100)
    short = harness.add(make_request("short", tokens(90), 2, arrival=0.0))
    harness.step()
    assert short.num_computed_tokens == 90


@pytest.mark.parametrize(
    ("policy", "arrival", "preemptions"),
    [("fair", 1.0, 1), ("fair", 1000.0, 0), ("serial", 1.0, 0), ("fcfs", 1.0, 0), ("sptf", 1.0, 0)],
)
def test_a_class_is_worth_only_its_waiting_and_nothing_to_baselines(
    policy: str, arrival: float, preemptions: int
) -> None:
    harness = Harness(64, max_num_seqs=1, scheduling_policy=policy)
    low = harness.add(make_request("low", tokens(20), 40, arrival=0.0, priority=1))
    harness.step()
    harness.add(make_request("high", tokens(20, seed=1), 4, arrival=arrival))
    harness.run()
    assert low.num_preemptions == preemptions
    assert harness.scheduler.counters.num_headroom_changes == 0, "preemption by class is no thrash"


@pytest.mark.parametrize(("priority", "preemptions"), [(1, 1), (0, 0)])
def test_with_priority_step_0_a_class_takes_places_of_later_arrivals(priority: int, preemptions: int) -> None:
    """With priority_step 0 a request of a lower class loses its place only to one that arrived before it."""
    harness = Harness(64, max_num_seqs=1, priority_step=0.0)
    low = harness.add(make_request("low", tokens(20), 40, arrival=2.0, priority=priority))
    harness.step()
    high = harness.add(make_request("high", tokens(20, seed=1), 4, arrival=1.0))
    later = harness.add(make_request("later", tokens(20, seed=2), 4, arrival=3.0))
    harness.run()
    assert (low.num_preemptions, high.num_preemptions, later.num_preemptions) == (preemptions, 0, 0)
    assert_right(low, high, later)


def test_first_come_is_first_served_whatever_its_class() -> None:
    """This holds when memory runs out, too: the baseline preempts the last request, not the lowest class."""
    harness = Harness(12, max_num_seqs=2, output_prediction="none", scheduling_policy="fcfs")
    low = harness.add(make_request("low", tokens(30), 90, arrival=0.0, priority=3))
    high = [harness.add(make_request(f"high{i}", tokens(30, seed=i + 1), 90, arrival=1.0 + i)) for i in range(2)]
    harness.run()
    assert_right(low, *high)
    assert low.num_preemptions == 0
    assert [r.num_preemptions for r in high] == [1, 0]
    waiting = Harness(64, max_num_seqs=1, scheduling_policy="fcfs")
    first, second = (
        waiting.add(make_request(n, tokens(20, seed=i), 4, arrival=float(i), priority=1 - i))
        for i, n in enumerate(("first", "second"))
    )
    waiting.step()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


def test_a_long_prompt_that_is_cached_is_a_short_one() -> None:
    harness = Harness(300, budget=100)
    shared = tokens(1600)
    harness.add(make_request("warm", shared, 1))
    harness.run()
    long = [harness.add(make_request(f"long{i}", tokens(1500, seed=i + 1), 1, arrival=harness.time)) for i in range(2)]
    cached = harness.add(make_request("cached", [*shared, 5], 1, arrival=harness.time + 1))
    assert first_steps(harness, cached)["cached"] == 0
    assert_right(*long, cached)


def test_admission_leaves_the_headroom() -> None:
    harness = Harness(20, budget=400, headroom=0.5, max_headroom=0.5, output_prediction="none")
    harness.add(make_request("running", tokens(60), 40, arrival=0.0))
    harness.step()
    large = harness.add(make_request("large", tokens(120, seed=1), 8, arrival=1.0))
    small = harness.add(make_request("small", tokens(90, seed=2), 2, arrival=2.0))
    harness.step()
    assert large.status is RequestStatus.WAITING, "8 of 16 blocks would leave less than 10"
    assert small.status is RequestStatus.RUNNING, "6 of 16 blocks leave 10"


def test_no_more_run_than_max_num_seqs_in_either_lane() -> None:
    harness = Harness(200, budget=400, max_num_seqs=2)
    for i in range(6):
        harness.add(make_request(f"r{i}", tokens(10, seed=i), 5, arrival=float(i)))
    while harness.scheduler.has_work():
        harness.step()
        assert len(harness.scheduler.running) <= 2


def test_thrash_is_noticed_and_answered() -> None:
    harness = Harness(24, budget=256, max_num_seqs=16, headroom=0.0, output_prediction="none", fast_lane_share=0.0)
    requests = [harness.add(make_request(f"r{i:02}", tokens(20, seed=i), 90, arrival=float(i))) for i in range(60)]
    harness.run()
    assert_right(*requests)
    assert harness.scheduler.counters.num_headroom_changes > 0
    late = sum(request.num_preemptions for request in requests[40:])
    early = sum(request.num_preemptions for request in requests[:20])
    assert late < early


def test_a_request_that_was_preempted_twice_is_left_alone() -> None:
    harness = Harness(64, budget=256)
    requests = [harness.add(make_request(f"r{i}", tokens(20 + i, seed=i), 9, arrival=float(i))) for i in range(4)]
    harness.step()
    requests[3].num_preemptions = requests[2].num_preemptions = 2
    choose = harness.scheduler.preemption.choose_victim
    assert choose(harness.scheduler.running) is requests[1]
    requests[1].num_preemptions = 2
    assert choose(harness.scheduler.running) is requests[3], "all are safe: the last in the queue"
    for request in requests:
        request.num_preemptions = 0
    requests[2].priority = 1
    assert choose(harness.scheduler.running) is requests[2], "the lowest class first"


def test_the_first_in_the_queue_is_never_preempted() -> None:
    harness = Harness(64, budget=256)
    first = harness.add(make_request("first", tokens(20), 9, arrival=0.0, priority=0))
    other = harness.add(make_request("other", tokens(400, seed=1), 9, arrival=1.0))
    for _ in range(3):
        harness.step()
    other.num_preemptions = 9
    assert harness.scheduler.preemption.choose_victim([other, first]) is other
