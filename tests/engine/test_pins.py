"""Pinned prefixes on the engine with its real executor; tests/kv/test_pins.py has their rules."""

from __future__ import annotations

import pytest
from engines import Collector, alone, make_engine, prompt, sampling

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


def test_a_pinned_prefix_does_not_change_the_output() -> None:
    engine = make_engine(**POOL)
    engine.prefixes.pin(PINNED)
    Collector(engine).run()
    flood(engine)
    choice = generate_busy(engine, [*PINNED, 9]).all("0")[0]
    assert choice.num_cached_tokens == 96
    assert choice.tokens == alone([*PINNED, 9], sampling()).tokens


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
