"""Deadlines: predicted first tokens against simulated ones, and which requests are given up."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import pytest
from configs import resolved
from fakes import make_request
from simulated_run import LinearCost

from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.scheduler.baselines import make_scheduler
from llmsched.engine.scheduler.deadlines import Deadlines

#: A step takes 20 ms, a prompt of 256 tokens a second, and each decoding request adds 7 ms.
SLOW = LinearCost(0.02, 4e-3, 7e-3, 0.0)


class Device:
    """Simulated device that has computed enough steps for its step times to be known."""

    def __init__(self, num_blocks: int = 2000, **knobs: Any) -> None:
        self.clock = VirtualClock()
        config = resolved(**{"max_num_batched_tokens": 256, "max_num_seqs": 4, "output_prediction": "none"} | knobs)
        self.scheduler = make_scheduler(KVManager(num_blocks, KVLayout(16)), config, self.clock)
        self.deadlines = Deadlines(self.scheduler, self.clock)
        self._executor = SimulatedExecutor(SLOW, self.clock)
        for count in (200, 17, 90):
            self.add(f"early{count}", length=count, max_tokens=6)
        while self.scheduler.has_work():
            self.step()

    def add(self, name: str, *, length: int, max_tokens: int, **more: Any) -> Request:
        request = self.make(name, length, max_tokens, **more)
        self.scheduler.add(request)
        self.deadlines.watch(request)
        return request

    def make(
        self, name: str, length: int, max_tokens: int, allowed: float = math.inf, ignores_eos: bool = False
    ) -> Request:
        now = self.clock()
        tokens = [1 + zlib.crc32(name.encode()) % 1000] * length
        request = make_request(name, tokens, max_tokens, arrival=now, deadline=now + allowed)
        request.sampling = replace(request.sampling, ignore_eos=ignores_eos)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.advance(plan)
        result = self._executor.execute(plan)
        for row, found in zip(plan.rows, result.rows, strict=True):
            found.more = [RowResult(token_id=found.token_id) for _ in row.draft]  # a request's tokens are all the same
        self.scheduler.settle(plan, result)
        self.scheduler.check_integrity()

    def run_until_first_token(self, request: Request) -> float:
        """Return the seconds until the request, which is queued now, has its first token."""
        start = self.clock()
        while not request.num_output_tokens:
            self.step()
        return self.clock() - start


LOADS: dict[str, tuple[dict[str, Any], list[tuple[int, int]], int]] = {
    "nothing else": ({}, [], 300),
    "a place is free, long prompts go first": ({"max_num_seqs": 8}, [(500, 20)] * 3, 300),
    "all places are taken": ({}, [(30, 60), (30, 80), (30, 100), (30, 120)], 300),
    "others wait for places too": ({}, [(30, 20 + 20 * i) for i in range(10)], 300),
    "memory is short": ({"num_blocks": 60, "headroom": 0.0, "max_num_seqs": 8}, [(400, 40), (400, 60)], 350),
    "a short request behind long prompts": ({"max_num_seqs": 8}, [(900, 20)] * 3, 20),
}


@pytest.mark.parametrize(("knobs", "load", "length"), LOADS.values(), ids=LOADS.keys())
def test_predicted_first_token(knobs: dict[str, Any], load: list[tuple[int, int]], length: int) -> None:
    device = Device(**knobs)
    for index, (prompt, output) in enumerate(load):
        device.add(f"other{index}", length=prompt, max_tokens=output)
    for _ in range(2):
        if load:
            device.step()
    predicted = device.deadlines.seconds_to_first_token([device.make("new", length, 20)])
    assert predicted is not None
    actual = device.run_until_first_token(device.add("new", length=length, max_tokens=20))
    assert actual / 2 < predicted < 1.6 * actual


def test_prompts_of_one_request_are_computed_one_after_the_other() -> None:
    device = Device()
    one, three = ([device.make(f"new{i}", 250, 5) for i in range(count)] for count in (1, 3))
    first, last = device.deadlines.seconds_to_first_token(one), device.deadlines.seconds_to_first_token(three)
    assert first is not None
    assert last == pytest.approx(3 * first, rel=0.1)


def test_nothing_is_predicted_before_step_times_are_known() -> None:
    scheduler = make_scheduler(KVManager(100, KVLayout(16)), resolved(), VirtualClock())
    deadlines = Deadlines(scheduler, VirtualClock())
    assert deadlines.seconds_to_first_token([make_request("new", [1] * 20)]) is None


def test_a_passed_deadline_is_hopeless_in_every_state() -> None:
    device = Device(max_num_seqs=1)
    running = device.add("running", length=40, max_tokens=50, allowed=0.5)
    waiting = device.add("waiting", length=40, max_tokens=50, allowed=0.5)
    ended = device.add("ended", length=40, max_tokens=50, allowed=0.5)
    free = device.add("free", length=40, max_tokens=5)
    device.scheduler.finish(ended, FinishReason.ABORT)
    given_up: dict[Request, str] = {}
    while running not in given_up:
        device.step()
        for request, reason in device.deadlines.take_hopeless():
            assert request.deadline - device.clock() < 0.2  # no earlier than its own computation takes
            given_up[request] = reason
            device.scheduler.finish(request, FinishReason.DEADLINE)
    assert given_up.keys() == {running, waiting}
    assert "its deadline has passed" in given_up[running]
    device.run_until_first_token(free)


def test_a_prompt_too_long_for_the_time_left_is_hopeless_at_once() -> None:
    device = Device()
    device.add("long", length=1000, max_tokens=5, allowed=1.5)  # its prefill takes 4 s
    device.add("short", length=100, max_tokens=5, allowed=1.5)
    ((request, reason),) = device.deadlines.take_hopeless()
    assert request.request_id == "long"
    assert "needs at least 4" in reason


def test_a_cached_prompt_is_not_hopeless() -> None:
    device = Device()
    device.run_until_first_token(device.add("long", length=1000, max_tokens=1))
    again = device.add("long", length=1000, max_tokens=1, allowed=1.5)
    assert not list(device.deadlines.take_hopeless())
    assert device.run_until_first_token(again) < 1.5


def test_output_that_is_certain_counts() -> None:
    """A request that must have 200 tokens, at 27 ms each, is given up early; one that may end at any time is not."""
    device = Device()
    device.add("forced", length=20, max_tokens=200, allowed=2.0, ignores_eos=True)
    device.add("may end", length=20, max_tokens=200, allowed=2.0)
    assert [request.request_id for request, _ in device.deadlines.take_hopeless()] == ["forced"]


def test_drafts_may_make_the_certain_output_faster() -> None:
    """With 4 draft tokens, the 200 tokens of the test before take 40 steps of 27 ms or more."""
    looks_far = {"prompt_lookup_min": 8, "prompt_lookup_max": 8}  # no drafts for the few tokens of the early requests
    device = Device(speculative="ngram", num_speculative_tokens=4, **looks_far)
    device.add("in time with drafts", length=20, max_tokens=200, allowed=2.0, ignores_eos=True)
    device.add("too late with drafts", length=20, max_tokens=200, allowed=0.4, ignores_eos=True)
    assert [request.request_id for request, _ in device.deadlines.take_hopeless()] == ["too late with drafts"]


def test_first_tokens_come_earlier_if_drafts_are_right() -> None:
    device = Device(speculative="ngram", max_num_seqs=1)
    device.add("other", length=30, max_tokens=100)
    for _ in range(8):
        device.step()
    predicted = device.deadlines.seconds_to_first_token([device.make("new", 20, 5)])
    assert predicted is not None
    actual = device.run_until_first_token(device.add("new", length=20, max_tokens=5))
    assert actual / 2 < predicted < 1.6 * actual
