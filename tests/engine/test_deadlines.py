"""Deadlines in the engine: dropped requests end once, with a reason, and leave nothing behind."""

from __future__ import annotations

from functools import cache

import pytest
from engines import SMALL_POOL, SWAP, Collector, alone, assert_idle, generate, make_engine, prompt, sampling

from llmsched.engine.errors import DeadlineError
from llmsched.engine.request import FinishReason


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@cache
def expected(seed: int) -> list[int]:
    return alone(prompt(40, seed), sampling(max_tokens=40)).tokens


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("settings", [SMALL_POOL, SMALL_POOL | SWAP], ids=["recompute", "swap"])
def test_dropped_requests_leave_the_others_as_they_are(settings: dict[str, object], looks_ahead: bool) -> None:
    clock = Clock()
    engine = make_engine(**settings, looks_ahead=looks_ahead, clock=clock, max_num_seqs=3)
    collector = Collector(engine)
    late = [f"late{i}" for i in range(4)]
    for index, name in enumerate(("kept0", *late, "kept1")):
        deadline = clock.now + (1e6 if name.startswith("kept") else 0.05 + 0.1 * index)
        engine.add_request(name, prompt(40, index), sampling(max_tokens=40), deadline=deadline)
    while engine.has_work():
        clock.now += 0.01
        collector.step()
    for index, name in ((0, "kept0"), (5, "kept1")):
        (choice,) = collector.all(name)
        assert choice.tokens == expected(index)
    for index, name in enumerate(late, start=1):
        (choice,) = collector.all(name)
        assert choice.finish_reason is FinishReason.DEADLINE
        assert choice.error is not None
        assert "deadline" in choice.error
        assert choice.tokens == expected(index)[: len(choice.tokens)]
        assert engine.explain(name)[0].entries[-1].details["reason"] == "deadline"
    assert engine.stats().finished[FinishReason.DEADLINE] == len(late)
    assert_idle(engine)


def test_a_deadline_that_the_first_token_misses_is_refused() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.check_deadline([prompt(30)], 8, deadline=clock.now + 60)
    with pytest.raises(DeadlineError, match="the deadline has passed; allow more time") as refused:
        engine.check_deadline([prompt(30)], 8, deadline=clock.now - 1)
    assert refused.value.retry_after >= 1
    assert not engine.has_work()


def predicted(error: DeadlineError) -> float:
    """Return the seconds in which the first token is predicted."""
    return float(str(error).partition("predicted in ")[2].partition(" s;")[0])


def test_a_first_token_is_predicted_from_the_steps_so_far() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    generate(engine, *((prompt(20 + 40 * index, index), sampling(max_tokens=6)) for index in range(3)))
    engine.check_deadline([prompt(200, 9)], 8, deadline=clock.now + 60)
    with pytest.raises(DeadlineError, match="the first token is predicted in") as short:
        engine.check_deadline([prompt(20, 9)], 8, deadline=clock.now)
    with pytest.raises(DeadlineError, match="the first token is predicted in") as long:
        engine.check_deadline([prompt(400, 9)] * 50, 8, deadline=clock.now)
    assert predicted(long.value) > predicted(short.value)  # retry_after is 1 s for both on a fast machine
