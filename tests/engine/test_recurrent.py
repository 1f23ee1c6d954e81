"""Models with recurrent layers: states follow their sequences, prefixes are reused where a state was saved."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from engines import Collector, alone, generate, generate_all, make_engine, prompt, sampling
from tiny_models import RECURRENT, build_model

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, RequestError
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.memory.plan import reconcile

SIZE = 4
LENGTHS = (50, 3, 21, 64, 1)
COUNT = 24
#: A convolution alone, a gated delta rule, Mamba-2 beside attention in one layer, Mamba-2 alone.
KINDS = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")


@cache
def expected(arch: str) -> list[list[int]]:
    """Return greedy continuations from plain transformers."""
    plain: Any = build_model(arch, seed=3)
    return [
        plain.generate(
            torch.tensor([prompt(length, length)]),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=3,
        )[0, length:].tolist()
        for length in LENGTHS
    ]


def serve(engine: Engine) -> list[list[int]]:
    params = sampling(max_tokens=COUNT, min_tokens=COUNT, ignore_eos=False)
    found = generate(engine, *((prompt(length, length), params) for length in LENGTHS))
    engine.check_integrity()
    return [choice.tokens for choice in found]


def slots_used(engine: Engine) -> int:
    states = engine.scheduler.kv.states
    assert states is not None
    return states.pool.num_used


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("budget", [256, 7])
def test_tokens_are_those_of_transformers_cold_and_from_the_cache(arch: str, budget: int) -> None:
    engine = make_engine(arch, block_size=SIZE, num_blocks=1000, max_num_batched_tokens=budget)
    assert serve(engine) == expected(arch)
    assert serve(engine) == expected(arch)
    assert engine.stats().prefix_hit_tokens > 0
    assert slots_used(engine) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("arch", ["lfm2", "qwen3_next"])
def test_preemption_changes_nothing(arch: str, looks_ahead: bool, caching: bool, mode: str) -> None:
    engine = make_engine(
        arch,
        block_size=SIZE,
        num_blocks=34,
        headroom=0.0,
        preemption_mode=mode,
        swap_blocks=0 if mode == "recompute" else 80,
        enable_prefix_caching=caching,
        looks_ahead=looks_ahead,
    )
    assert serve(engine) == expected(arch)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in > 0) or mode != "swap"
    assert slots_used(engine) == 0


@pytest.mark.parametrize(
    ("policy", "arch"), [("static", "lfm2"), ("static", "mamba2"), ("serial", "lfm2"), ("fcfs", "lfm2")]
)
def test_every_policy_serves_them(policy: str, arch: str) -> None:
    engine = make_engine(arch, block_size=SIZE, num_blocks=400, scheduling_policy=policy, max_model_len=120)
    assert serve(engine) == expected(arch)


@pytest.mark.parametrize("arch", ["qwen3_next", "mamba2"])
def test_choices_of_a_request_share_the_prompts_state(arch: str) -> None:
    engine = make_engine(arch, block_size=SIZE, num_blocks=1000)
    params = sampling(n=3, temperature=0.9, seed=5, max_tokens=12)
    found = generate_all(engine, (prompt(41), params))[0]
    assert [choice.num_cached_tokens for choice in found] == [0, 40, 40]
    assert found[0].tokens == alone(prompt(41), sampling(temperature=0.9, seed=5, max_tokens=12), arch).tokens
    assert len({tuple(choice.tokens) for choice in found}) == 3


@pytest.mark.parametrize("arch", ["lfm2", "mamba2"])
def test_a_state_is_saved_where_prompts_part(arch: str) -> None:
    """Requests that arrive together with one system prompt compute it once, although it ends in no request."""
    engine = make_engine(arch, block_size=SIZE, num_blocks=1000, max_num_batched_tokens=24)
    prompts = [prompt(30) + prompt(20, seed=seed) for seed in (1, 2, 3)]
    found = generate(engine, *((each, sampling()) for each in prompts))
    assert [choice.num_cached_tokens for choice in found] == [0, 28, 28]
    assert [choice.tokens for choice in found] == [alone(each, sampling(), arch).tokens for each in prompts]
    later = generate(engine, (prompt(30) + prompt(9, seed=4), sampling()))[0]
    assert later.num_cached_tokens == 28


def test_a_prefix_without_a_saved_state_is_computed_again_and_saved() -> None:
    engine = make_engine("lfm2", block_size=SIZE, num_blocks=1000)
    tails = [prompt(6, seed=seed) for seed in (7, 8, 9)]
    generate(engine, (prompt(50), sampling()))
    found = [generate(engine, (prompt(50)[:30] + tail, sampling()))[0] for tail in tails]
    assert [choice.num_cached_tokens for choice in found] == [0, 28, 28]
    assert engine.stats().prefix_misses[MissKind.UNSAVED] == 1


def test_a_conversation_continues_from_the_end_of_the_last_answer() -> None:
    engine = make_engine("qwen3_next", block_size=SIZE, num_blocks=1000)
    answer = generate(engine, (prompt(30), sampling(max_tokens=21)))[0].tokens
    turn = [*prompt(30), *answer, *prompt(8, seed=4)]
    found = generate(engine, (turn, sampling()))[0]
    assert found.num_cached_tokens == 48, "the 50 tokens that were computed, in whole blocks"
    assert found.tokens == alone(turn, sampling(), "qwen3_next").tokens


@pytest.mark.parametrize("arch", ["lfm2", "mamba2"])
def test_aborts_release_their_states(arch: str) -> None:
    engine = make_engine(arch, block_size=SIZE, num_blocks=400, max_num_seqs=3, looks_ahead=True)
    collector = Collector(engine)
    for index in range(6):
        engine.add_request(str(index), prompt(40, index), sampling())
    for index in (4, 0, 2):
        for _ in range(2):
            collector.step()
        engine.abort(str(index))
        engine.check_integrity()
    collector.run()
    assert slots_used(engine) == 0
    assert collector.all("1")[0].tokens == alone(prompt(40, 1), sampling(), arch).tokens


def test_pins_keep_a_state() -> None:
    engine = make_engine("lfm2", block_size=SIZE, num_blocks=400, max_num_seqs=2, max_pinned_share=0.25)
    pin = engine.prefixes.pin(prompt(24), ttl=None)
    Collector(engine).run()
    assert slots_used(engine) == 1
    collector = Collector(engine)
    for index in range(8):
        engine.add_request(str(index), prompt(30, 10 + index), sampling())
    collector.run()
    engine.add_request("hit", [*prompt(24), 7, 8], sampling())
    collector.run()
    assert collector.all("hit")[0].num_cached_tokens == 24
    with pytest.raises(RequestError, match="1 prefixes are pinned, and at most 1 may be"):
        engine.prefixes.pin(prompt(24, 5))
    engine.prefixes.unpin(pin.pin_id)
    engine.prefixes.reset()
    assert engine.scheduler.kv.states.pool.num_free == engine.scheduler.kv.states.pool.num_blocks


@pytest.mark.parametrize("arch", RECURRENT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_serve_reserves_the_planned_states(arch: str, dtype: Any, tiny_model: Any) -> None:
    knobs = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "device": "cpu", "max_model_len": 128}
    config = EngineConfig(model=str(tiny_model(arch)), dtype=dtype, kv_cache_memory_bytes=1 << 20, **knobs)
    engine = build_engine(config)
    plan = engine.plan
    assert plan is not None
    assert plan.measured is not None
    ratios = {part.part: part.ratio for part in reconcile(plan, plan.measured)}
    assert ratios["recurrent state"] == 1
    assert ratios["weights"] == pytest.approx(1, abs=0.02)
    assert plan.confidence == "exact"
    assert len(generate(engine, (prompt(20), sampling()))[0].tokens) == 16


def test_speculation_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="ngram is not supported for models with recurrent layers"):
        build_engine(EngineConfig(model=str(tiny_model("lfm2")), device="cpu", max_model_len=64, speculative="ngram"))


def test_swap_space_must_hold_a_state(tiny_model: Any) -> None:
    knobs = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20, "block_size": 1, "max_model_len": 64}
    with pytest.raises(ConfigError, match="is less than two recurrent states"):
        build_engine(EngineConfig(model=str(tiny_model("qwen3_next")), swap_space=8000, **knobs))
