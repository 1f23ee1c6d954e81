"""SimulatedEngine decides as Engine does: the same load and step times give the same token times."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import pytest
from configs import resolved
from engines import layout_of, make_engine, prompt, sampling
from simulated_run import LinearCost

from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.simulated_engine import SimulatedEngine

COST = LinearCost(1.0, 0.01, 0.02, 1e-4)
PER_SWAPPED_BLOCK = 0.3


class Sent(NamedTuple):
    name: str
    time: float
    prompt: list[int]
    max_tokens: int


class Steps(Protocol):
    def has_work(self) -> bool: ...

    def idle_until(self) -> float | None: ...


def load(seed: int) -> list[Sent]:
    """Return forty requests, many with common prefixes."""
    dice, time, sent = random.Random(seed), 0.0, []
    for index in range(40):
        time += dice.expovariate(0.2)
        length = dice.randint(2, 120)
        common = prompt(200, dice.choice((1, 2, 3)))[: dice.randint(1, length - 1)]
        tokens = common + prompt(length - len(common), 100 + index)
        sent.append(Sent(f"{index:03}", time, tokens, dice.randint(1, 60)))
    return sent


def token_times(
    engine: Steps, clock: VirtualClock, sent: list[Sent], add: Callable[[Sent], None], step: Callable[[], list[str]]
) -> dict[str, list[float]]:
    """Return the token times of each request; `step` returns the names of the requests that got a token."""
    coming, times = sent[::-1], {one.name: [] for one in sent}
    while coming or engine.has_work():
        while coming and coming[-1].time <= clock.now:
            add(coming.pop())
        until = engine.idle_until() if engine.has_work() else coming[-1].time
        if until is not None:
            clock.now = min([until, *(one.time for one in coming[-1:])])
            continue
        for name in step():
            times[name].append(clock.now)
    return times


def served(engine: Engine, clock: VirtualClock, sent: list[Sent]) -> dict[str, list[float]]:
    def add(one: Sent) -> None:
        engine.add_request(one.name, one.prompt, sampling(max_tokens=one.max_tokens), arrival_time=one.time)

    def step() -> list[str]:
        return [output.request_id for output in engine.step() for _ in output.token_ids]

    return token_times(engine, clock, sent, add, step)


def simulated(engine: SimulatedEngine, sent: list[Sent]) -> dict[str, list[float]]:
    def add(one: Sent) -> None:
        engine.add(f"{one.name}/0", one.prompt, one.max_tokens, one.time)

    def step() -> list[str]:
        updates = [update for update in engine.step() if update.result.token_id is not None]
        return [update.request.request_id.removesuffix("/0") for update in updates]

    return token_times(engine, engine.clock, sent, add, step)


@pytest.mark.parametrize(
    ("arch", "blocks", "slots", "knobs"),
    [
        ("llama", 24, 0, {}),
        ("llama", 24, 20, {"preemption_mode": "swap"}),
        ("llama", 40, 0, {"output_prediction": "learned", "headroom": 0.1, "target_itl": 2.0}),
        ("gemma3", 60, 0, {}),
        ("llama", 24, 0, {"scheduling_policy": "fcfs"}),
        ("llama", 200, 0, {"scheduling_policy": "static"}),
        ("llama", 24, 0, {"schedule_window": 5.0, "min_schedule_batch": 3}),
    ],
    ids=["recompute", "swap", "target", "windows", "fcfs", "static", "coalescing"],
)
def test_every_token_has_the_same_time_as_in_the_engine(
    arch: str, blocks: int, slots: int, knobs: dict[str, Any]
) -> None:
    clock = VirtualClock()
    engine = make_engine(arch, num_blocks=blocks, swap_blocks=slots, clock=clock, **knobs)
    engine.executor = SimulatedExecutor(COST, clock, per_swapped_block=PER_SWAPPED_BLOCK)
    layout = layout_of(arch, longest=engine.config.max_model_len)
    kv = make_kv(engine.config, blocks, SwapSpace(slots, 1), layout)
    other = SimulatedEngine(engine.config, kv, COST, per_swapped_block=PER_SWAPPED_BLOCK)
    sent = load(2)
    times = served(engine, clock, sent)
    assert simulated(other, sent) == times
    assert [len(times[one.name]) for one in sent] == [one.max_tokens for one in sent]
    assert other.scheduler.counters.num_preemptions == engine.scheduler.counters.num_preemptions
    assert other.scheduler.counters.num_preemptions > 0 or blocks == 200


def test_drafts_are_refused() -> None:
    config = resolved(speculative="auto")
    with pytest.raises(ConfigError, match="speculative: auto cannot be simulated"):
        SimulatedEngine(config, make_kv(config, 10), COST)
