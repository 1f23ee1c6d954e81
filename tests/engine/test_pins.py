"""Pinned prefixes on the engine with its real executor."""

from __future__ import annotations

import pytest
from engines import Collector, generate, make_engine, prompt, sampling

from llmsched.engine.core import Engine
from llmsched.engine.errors import RequestError

POOL = {"num_blocks": 32, "max_model_len": 320}
PINNED = prompt(100, seed=77)


def flood(engine: Engine) -> None:
    """Serve requests that evict everything evictable from the cache."""
    generate_busy(engine, *(prompt(200, seed) for seed in range(12)))


def generate_busy(engine: Engine, *prompts: list[int]) -> Collector:
    """Serve requests like `engines.generate`, but allow pinned blocks to stay used."""
    collector = Collector(engine)
    for index, token_ids in enumerate(prompts):
        engine.add_request(str(index), token_ids, sampling())
    collector.run()
    return collector


def cached(engine: Engine, token_ids: list[int]) -> int:
    return generate_busy(engine, token_ids).all("0")[0].num_cached_tokens


def test_a_pinned_prefix_survives_eviction_pressure() -> None:
    engine = make_engine(**POOL)
    other = prompt(100, seed=78)
    pin = engine.prefixes.pin(PINNED)
    assert (pin.num_tokens, pin.num_written_tokens, pin.expires_at) == (96, 0, None)
    Collector(engine).run()
    generate_busy(engine, other)
    assert engine.prefixes.pins()[0].num_written_tokens == 96
    flood(engine)
    assert cached(engine, [*PINNED[:96], 5, 6]) == 96
    assert cached(engine, other) == 0
    assert engine.stats().blocks_pinned == 6
    assert "llmsched:kv_blocks_pinned" in engine.metrics.render().decode()


def test_a_pinned_prefix_does_not_change_the_output() -> None:
    engine = make_engine(**POOL)
    engine.prefixes.pin(PINNED)
    Collector(engine).run()
    flood(engine)
    choice = generate_busy(engine, [*PINNED, 9]).all("0")[0]
    assert choice.num_cached_tokens == 96
    assert choice.tokens == generate(make_engine(enable_prefix_caching=False), ([*PINNED, 9], sampling()))[0].tokens


def test_cap_leaves_room_for_the_longest_request() -> None:
    engine = make_engine(**POOL)
    assert engine.stats().max_blocks_pinned == 8
    engine.prefixes.pin(PINNED)
    with pytest.raises(RequestError, match="takes 3 more blocks of 16; 6 are pinned, and at most 8 may be"):
        engine.prefixes.pin(prompt(48, seed=79))
    engine.prefixes.pin(prompt(32, seed=79))
    Collector(engine).run()
    collector = Collector(engine)
    engine.add_request("longest", prompt(300, seed=80), sampling(max_tokens=20))
    collector.run()
    assert len(collector.all("longest")[0].tokens) == 20
    assert engine.stats().blocks_pinned == 8


def test_pins_expire_while_nothing_runs() -> None:
    now = 100.0
    engine = make_engine(**POOL, clock=lambda: now)
    assert engine.prefixes.pin(PINNED, ttl=30.0).expires_at == 130.0
    Collector(engine).run()
    now = 129.9
    assert len(engine.prefixes.pins()) == 1
    now = 130.0
    assert engine.prefixes.pins() == []
    assert engine.stats().blocks_used == 0
    engine.check_integrity()
    flood(engine)
    assert cached(engine, PINNED) == 0


def test_unpin_releases_the_blocks() -> None:
    engine = make_engine(**POOL)
    pin = engine.prefixes.pin(PINNED)
    Collector(engine).run()
    engine.prefixes.unpin(pin.pin_id)
    assert engine.stats().blocks_pinned == engine.stats().blocks_used == 0
    assert engine.stats().blocks_cached == 6
    flood(engine)
    assert cached(engine, [*PINNED, 9]) == 0
    with pytest.raises(RequestError, match="no pin 'pin-1'"):
        engine.prefixes.unpin(pin.pin_id)


def test_pinning_twice_computes_once_and_a_full_queue_does_not_matter() -> None:
    engine = make_engine(**POOL, max_queue_size=1)
    engine.add_request("waiting", prompt(20), sampling())
    first, second = engine.prefixes.pin(PINNED), engine.prefixes.pin(PINNED, ttl=60)
    assert first.pin_id == second.pin_id
    assert engine.stats().num_waiting == 2
    Collector(engine).run()
    assert engine.stats().prompt_tokens == 20 + 96
    assert engine.prefixes.pin(PINNED).num_written_tokens == 96
    assert not engine.has_work()


def test_without_a_prefix_cache_nothing_is_pinned() -> None:
    engine = make_engine(**POOL, enable_prefix_caching=False)
    with pytest.raises(RequestError, match="prefix caching is off on this server"):
        engine.prefixes.pin(PINNED)
    assert not engine.has_work()


def test_an_invalid_prompt_cannot_be_pinned() -> None:
    engine = make_engine(**POOL)
    for token_ids, message in (([], "no tokens"), ([10**6], "allowed is from 0"), (prompt(321), "320 tokens")):
        with pytest.raises(RequestError, match=message):
            engine.prefixes.pin(token_ids)
    assert engine.prefixes.pins() == []
