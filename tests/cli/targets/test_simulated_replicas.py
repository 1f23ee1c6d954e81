"""Replicas on virtual time: every request is served once, decodes that are skipped change no time, prefixes pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from configs import resolved
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import LinearCost

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.load.load import PlannedRequest
from llmsched.cli.targets.simulated_clients import SimulatedClients
from llmsched.cli.targets.simulated_replicas import Replication, SimulatedRouter
from llmsched.engine import simulated_engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.routing.router import RULES
from llmsched.engine.simulated_engine import SimulatedEngine

COST = LinearCost(0.01, 1e-4, 1e-3, 1e-7)
CONFIG = resolved(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=16)


class Ids:
    text = None

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


def conversations(count: int, turns: int, seed: int, pause: float = 1.0) -> list[PlannedRequest]:
    """Return the requests of chats, each turn of which repeats the turns before it and adds 300 tokens."""
    random, planned = Random(seed), []
    for chat in range(count):
        time = random.random() * pause * count / 8
        for turn in range(1, turns + 1):
            ids = list(range(10_000 * chat, 10_000 * chat + 300 * turn))
            planned.append((time, ids, random.randint(1, 40)))
            time += pause + random.random()
    planned.sort(key=lambda each: each[0])
    return [PlannedRequest(index, time, Ids(ids), out) for index, (time, ids, out) in enumerate(planned)]  # type: ignore[arg-type]


def serve(
    planned: list[PlannedRequest], replicas: int, router: str, blocks: int = 512, **load: Any
) -> tuple[list[RequestRecord], list[SimulatedEngine]]:
    config, layout = replace(CONFIG, **load.pop("knobs", {})), load.pop("layout", None)
    on_step, swap_blocks = load.pop("on_step", None), load.pop("swap_blocks", 0)
    kvs = [make_kv(config, blocks, SwapSpace(swap_blocks, 1), layout) for _ in range(replicas)]
    engines = [SimulatedEngine(config, kv, COST, per_swapped_block=1e-4) for kv in kvs]
    for engine in engines:
        engine.on_step = on_step
    routing = SimulatedRouter(engines, router)
    plan: dict[str, Any] = {"closed": False, "max_concurrency": None, "timeout": None} | load
    records = SimulatedClients(planned, engines, route=routing.route, on_end=routing.ended, **plan).run()
    for engine in engines:
        engine.scheduler.check_integrity()
        assert not engine.has_work()
    return records, engines


@pytest.mark.parametrize("router", RULES)
def test_every_request_is_served_once_under_every_rule(router: str) -> None:
    planned = conversations(20, 3, seed=1)
    records, engines = serve(planned, 3, router)
    assert [record.index for record in records] == list(range(60))
    assert all(record.completed and len(record.chunks) == record.asked_tokens for record in records)
    assert all(record.sent is not None and record.chunks[0].time > record.sent for record in records)
    assert all(engine.clock.now > 0 for engine in engines)


def test_the_prefix_rule_finds_what_earlier_turns_computed() -> None:
    planned = conversations(40, 4, seed=2)

    def hit_tokens(router: str) -> int:
        return sum(record.usage.cached_tokens or 0 for record in serve(planned, 4, router)[0])

    alone = sum(record.usage.cached_tokens or 0 for record in serve(planned, 1, "prefix", blocks=2048)[0])
    assert hit_tokens("prefix") >= 0.9 * alone
    assert hit_tokens("random") < 0.6 * alone


def test_one_replica_behind_a_router_is_the_engine_itself() -> None:
    planned = conversations(10, 3, seed=3)
    engine = SimulatedEngine(CONFIG, make_kv(CONFIG, 512), COST)
    alone = SimulatedClients(planned, [engine], closed=False, max_concurrency=None, timeout=None).run()
    routed, _ = serve(planned, 1, "prefix")
    assert [record.chunks for record in routed] == [record.chunks for record in alone]


@pytest.mark.parametrize("router", RULES)
def test_a_request_is_refused_only_if_every_queue_is_full(router: str) -> None:
    """A replica whose queue is full passes a request on to the others."""
    at_once = [PlannedRequest(index, 0.0, Ids([index] * 100), 5) for index in range(11)]  # type: ignore[arg-type]
    records, _ = serve(at_once, 3, router, knobs={"max_queue_size": 3})
    refused = [record.index for record in records if record.failure is not None]
    assert refused == [9, 10]
    assert all(record.failure is None or "3 requests are waiting" in record.failure.detail for record in records)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(["fair", "fcfs", "sptf", "serial", "static"]),
    st.sampled_from([None, 0.5, 3.0]),
    st.sampled_from([40, 512]),
    st.sampled_from([None, 3]),
    st.sampled_from([KVLayout(16), KVLayout(16, 1, 1, 40), KVLayout(16, 0, 1, 40), KVLayout(16, recurrent=True)]),
    st.sampled_from([0, 60]),
    st.sampled_from([None, 0.03]),
    st.sampled_from(["round-robin", "prefix"]),
)
def test_predicted_decodes_change_nothing(
    seed: int,
    policy: str,
    timeout: float | None,
    blocks: int,
    clients: int | None,
    layout: KVLayout,
    swap_blocks: int,
    target_itl: float | None,
    router: str,
) -> None:
    planned = conversations(6, 2, seed, pause=0.2)
    load: dict[str, Any] = {"timeout": timeout, "closed": clients is not None, "max_concurrency": clients}
    load["knobs"] = {"scheduling_policy": policy, "max_model_len": 640, "target_itl": target_itl}
    load |= {"layout": layout, "swap_blocks": swap_blocks}
    usages: list[list[KVUsage]] = [[], []]
    blocks *= layout.num_groups
    fast, fast_engines = serve(planned, 2, router, blocks, on_step=usages[0].append, **dict(load))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_engine, "_MOST_AHEAD", 0)
        slow, slow_engines = serve(planned, 2, router, blocks, on_step=usages[1].append, **dict(load))
    assert [(r.chunks, r.end, r.usage, r.failure and r.failure.reason) for r in fast] == [
        (r.chunks, r.end, r.usage, r.failure and r.failure.reason) for r in slow
    ]
    assert Counter(usages[0]) == Counter(usages[1])
    for one, other in zip(fast_engines, slow_engines, strict=True):
        assert one.scheduler.counters == other.scheduler.counters


@pytest.mark.parametrize(("fields", "message"), [({"replicas": 0}, "1 to"), ({"router": "best"}, "prefix, random")])
def test_invalid_replication_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replication(**fields)
