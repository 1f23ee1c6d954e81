"""Changes that make a demand fit, and the longest context of so many users."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError, spell
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.engine.memory.remedies import (
    Change,
    MemoryDemand,
    changes,
    config_for_demand,
    longest_context,
    step_sizes,
)

GIB = 1 << 30
LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_8B |= {"max_position_embeddings": 131072}
PLANNER = ModelPlanner(LLAMA_8B)
GPUS = [("small", DeviceMemory("cuda", "small", 20 * GIB)), ("large", DeviceMemory("cuda", "large", 80 * GIB))]


def gpu(gib: float, **fields: Any) -> DeviceMemory:
    return DeviceMemory("cuda", "test GPU", int(gib * GIB), **fields)


def cpu(available_gib: float) -> DeviceMemory:
    return DeviceMemory("cpu", "test CPU", 64 * GIB, int((64 - available_gib) * GIB))


def search(device: DeviceMemory, users: int, context: int, **knobs: Any) -> list[Change]:
    config = config_for_demand(EngineConfig(**knobs), knobs, users, context)
    return changes(PLANNER, config, device, MemoryDemand(users, context), GPUS)


def first(found: list[Change], name: str) -> Change:
    return next(change for change in found if name in change.settings)


def check(found: list[Change], device: DeviceMemory, users: int, context: int, **knobs: Any) -> None:
    """Check that every change that keeps the demand meets it when it is made."""
    demand = MemoryDemand(users, context)
    config = config_for_demand(EngineConfig(**knobs), knobs, users, context)
    for change in found:
        if change.settings.keys() & {"gpu", "max_num_seqs"} or not change.settings:
            continue
        wanted = replace(demand, context=min(context, change.plan.max_model_len))
        assert wanted.met_by(PLANNER.plan(replace(config, **change.settings), device)), change.what


def test_a_checkpoint_that_is_quantised_is_not_quantised_again() -> None:
    nested = {"model_type": "a_model_that_sees", "text_config": LLAMA_8B | {"quantization_config": {"bits": 4}}}
    for content in (LLAMA_8B | {"compression_config": {"quant_method": "fp8"}}, nested):
        config = config_for_demand(EngineConfig(), {}, 50, 8192)
        found = changes(ModelPlanner(content), config, gpu(24), MemoryDemand(50, 8192), GPUS)
        assert found
        assert not any("quantization" in change.settings for change in found)


def test_a_demand_that_is_met() -> None:
    plan = PLANNER.plan(config_for_demand(EngineConfig(), {}, 32, 8192), gpu(80))
    assert MemoryDemand(32, 8192).met_by(plan)
    assert MemoryDemand(32, 8192).shortfall(plan) is None
    assert (plan.max_num_seqs_limit, plan.max_model_len) == (32, 8192)


def test_a_demand_that_is_not_met_is_told_in_blocks() -> None:
    plan = PLANNER.plan(config_for_demand(EngineConfig(), {}, 32, 8192), gpu(24))
    message = MemoryDemand(32, 8192).shortfall(plan)
    assert message.startswith("32 requests of 8,192 tokens need 32 x 512 = 16,384 blocks (32.0 GiB), there are ")


def test_utilisation_is_the_cheapest_and_the_least_that_suffices() -> None:
    found = search(gpu(24), 4, 8192, gpu_memory_utilization=0.8)
    cheapest = found[0]
    share = cheapest.settings["gpu_memory_utilization"]
    assert 0.8 < share <= 0.95
    check(found, gpu(24), 4, 8192, gpu_memory_utilization=0.8)
    less = config_for_demand(EngineConfig(gpu_memory_utilization=share - 0.01), {}, 4, 8192)
    assert not MemoryDemand(4, 8192).met_by(PLANNER.plan(less, gpu(24)))


def test_smaller_steps_where_activations_are_the_trouble() -> None:
    knobs = {"max_num_batched_tokens": 65536, "gpu_memory_utilization": 0.95}
    found = search(gpu(24), 6, 8192, **knobs)
    assert found[0].settings.keys() == {"max_num_batched_tokens"}
    step = found[0].settings["max_num_batched_tokens"]
    larger = config_for_demand(EngineConfig(**knobs | {"max_num_batched_tokens": 2 * step}), {}, 6, 8192)
    assert step == 16384 or not MemoryDemand(6, 8192).met_by(PLANNER.plan(larger, gpu(24)))
    check(found, gpu(24), 6, 8192, **knobs)


def test_fewer_sequences_where_their_state_is_the_trouble() -> None:
    sizes = {"num_hidden_layers": 64, "hidden_size": 2560, "vocab_size": 50288, "num_heads": 80, "head_dim": 64}
    state = {"state_size": 128, "n_groups": 1, "conv_kernel": 4, "expand": 2}
    planner, device = ModelPlanner({"model_type": "mamba2", **sizes, **state}), gpu(22)
    assert not planner.plan(EngineConfig(), device).fits
    cheapest = changes(planner, EngineConfig(), device, MemoryDemand(users=3, context=1000))[0]
    assert dict(cheapest.settings) == {"max_num_seqs": 64}
    assert cheapest.plan.fits


def test_narrower_types_suit_the_device() -> None:
    found = search(gpu(48), 12, 8192, dtype="float32", gpu_memory_utilization=0.95)
    wide = first(found, "dtype")
    assert wide.settings == {"dtype": "bfloat16"}
    narrow = search(gpu(24), 8, 8192)
    assert narrow[0].settings == {"kv_cache_dtype": "fp8"}
    older = search(gpu(48, computes_bf16=False), 12, 8192, gpu_memory_utilization=0.95)
    assert first(older, "dtype").settings == {"dtype": "float16"}


@pytest.mark.parametrize(
    ("computes_fp8", "gib", "users", "settings"),
    [
        (True, 23.5, 8, {"kv_cache_dtype": "fp8"}),
        (True, 23.5, 18, {"quantization": "int8", "kv_cache_dtype": "fp8"}),
        (False, 23.5, 18, {"quantization": "int8", "kv_cache_dtype": "fp8_e5m2"}),
        (False, 23.5, 8, {"kv_cache_dtype": "fp8_e5m2"}),
        (True, 12, 1, {"quantization": "int8"}),
        (True, 11, 4, {"quantization": "int4"}),
    ],
)
def test_lower_precision_comes_first(computes_fp8: bool, gib: float, users: int, settings: dict[str, str]) -> None:
    found = search(gpu(gib, computes_fp8=computes_fp8), users, 8192)
    assert found[0].settings == settings
    assert not any(change.settings.keys() & settings.keys() for change in found[1:])


def test_settings_together_where_none_suffices_alone() -> None:
    knobs = {"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 16384}
    config = config_for_demand(EngineConfig(**knobs), knobs, 12, 8192)
    measured = ModelPlanner(LLAMA_8B, given=PLANNER.shape(config, gpu(24)).weights)
    together = {"gpu_memory_utilization": 0.95, "max_num_batched_tokens": 256, "kv_cache_dtype": "fp8"}
    assert changes(measured, config, gpu(24), MemoryDemand(12, 8192))[0].settings == together
    assert MemoryDemand(12, 8192).met_by(measured.plan(replace(config, **together), gpu(24)))


def test_a_shorter_context_is_the_longest_that_fits() -> None:
    found = search(gpu(24), 8, 8192)
    context = first(found, "max_model_len").settings["max_model_len"]
    for length, wanted in ((context, True), (context + 16, False)):
        config = config_for_demand(EngineConfig(), {}, 8, length)
        assert MemoryDemand(8, length).met_by(PLANNER.plan(config, gpu(24))) == wanted
    check(found, gpu(24), 8, 8192)


def test_less_than_half_the_demand_comes_after_hardware() -> None:
    near, far = search(gpu(24), 8, 8192), search(gpu(24), 32, 8192)
    kinds = [next(iter(change.settings), "replicas") for change in near]
    assert kinds == ["kv_cache_dtype", "max_model_len", "max_num_seqs", "gpu", "replicas"]
    assert [next(iter(change.settings), "replicas") for change in far] == [
        "gpu",
        "replicas",
        "max_model_len",
        "max_num_seqs",
    ]
    assert near[3].settings == {"gpu": "large"}


def test_replicas_and_fewer_users() -> None:
    found = search(gpu(24), 32, 8192)
    plan = PLANNER.plan(config_for_demand(EngineConfig(), {}, 32, 8192), gpu(24))
    each = plan.num_seqs_at(8192)
    assert any(change.what == f"run {-(-32 // each)} of test GPU" for change in found)
    assert first(found, "max_num_seqs").settings == {"max_num_seqs": each}
    assert MemoryDemand(32, 8192).num_replicas(plan) == -(-32 // each)
    assert MemoryDemand(2, 8).num_replicas(PLANNER.plan(EngineConfig(), gpu(8))) is None


def test_explicit_sizes_are_raised_themselves() -> None:
    blocks = search(gpu(80), 4, 8192, num_gpu_blocks_override=100)
    assert blocks[0].settings == {"num_gpu_blocks_override": 4 * 512}
    size = search(gpu(80), 4, 8192, kv_cache_memory_bytes=GIB)
    assert size[0].settings == {"kv_cache_memory_bytes": 4 * GIB}
    host = search(cpu(60), 8, 8192)
    assert host[0].settings == {"kv_cache_memory_bytes": 8 * GIB}


def test_a_model_that_does_not_fit_at_all_gets_what_would_hold_it() -> None:
    found = changes(PLANNER, EngineConfig(), gpu(12), MemoryDemand(), GPUS)
    assert [change.settings for change in found] == [
        {"quantization": "int8"},
        {"gpu": "small"},
    ]
    tight = changes(PLANNER, EngineConfig(gpu_memory_utilization=0.5), gpu(24), MemoryDemand(), GPUS)
    assert tight[0].settings.keys() == {"gpu_memory_utilization"}
    assert PLANNER.plan(EngineConfig(**tight[0].settings), gpu(24)).fits
    assert changes(PLANNER, EngineConfig(), gpu(4), MemoryDemand(), []) == []


def test_the_longest_context_for_so_many_users() -> None:
    context = longest_context(PLANNER, EngineConfig(max_num_seqs=32), gpu(80), 32)
    for length, wanted in ((context, True), (context + 16, False)):
        plan = PLANNER.plan(EngineConfig(max_num_seqs=32, max_model_len=length), gpu(80))
        assert MemoryDemand(32, length).met_by(plan) == wanted
    assert longest_context(PLANNER, EngineConfig(), gpu(80), 1) == 131072
    assert longest_context(PLANNER, EngineConfig(), gpu(8), 1) is None
    assert longest_context(PLANNER, EngineConfig(), gpu(80), 1, below=100) == 99


def test_larger_steps_cost_blocks() -> None:
    plans = step_sizes(PLANNER, EngineConfig(max_num_batched_tokens=3000), gpu(24))
    sizes = [plan.max_num_batched_tokens for plan in plans]
    assert sizes == [256, 512, 1024, 2048, 3000, 4096, 8192, 16384]
    assert all(more.num_blocks <= less.num_blocks for less, more in pairwise(plans))
    lost = plans[-1].activation_bytes - plans[-2].activation_bytes
    assert plans[-2].num_blocks - plans[-1].num_blocks == pytest.approx(lost / plans[0].block_bytes, abs=1)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"context: 9000 tokens exceed max_model_len 8192"):
        config_for_demand(EngineConfig(max_model_len=8192), {}, None, 9000)
    with pytest.raises(ConfigError, match=r"users: 64 exceed max_num_seqs 32"):
        config_for_demand(EngineConfig(max_num_seqs=32), {"max_num_seqs": 32}, 64, None)
    assert config_for_demand(EngineConfig(max_num_seqs=64), {"max_num_seqs": 64}, 32, None).max_num_seqs == 64


@settings(max_examples=60, deadline=None)
@given(
    st.floats(8, 100),
    st.integers(1, 200),
    st.sampled_from([512, 4096, 8192, 65536]),
    st.floats(0.3, 1.0),
    st.sampled_from(["auto", "float32"]),
    st.booleans(),
)
def test_every_proposed_change_works(
    gib: float, users: int, context: int, utilisation: float, dtype: str, on_gpu: bool
) -> None:
    device = gpu(gib) if on_gpu else cpu(min(gib, 64))
    knobs: dict[str, Any] = {"gpu_memory_utilization": utilisation, "dtype": dtype}
    config = config_for_demand(EngineConfig(**knobs), knobs, users, context)
    demand = MemoryDemand(users, context)
    if demand.met_by(PLANNER.plan(config, device)):
        return
    check(search(device, users, context, **knobs), device, users, context, **knobs)


def test_experts_move_to_host_memory_where_weights_do_not_fit() -> None:
    """The change and the error name the fewest layers that suffice, and what a decode then copies."""
    content = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144}
    content |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    content |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
    content |= {"max_position_embeddings": 40960, "tie_word_embeddings": False}
    planner, demand = ModelPlanner(content), MemoryDemand(4, 8192)
    config, device = config_for_demand(EngineConfig(), {}, 4, 8192), replace(gpu(24), name="NVIDIA RTX 4090")
    found = first(changes(planner, config, device, demand, GPUS), "expert_offload")
    room = found.settings["expert_offload"]
    offloaded = planner.plan(replace(config, expert_offload=room), device)
    assert demand.met_by(offloaded)
    assert offloaded.offload is not None
    layers = len(offloaded.offload.layers)
    assert not demand.met_by(planner.plan(replace(config, expert_offload=room * (layers - 1) // layers), device))
    assert spell(found.what) == f"set expert_offload to {room >> 20}MiB"
    assert "each decode of 4 sequences copies " in found.cost
    problem = planner.plan(config, device).problem
    assert problem is not None
    assert re.search(
        r"; or set expert_offload to \d+MiB \(a decode of 1 sequence then copies .* of experts\)", str(problem)
    )
    dense = changes(PLANNER, config, gpu(12), demand, GPUS)
    assert not any("expert_offload" in change.settings for change in dense)
