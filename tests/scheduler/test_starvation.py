"""The starvation bound that Scheduler states, checked over random loads.

Let S be the number of requests of a smaller rank that wait at some time while a request R waits. They were there when
R came, or came less than (levels between their priorities) x priority_step after it, or were preempted and returned to
the head of their class. All of them may be admitted before R.

Of all other requests at most max_passes x (1 + S) are admitted before R, whatever lets them pass: the fast lane, the
quota, a cache hit, or that they fit where R does not. Each counts against the first in the queue, which at most
max_passes requests ever pass, and while R waits the first is R or one of S. When R is the first and its passes are used
up, no other request is admitted, and R is admitted as soon as it fits: at the latest when all running requests have
ended.

In steps: each step computes at least one token of the requests that ran when R came, or of the S + max_passes x (1 + S)
others. So R waits for no more steps than these have tokens (prompts and max_tokens together), plus the tokens that
preemption makes them compute again.
"""

from __future__ import annotations

from random import Random

import pytest
from fakes import Harness, assert_right, make_request, tokens
from witness import Witness


def run_load(seed: int, max_passes: int) -> Witness:
    """Run a load whose requests, of all sizes and classes, arrive faster than they can be served for a while."""
    random = Random(seed)
    harness = Harness(
        random.randint(10, 30),
        budget=random.choice([16, 64, 200]),
        max_num_seqs=random.choice([1, 3, 8]),
        swap_blocks=random.choice([0, 20]),
        max_passes=max_passes,
        priority_step=7.0,
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
def test_no_request_is_passed_more_often_than_stated(max_passes: int) -> None:
    seen = [run_load(seed, max_passes) for seed in range(40)]
    assert max(witness.most_passes for witness in seen) == max_passes, "the bound of the first is reached"
    if max_passes:
        assert max(witness.tightest for witness in seen) >= 0.5, "the bound of all is not far from what happens"


def test_the_first_that_was_passed_often_enough_is_next() -> None:
    """No other request is admitted before it, even if it would fit, and it waits only for running requests."""
    harness = Harness(40, budget=256, headroom=0.0, max_passes=2, max_num_seqs=8, output_prediction="none")
    running = harness.add(make_request("running", tokens(300), 80, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(500, seed=1), 4, arrival=1.0))
    others = [harness.add(make_request(f"r{i}", tokens(10, seed=i + 2), 3, arrival=2.0 + i)) for i in range(20)]
    order: list[str] = []
    start = harness.scheduler.admission.start
    harness.scheduler.admission.start = lambda r, hit: (order.append(r.request_id), start(r, hit))[1]  # type: ignore
    harness.run()
    assert order[:3] == ["r0", "r1", "head"]
    assert running.num_preemptions == 0
    assert_right(running, head, *others)
