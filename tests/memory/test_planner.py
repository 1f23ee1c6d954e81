"""The memory plan: arithmetic, error messages with remedies, and invariants."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.architecture.geometry import Geometry, LayerGroup
from llmsched.engine.architecture.shape import ModelShape, model_shape
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, Holder
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.activation_memory import LOGITS_BYTES, activation_bytes, logits_limit
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import CONTEXT_BYTES, ModelPlanner, plan_memory, token_budget

GIB = 1 << 30
MIB = 1 << 20


def shape(
    *,
    weights: int = 15 * GIB,
    groups: tuple[LayerGroup, ...] = (LayerGroup("full", 32, 8, 128, 128),),
    max_position: int | None = 131072,
) -> ModelShape:
    """Return a shape with the sizes of Llama-3.1-8B, except for those given."""
    geometry = Geometry(groups, "exact", ())
    return ModelShape(geometry, Weights(weights, "config", True), 128256, 4096, 14336, max_position)


def gpu(gib: float, others: int = 0, holders: tuple[Holder, ...] = ()) -> DeviceMemory:
    return DeviceMemory("cuda", "test GPU", int(gib * GIB), others, holders)


def cpu(available_gib: float, total_gib: float = 64) -> DeviceMemory:
    total = int(total_gib * GIB)
    return DeviceMemory("cpu", "test CPU", total, total - int(available_gib * GIB))


def planned(device: DeviceMemory, model: ModelShape | None = None, dtype_bytes: int = 2, **knobs: Any) -> MemoryPlan:
    return plan_memory(model or shape(), EngineConfig(**knobs), device, dtype_bytes=dtype_bytes)


def test_the_arithmetic_on_a_gpu() -> None:
    plan = planned(gpu(24), max_model_len=8192)
    assert plan.budget_bytes == int(24 * GIB * 0.9)
    assert plan.kv_bytes_per_token == 131072
    assert plan.block_bytes == 16 * 131072
    fixed = 15 * GIB + plan.activation_bytes + CONTEXT_BYTES + plan.graph_bytes
    assert plan.available_kv_bytes == plan.budget_bytes - fixed
    assert plan.num_blocks == plan.available_kv_bytes // plan.block_bytes
    assert plan.max_num_seqs == plan.num_blocks // 512
    assert plan.num_seqs_at(1024) == plan.num_blocks // 64
    assert plan.fits
    assert plan.confidence == "exact"


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_the_last_token_needs_no_kv(length: int, blocks: int) -> None:
    assert planned(gpu(24)).blocks_for(length) == blocks


def test_every_block_is_usable() -> None:
    plan = planned(gpu(24), num_gpu_blocks_override=10)
    assert plan.num_blocks == 10
    assert plan.num_tokens == plan.max_model_len == 160
    assert plan.num_seqs_at(161) == 1
    assert plan.num_seqs_at(162) == 0


def test_a_default_length_is_lowered_with_a_note() -> None:
    plan = planned(gpu(24))
    assert plan.fits
    assert plan.max_model_len == plan.num_tokens < 131072
    assert any("lowered from 131072" in note for note in plan.notes)
    assert planned(gpu(80)).max_model_len == 131072


def test_a_model_without_a_stated_length_gets_what_fits() -> None:
    plan = planned(gpu(24), shape(max_position=None))
    assert plan.max_model_len == plan.num_tokens
    assert any("no context length" in note for note in plan.notes)


def test_a_given_length_is_refused_with_one_that_works() -> None:
    plan = planned(gpu(24), max_model_len=131072)
    assert not plan.fits
    assert plan.max_num_seqs == 0
    message = str(plan.problem)
    assert message.startswith("max_model_len: one request of 131072 tokens needs 16.0 GiB of KV")
    proposed = int(re.search(r"use at most (\d+)", message)[1])  # type: ignore[index]
    assert planned(gpu(24), max_model_len=proposed).fits
    assert not planned(gpu(24), max_model_len=proposed + 17).fits


def test_more_than_the_model_has_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="200000 is beyond the 131072 positions"):
        plan_memory(shape(), EngineConfig(max_model_len=200000), gpu(80), dtype_bytes=2)


# Not enough memory: the figures, never a negative one, and a proposal that works.


def test_weights_beyond_the_budget_name_the_utilisation_that_suffices() -> None:
    model = shape(weights=10 * GIB)
    plan = planned(gpu(12), model, gpu_memory_utilization=0.5)
    assert (plan.num_blocks, plan.available_kv_bytes, plan.max_num_seqs) == (0, 0, 0)
    message = str(plan.problem)
    assert "weights 10.0 GiB + activations" in message
    assert "the budget is 6.00 GiB (0.5 of 12.0 GiB)" in message
    assert "-" not in re.sub(r"gpu_memory|[a-z]-[a-z]", "", message)
    assert "; raise gpu_memory_utilization to at least 0.91" in message
    assert planned(gpu(12), model, gpu_memory_utilization=0.91).fits
    assert not planned(gpu(12), model, gpu_memory_utilization=0.90).fits


@pytest.mark.parametrize("utilisation", [0.5, 0.9, 0.95, 1.0])
def test_utilisation_is_never_advised_beyond_95_percent(utilisation: float) -> None:
    plan = planned(gpu(15.2), gpu_memory_utilization=utilisation)
    assert plan.problem is not None
    assert "raise gpu_memory_utilization" not in str(plan.problem)
    assert "a GPU with at least" in str(plan.problem)


def test_a_gpu_of_the_advised_size_is_enough() -> None:
    message = str(planned(gpu(8)).problem)
    advised = float(re.search(r"a GPU with at least ([\d.]+) GiB", message)[1])  # type: ignore[index]
    assert planned(gpu(advised + 0.05), gpu_memory_utilization=0.95).fits


def test_memory_of_other_programs_is_not_planned() -> None:
    alone, shared = planned(gpu(24)), planned(gpu(24, others=4 * GIB))
    assert shared.budget_bytes == 20 * GIB < alone.budget_bytes
    full = planned(gpu(24, others=10 * GIB, holders=(Holder(4711, "python", 10 * GIB),)))
    assert "but other programs hold 10.0 GiB" in str(full.problem)
    assert "free memory that other programs hold (python 4711)" in str(full.problem)


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0, float("nan")])
def test_impossible_utilisation_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: .* out of range; allowed is from 0.01 to 1"):
        EngineConfig(gpu_memory_utilization=value)


# Other ways to size the pool.


def test_explicit_kv_memory_and_blocks() -> None:
    assert planned(gpu(24), kv_cache_memory_bytes=GIB).available_kv_bytes == GIB
    assert planned(gpu(24), kv_cache_memory_bytes=GIB).num_blocks == GIB // (16 * 131072)
    both = planned(gpu(24), kv_cache_memory_bytes=GIB, num_gpu_blocks_override=7)
    assert both.num_blocks == 7
    above_utilisation = planned(gpu(24), kv_cache_memory_bytes=7 * GIB)
    assert above_utilisation.fits


@pytest.mark.parametrize(
    ("knobs", "pattern"),
    [
        ({"kv_cache_memory_bytes": 20 * GIB}, r"kv_cache_memory_bytes: .* use at most (\d+)MiB"),
        ({"num_gpu_blocks_override": 100000}, r"num_gpu_blocks_override: .* use at most (\d+)"),
    ],
)
def test_explicit_sizes_that_do_not_fit_name_the_largest(knobs: dict[str, int], pattern: str) -> None:
    message = str(planned(gpu(24), **knobs).problem)
    found = re.search(pattern, message)
    assert found is not None, message
    [knob] = knobs
    most = int(found[1]) * (MIB if knob == "kv_cache_memory_bytes" else 1)
    assert planned(gpu(24), **{knob: most}).fits


def test_a_cpu_gives_kv_a_quarter_of_what_is_free_and_at_most_4_gib() -> None:
    small = shape(weights=GIB)
    assert planned(cpu(8), small).available_kv_bytes == 2 * GIB
    assert planned(cpu(60), small).available_kv_bytes == 4 * GIB
    assert planned(cpu(60), small, kv_cache_memory_bytes=10 * GIB).available_kv_bytes == 10 * GIB
    assert planned(cpu(8), small, gpu_memory_utilization=0.1).available_kv_bytes == 2 * GIB
    assert planned(cpu(8), small).context_bytes == 0


def test_a_cpu_without_room() -> None:
    assert "use a smaller model" in str(planned(cpu(10)).problem)
    wide = shape(weights=12 * GIB)
    assert "set dtype to bfloat16 or use a smaller model" in str(planned(cpu(10), wide, dtype_bytes=4).problem)
    assert "set dtype to float16" in str(planned(replace(cpu(10), computes_bf16=False), wide, dtype_bytes=4).problem)
    assert "dtype" not in str(planned(cpu(5), wide, dtype_bytes=4).problem)
    message = str(planned(cpu(40), max_model_len=131072).problem)
    assert "raise kv_cache_memory_bytes to at least 16384MiB" in message
    assert planned(cpu(40), max_model_len=131072, kv_cache_memory_bytes=16384 * MIB).fits


def test_the_token_budget_depends_on_the_device() -> None:
    assert token_budget(EngineConfig(), "cuda") == 2048
    assert token_budget(EngineConfig(), "cpu") == 256
    assert token_budget(EngineConfig(max_num_batched_tokens=64), "cpu") == 64


def test_activations_follow_the_larger_of_layers_and_sampler() -> None:
    model = shape()
    assert activation_bytes(model, 65536, 1, 2) == 65536 * (4 * 4096 + 3 * 14336 + 2 * 128) * 2
    assert activation_bytes(model, 1, 4, 2) == 4 * 128256 * (2 + 3 * 4)
    assert activation_bytes(model, 1, 1024, 2) == 1024 * 128256 * 2 + 3 * LOGITS_BYTES
    assert activation_bytes(model, 1, 1024, 2, logits_bytes=MIB) == 1024 * 128256 * 2 + 3 * MIB


def test_more_logits_are_copied_at_once_on_a_larger_device() -> None:
    assert [logits_limit(count * GIB) for count in (4, 80)] == [16 * MIB, 80 * MIB]
    model, knobs = shape(), {"max_num_seqs": 4096, "max_num_batched_tokens": 256}
    small, large = (planned(gpu(count), model, **knobs).activation_bytes for count in (40, 80))
    assert large - small == 3 * (80 - 40) * MIB


# Layers that are not full attention.

GPT_OSS_20B = (LayerGroup("full", 12, 8, 64, 64), LayerGroup("window", 12, 8, 64, 64, window=128))


def test_windows_cost_what_this_allocator_keeps_of_them() -> None:
    """Blocks hold 12 layers; 8192 tokens take 512 full-attention blocks and ceil(127 / 16) + 1 window blocks."""
    plan = planned(gpu(80), shape(groups=GPT_OSS_20B), max_model_len=8192)
    assert plan.block_bytes == 16 * 24576
    assert (plan.kv_bytes_per_token, plan.kv_bytes_per_token_window, plan.window) == (24576, 24576, 128)
    assert plan.blocks_for(8192) == 512 + 9
    assert 32 * plan.blocks_for(8192) * plan.block_bytes / GIB == pytest.approx(6.09, abs=0.02)
    assert plan.max_num_seqs == plan.num_blocks // 521
    assert plan.blocks_for(100) == 2 * 7, "a short sequence costs KV in every layer"
    assert plan.num_tokens == plan.num_blocks // 2 * 16
    assert plan.longest == (plan.num_blocks - 9) * 16


def test_recurrent_state_is_reserved_per_sequence_and_bounds_them() -> None:
    hybrid = (LayerGroup("full", 6, 2, 128, 128), LayerGroup("state", 23, state_bytes=2 * MIB))
    model = shape(weights=GIB, groups=hybrid, max_position=4096)
    plan = planned(gpu(24), model, max_num_seqs=10)
    assert plan.state_bytes == (10 + 2 + 1) * 23 * 2 * MIB, "two for prefixes, one for padding rows"
    assert planned(gpu(24), model, max_num_seqs=10, enable_prefix_caching=False).state_bytes == 11 * 23 * 2 * MIB
    assert plan.max_num_seqs == 10
    assert planned(gpu(24), model, max_num_seqs=20).available_kv_bytes < plan.available_kv_bytes


def test_a_model_whose_layers_keep_nothing_known_is_refused() -> None:
    with pytest.raises(ModelError, match="neither attention layers nor a recurrent state"):
        planned(gpu(24), shape(groups=(LayerGroup("state", 4),)))


def test_recurrent_layers_alone_need_no_blocks() -> None:
    recurrent = shape(weights=GIB, groups=(LayerGroup("state", 64, state_bytes=2653696),), max_position=None)
    plan = planned(gpu(24), recurrent, max_num_seqs=20)
    assert plan.fits
    assert (plan.num_blocks, plan.kv_bytes_per_token, plan.state_bytes) == (0, 0, 26 * 169836544)
    assert (plan.num_seqs_at(512), plan.num_seqs_at(1 << 20), plan.num_admitted_at(512)) == (20, 20, 20)
    assert plan.available_kv_bytes == plan.budget_bytes - plan.fixed_bytes
    crowded = planned(gpu(24), recurrent, max_num_seqs=200)
    assert not crowded.fits
    assert crowded.max_num_seqs == 0
    assert "recurrent state" in str(crowded.problem)


def test_kv_dtype_halves_only_kv() -> None:
    device, config = gpu(24), EngineConfig(max_model_len=8192)
    same = plan_memory(shape(), config, device, dtype_bytes=2)
    half = plan_memory(shape(), config, device, dtype_bytes=2, kv_dtype_bytes=1)
    assert (half.weights_bytes, half.activation_bytes) == (same.weights_bytes, same.activation_bytes)
    assert (2 * half.block_bytes, 2 * half.kv_bytes_per_token) == (same.block_bytes, same.kv_bytes_per_token)
    assert half.num_blocks // 2 == same.num_blocks
    assert half.num_tokens // 2 == pytest.approx(same.num_tokens, abs=16)
    assert half.max_num_seqs // 2 == same.max_num_seqs


def test_every_layer_costs_a_short_sequence_kv() -> None:
    kinds = ("full", "window")
    groups = tuple(LayerGroup(kind, 18, 8, 64, 64, window=128 if kind == "window" else None) for kind in kinds)
    knobs = {"kv_cache_memory_bytes": int(5.38 * GIB)}
    short = planned(gpu(80), shape(weights=GIB, groups=groups), max_model_len=1, **knobs)
    plan = planned(gpu(80), shape(weights=GIB, groups=groups), max_model_len=4096, **knobs)
    assert short.block_bytes == 2 * plan.block_bytes == 16 * 73728, "with windows, a block of either kind of layer"
    assert plan.blocks_for(1) == 2
    for each in (short, plan):
        assert each.num_tokens == pytest.approx(78_300, rel=0.002)
        assert each.num_seqs_at(1) == each.num_tokens // 16


def test_the_message_shows_what_changed_was_memory_not_the_type() -> None:
    config = EngineConfig(kv_cache_memory_bytes=int(5.59 * GIB), max_model_len=131072)
    wide = plan_memory(shape(), config, gpu(80), dtype_bytes=2)
    narrow = plan_memory(shape(), config, gpu(80), dtype_bytes=2, kv_dtype_bytes=1)
    assert narrow.num_tokens // 2 == pytest.approx(wide.num_tokens, abs=16)
    assert "one request of 131072 tokens needs 16.0 GiB of KV, 5.59 GiB is available" in str(wide.problem)
    assert "one request of 131072 tokens needs 8.00 GiB of KV, 5.59 GiB is available" in str(narrow.problem)
    assert f"use at most {wide.num_tokens}" in str(wide.problem)
    assert f"use at most {narrow.num_tokens}" in str(narrow.problem)


def test_headroom_is_kept_by_the_fair_policy_alone() -> None:
    plan = planned(gpu(24), max_model_len=8192, headroom=0.2)
    assert plan.headroom_blocks == int(0.2 * plan.num_blocks)
    assert plan.num_admitted_at(1024) == min(128, (plan.num_blocks - plan.headroom_blocks) // 64)
    assert plan.num_admitted_at(plan.num_tokens) == 1
    assert planned(gpu(24), scheduling_policy="fcfs").headroom_blocks == 0


def test_attention_on_a_cpu_takes_memory_by_context() -> None:
    small = replace(shape(weights=GIB), heads=32, query_size=4096)
    short, long = (planned(cpu(60), small, max_model_len=length) for length in (512, 131072))
    assert long.activation_bytes > short.activation_bytes
    chosen = planned(cpu(60), small)
    assert (
        chosen.activation_bytes <= planned(cpu(60), small, max_model_len=chosen.max_model_len).activation_bytes * 1.001
    )
    assert planned(gpu(80), small).activation_bytes == planned(gpu(80), small, max_model_len=512).activation_bytes


def test_shape_from_a_config() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 256}
    found = model_shape(config, dtype_bytes=2)
    assert (found.vocab_size, found.hidden_size, found.inner_size, found.max_position) == (100, 64, 96, 256)
    given = Weights(12345, "given", True)
    assert model_shape(config, dtype_bytes=2, weights=given).weights is given
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    assert model_shape(config | experts | {"head_dim": 16}, dtype_bytes=2).inner_size == 4 * 48
    unsized = model_shape({**config, "model_type": "new", "vocab_size": None}, dtype_bytes=2, weights=given)
    assert not unsized.exact
    assert any("vocab_size" in note for note in unsized.notes)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 256),
    ],
)
def test_context_ends_where_rotary_embeddings_would_change_for_the_batch(rope: dict[str, Any], limit: int) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    found = model_shape(config | {"max_position_embeddings": 256} | rope, dtype_bytes=2)
    assert found.max_position == limit
    assert any("limited to" in note for note in found.notes) == (limit < 256)


# Invariants.


@st.composite
def situations(draw: st.DrawFn) -> tuple[ModelShape, dict[str, Any], DeviceMemory, int]:
    model = shape(
        weights=draw(st.integers(1, 60 * GIB)),
        groups=draw(st.sampled_from([(LayerGroup("full", 4, 2, 64, 64),), GPT_OSS_20B, shape().geometry.groups])),
        max_position=draw(st.integers(1, 1 << 20)),
    )
    knobs: dict[str, Any] = {
        "max_model_len": draw(st.integers(1, model.max_position or 1)),
        "gpu_memory_utilization": draw(st.floats(0.01, 1.0)),
        "block_size": draw(st.integers(1, 256)),
        "max_num_seqs": draw(st.integers(1, 1024)),
        "max_num_batched_tokens": draw(st.integers(1, 65536)),
    }
    total = draw(st.integers(GIB // 8, 200 * GIB))
    others = draw(st.integers(0, total))
    kind = draw(st.sampled_from(["cuda", "cpu"]))
    return model, knobs, DeviceMemory(kind, "any", total, others), draw(st.sampled_from([1, 2, 4]))


@given(situations(), st.integers(1, 1 << 16), st.integers(0, 16 * GIB))
def test_capacity_never_rises_with_what_costs_memory(
    situation: tuple[ModelShape, dict[str, Any], DeviceMemory, int], longer: int, headroom: int
) -> None:
    model, knobs, device, dtype_bytes = situation
    plan = planned(device, model, dtype_bytes, **knobs)
    unbounded = replace(model, max_position=1 << 30)
    fuller = replace(device, used_by_others=min(device.total, device.used_by_others + headroom))
    less = max(0.01, 0.9 * knobs["gpu_memory_utilization"])
    worse = [
        planned(device, unbounded, dtype_bytes, **{**knobs, "max_model_len": knobs["max_model_len"] + longer}),
        planned(device, model, 2 * dtype_bytes, **knobs),
        planned(fuller, model, dtype_bytes, **knobs),
        planned(device, model, dtype_bytes, **{**knobs, "gpu_memory_utilization": less}),
    ]
    assert all(other.max_num_seqs <= plan.max_num_seqs for other in worse)


@given(situations(), st.floats(0, 0.5), st.floats(0, 0.5))
def test_more_headroom_or_a_wider_kv_dtype_never_admits_more(
    situation: tuple[ModelShape, dict[str, Any], DeviceMemory, int], headroom: float, more: float
) -> None:
    model, knobs, device, dtype_bytes = situation
    length, less = knobs["max_model_len"], min(headroom, more)

    def plan(share: float, kv_bytes: int) -> MemoryPlan:
        config = EngineConfig(**knobs, headroom=share, max_headroom=0.9)
        return plan_memory(model, config, device, dtype_bytes=dtype_bytes, kv_dtype_bytes=kv_bytes)

    bold = plan(less, dtype_bytes)
    assert 0 <= plan(max(headroom, more), dtype_bytes).num_admitted_at(length) <= bold.num_admitted_at(length)
    wide = plan(less, 2 * dtype_bytes)
    assert 0 <= wide.max_num_seqs <= bold.max_num_seqs
    assert wide.num_admitted_at(length) <= bold.num_admitted_at(length)
    assert bold.num_admitted_at(length) <= min(bold.max_num_seqs, knobs["max_num_seqs"])
    assert wide.weights_bytes == bold.weights_bytes
    assert wide.num_blocks * wide.block_bytes <= wide.available_kv_bytes


@given(situations())
def test_plans_stay_inside_memory_and_say_why_they_do_not_fit(
    situation: tuple[ModelShape, dict[str, Any], DeviceMemory, int],
) -> None:
    model, knobs, device, dtype_bytes = situation
    plan = planned(device, model, dtype_bytes, **knobs)
    sizes = [value for value in dataclasses.astuple(replace(plan, problem=None)) if isinstance(value, int)]
    assert min(sizes) >= 0
    assert plan.num_blocks * plan.block_bytes <= plan.available_kv_bytes
    assert plan.fits == (plan.max_num_seqs >= 1 and plan.fixed_bytes + plan.available_kv_bytes <= device.free)
    if plan.fits:
        assert plan.fixed_bytes + plan.num_blocks * plan.block_bytes <= plan.budget_bytes
    else:
        assert not re.search(r" -\d", str(plan.problem))


LLAMA_FILE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 32,
    "rope_scaling": {"type": "linear"},
    "quantization_config": {"quant_method": "fp8"},
    "kv_lora_rank": None,
    "linear_num_value_heads": None,
}
odd = st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.floats(), st.text(max_size=3), st.lists(st.integers()))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(LLAMA_FILE)),
    odd | st.dictionaries(st.text(max_size=3), odd),
    st.sampled_from(["llama", "new"]),
)
def test_any_config_is_planned_or_refused_with_a_message(name: str, value: Any, family: str) -> None:
    content = LLAMA_FILE | {"model_type": family, name: value}
    for knobs in ({}, {"max_model_len": 64}):
        refusal = ""
        try:
            plan = ModelPlanner(content).plan(EngineConfig(**knobs), gpu(24))
            assert plan.num_blocks >= 0 <= plan.max_num_seqs
        except (ModelError, ConfigError) as problem:
            refusal = str(problem)
        assert "\n" not in refusal


def test_windows_are_grouped_if_requests_can_be_longer() -> None:
    groups = GPT_OSS_20B
    assert planned(gpu(40), shape(groups=groups)).layout == KVLayout(16, 1, 1, 128)
    assert planned(gpu(40), shape(groups=groups), max_model_len=120).layout == KVLayout(16)
