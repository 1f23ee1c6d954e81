"""Models with sliding windows: blocks that left a window are freed, and outputs do not change."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from engines import Collector, alone, generate, layout_of, make_engine, prompt, sampling
from tiny_models import ARCHITECTURES, build_model

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.plan import reconcile

#: Windows of 8 tokens: in 6 of 7 layers of gemma3, in 2 of 3 of gemma2 and gpt_oss, in all 3 of mistral.
WINDOWED = ("gemma2", "gemma3", "gpt_oss", "mistral")
SIZE = 4
LENGTHS = (50, 3, 21, 64)
COUNT = 40


@cache
def expected(arch: str) -> list[list[int]]:
    """Return greedy continuations from plain transformers."""
    plain: Any = build_model(arch, seed=3)
    plain.set_attn_implementation("eager")
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


def outputs(arch: str, **settings: Any) -> tuple[list[list[int]], Any]:
    """Serve all prompts together and return their outputs and the engine's statistics."""
    engine = make_engine(arch, block_size=SIZE, **settings)
    params = sampling(max_tokens=COUNT, min_tokens=COUNT, ignore_eos=False)
    found = generate(engine, *((prompt(length, length), params) for length in LENGTHS))
    return [choice.tokens for choice in found], engine.stats()


def test_layers_with_a_window_form_separate_groups() -> None:
    assert layout_of("gemma3", SIZE) == KVLayout(SIZE, 1, 6, 8)
    assert layout_of("gpt_oss", SIZE) == KVLayout(SIZE, 1, 2, 8)
    assert layout_of("mistral", SIZE) == KVLayout(SIZE, 0, 1, 8)
    assert layout_of("llama", SIZE) == KVLayout(SIZE)
    assert {arch for arch in ARCHITECTURES if layout_of(arch).window_groups} == set(WINDOWED)


@pytest.mark.parametrize("arch", WINDOWED)
@pytest.mark.parametrize("budget", [256, 7, 1], ids=lambda budget: f"steps of {budget}")
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_tokens_are_those_of_transformers_far_past_the_window(arch: str, budget: int, caching: bool) -> None:
    found, _ = outputs(
        arch, num_blocks=1000, max_num_batched_tokens=budget, max_num_seqs=min(4, budget), enable_prefix_caching=caching
    )
    assert found == expected(arch)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("arch", WINDOWED)
def test_preemption_changes_nothing(arch: str, caching: bool, mode: str) -> None:
    """The pool is too small for two of the long requests."""
    layout = layout_of(arch, SIZE)
    blocks = layout.num_blocks(LENGTHS[-1] + COUNT) * 3 // 2 if layout.full_groups else 2 * layout.num_blocks(8) + 1
    slots = 0 if mode == "recompute" else 2 * blocks
    found, stats = outputs(
        arch, num_blocks=blocks, preemption_mode=mode, swap_blocks=slots, enable_prefix_caching=caching, headroom=0.0
    )
    assert found == expected(arch)
    assert stats.num_preemptions > 0
    if mode == "swap":
        assert stats.num_swapped_out == stats.num_swapped_in == stats.num_preemptions


@pytest.mark.parametrize("policy", ["static", "serial", "fcfs"])
@pytest.mark.parametrize("arch", ["gpt_oss", "mistral"])
def test_every_policy_serves_them(arch: str, policy: str) -> None:
    found, _ = outputs(arch, num_blocks=400, scheduling_policy=policy, max_model_len=120)
    assert found == expected(arch)


@pytest.mark.parametrize("arch", WINDOWED)
def test_a_prefix_hit_needs_the_blocks_in_its_window(arch: str) -> None:
    """The end of a served sequence can be reused; an earlier part only while the blocks of its window are cached."""
    engine = make_engine(arch, block_size=SIZE, num_blocks=1000)
    params = sampling(max_tokens=COUNT, min_tokens=COUNT, ignore_eos=False)
    first = generate(engine, (prompt(64, 64), params))[0]
    assert first.tokens == expected(arch)[3]
    again, other = generate(engine, (prompt(64, 64), params), ([*prompt(64, 64)[:30], 7, 8, 9], sampling()))
    assert (again.tokens, again.num_cached_tokens) == (first.tokens, 60)
    assert other.num_cached_tokens == 28
    assert other.tokens == alone([*prompt(64, 64)[:30], 7, 8, 9], sampling(), arch).tokens


def test_layers_with_a_window_hold_a_bounded_number_of_blocks() -> None:
    """Blocks in use equal the number that the layout computes, which kv-budget and serve plan with."""
    engine = make_engine("gemma3", block_size=SIZE, num_blocks=1000)
    layout = layout_of("gemma3", SIZE)
    collector = Collector(engine)
    engine.add_request("long", prompt(10), sampling(max_tokens=200))
    most = 0
    while engine.has_work():
        collector.step()
        if engine.has_work():
            expected = layout.num_blocks(engine.scheduler.running[0].num_computed_tokens)
            # When a block has just been filled, one has left each window, and the next is not taken yet.
            assert engine.stats().blocks_used in (expected, expected - layout.window_groups)
            most = max(most, engine.stats().blocks_used)
    assert most == layout.num_blocks(208) == 52 + 6 * 3


@pytest.mark.parametrize("arch", WINDOWED)
def test_serve_holds_as_many_sequences_as_planned(tiny_model: Any, arch: str) -> None:
    """The planned number of sequences of max_model_len tokens run together, in as many blocks as planned."""
    length, knobs = 120, {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": SIZE, "headroom": 0.0}
    knobs |= {"device": "cpu", "dtype": "float32", "max_model_len": length, "output_prediction": "none"}
    blocks = 300 if layout_of(arch, SIZE).full_groups else 40
    engine = build_engine(EngineConfig(model=str(tiny_model(arch)), num_gpu_blocks_override=blocks, **knobs))
    plan = engine.plan
    assert plan is not None
    assert plan.layout == engine.scheduler.kv.layout == layout_of(arch, SIZE, length)
    assert plan.measured is not None
    assert {part.part: part.ratio for part in reconcile(plan, plan.measured)}["KV"] == 1
    count = plan.max_num_seqs
    assert blocks // (plan.layout.num_groups * length // SIZE) < count < 16, "with all tokens in all layers it is fewer"
    for index in range(count):
        engine.add_request(str(index), prompt(20, index), sampling(max_tokens=length - 20))
    most, collector = 0, Collector(engine)
    while engine.has_work():
        collector.step()
        most = max(most, engine.stats().blocks_used)
    assert engine.stats().num_preemptions == 0
    assert count * plan.blocks_for(length) - count * plan.layout.num_groups <= most <= count * plan.blocks_for(length)
