"""The bound that Scheduler states for those who wait, over random loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from fakes import Harness, assert_right, make_request, tokens

from llmsched.engine.request import Request

STEP = 7.0


@dataclass
class Wait:
    """What happened while a request waited: those of a smaller rank that waited too, and the others that passed it."""

    there_when_it_came: set[Request]
    ahead: set[Request] = field(default_factory=set)
    passed_by: list[Request] = field(default_factory=list)


class Witness:
    """Looks on while a scheduler admits; checks the bound at every admission."""

    def __init__(self, harness: Harness) -> None:
        self.scheduler = harness.scheduler
        self.max_passes = harness.scheduler.config.max_passes
        self.waits: dict[Request, Wait] = {}
        self.most_passes = 0
        self.tightest = 0.0
        start = self.scheduler.door.start

        def watched(request: Request, hit: Any) -> Any:
            self.see()
            self.admitted(request)
            return start(request, hit)

        self.scheduler.door.start = watched  # type: ignore[method-assign]

    def see(self) -> None:
        """Note who waits now, in front of whom."""
        queue = list(self.scheduler.waiting)
        for request in queue:
            if request not in self.waits:
                self.waits[request] = Wait(set(queue))
        for place, request in enumerate(queue):
            self.waits[request].ahead.update(queue[:place])

    def admitted(self, request: Request) -> None:
        queue = list(self.scheduler.waiting)
        for other in queue[: queue.index(request)]:
            self.waits[other].passed_by.append(request)
            self.check(other, self.waits[other])
        wait = self.waits.pop(request)
        self.check_those_ahead(request, wait)
        bound = self.max_passes * (1 + len(wait.ahead))
        self.tightest = max(self.tightest, len(wait.passed_by) / bound if bound else 0.0)
        self.most_passes = max(self.most_passes, request.num_passed)

    def check(self, request: Request, wait: Wait) -> None:
        assert len(wait.passed_by) <= self.max_passes * (1 + len(wait.ahead)), request.request_id
        assert request.num_passed <= self.max_passes

    def check_those_ahead(self, request: Request, wait: Wait) -> None:
        """Why each of them had a smaller rank."""
        if request.num_preemptions:
            return
        for other in wait.ahead - wait.there_when_it_came:
            levels = request.priority - other.priority
            assert other.num_preemptions or other.arrival_time < request.arrival_time + levels * STEP


def run_load(seed: int, max_passes: int) -> Witness:
    """Requests of all sizes and classes arrive faster than they can be served, for a while."""
    random = Random(seed)
    harness = Harness(
        random.randint(10, 30),
        budget=random.choice([16, 64, 200]),
        max_num_seqs=random.choice([1, 3, 8]),
        swap_slots=random.choice([0, 20]),
        max_passes=max_passes,
        priority_step=STEP,
        cache_bonus=random.choice([0.0, 5.0]),
        headroom=random.choice([0.0, 0.1]),
        output_prediction=random.choice(["none", "max_tokens", "learned"]),
        fast_lane_prompt=24,
        fast_lane_output=16,
    )
    witness = Witness(harness)
    shared, requests = tokens(80, seed=99), []
    while len(requests) < 60 or harness.scheduler.has_work():
        for _ in range(random.choice([0, 0, 1, 3]) if len(requests) < 60 else 0):
            length, output = random.choice([(8, 4), (20, 30), (60, 12), (130, 25)])
            prompt = shared[: random.choice([0, 0, 70])] + tokens(length, seed=len(requests))
            made = make_request(
                f"r{len(requests):02}",
                prompt[:130],
                random.randint(1, output),
                arrival=harness.time,
                priority=random.choice([0, 0, 1, 2]),
            )
            requests.append(harness.add(made))
            witness.see()
        if harness.scheduler.has_work():
            harness.step()
        else:
            harness.time += 1.0
    assert_right(*requests)
    assert not witness.waits
    return witness


@pytest.mark.parametrize("max_passes", [0, 1, 4])
def test_nobody_is_passed_more_often_than_stated(max_passes: int) -> None:
    seen = [run_load(seed, max_passes) for seed in range(40)]
    assert max(witness.most_passes for witness in seen) == max_passes, "the bound of the first is reached"
    if max_passes:
        assert max(witness.tightest for witness in seen) >= 0.5, "the bound of all is not far from what happens"


def test_the_first_that_was_passed_often_enough_is_next() -> None:
    """Whatever else would fit: nobody is admitted until it is, and it waits no longer than for those that run."""
    harness = Harness(40, budget=256, headroom=0.0, max_passes=2, max_num_seqs=8, output_prediction="none")
    running = harness.add(make_request("running", tokens(300), 80, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(500, seed=1), 4, arrival=1.0))
    others = [harness.add(make_request(f"r{i}", tokens(10, seed=i + 2), 3, arrival=2.0 + i)) for i in range(20)]
    order: list[str] = []
    start = harness.scheduler.door.start
    harness.scheduler.door.start = lambda r, hit: (order.append(r.request_id), start(r, hit))[1]  # type: ignore
    harness.run()
    assert order[:3] == ["r0", "r1", "head"]
    assert running.num_preemptions == 0
    assert_right(running, head, *others)
