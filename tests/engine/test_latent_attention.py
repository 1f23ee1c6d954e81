"""Engines of models with latent attention: planned memory, and outputs from files however requests are scheduled."""

from __future__ import annotations

from typing import Any

import pytest

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.parity.verification import check_parity, load_for_parity


@pytest.mark.parametrize(("kind", "num_bytes"), [("auto", 4), ("fp8", 1)])
def test_the_cache_holds_what_kv_budget_counts(kind: str, num_bytes: int, tiny_model: Any) -> None:
    config = EngineConfig(
        model=str(tiny_model("deepseek_v3")),
        device="cpu",
        dtype="float32",
        kv_cache_dtype=kind,
        kv_cache_memory_bytes=1 << 20,
        max_model_len=128,
    )
    engine = build_engine(config)
    executor: Any = engine.executor
    plan = open_planner(config.model).plan(config, device_memory("cpu"))
    assert plan.block_bytes == 16 * 3 * (32 + 8) * num_bytes
    assert (plan.num_blocks, plan.activation_bytes) == (
        executor.num_blocks,
        engine.plan and engine.plan.activation_bytes,
    )
    assert executor.kv_cache_bytes == plan.kv_bytes
    assert executor.model_impl == "fused"
    assert engine.plan is not None
    assert engine.plan.measured is not None
    assert plan.weights_bytes <= engine.plan.measured.weights <= 1.02 * plan.weights_bytes


@pytest.mark.parametrize("arch", ["deepseek_v3", "minicpm3"])
def test_outputs_of_files_in_bfloat16(arch: str, tiny_model: Any) -> None:
    report = check_parity(
        load_for_parity(EngineConfig(model=str(tiny_model(arch)), device="cpu", dtype="bfloat16")),
        num_prompts=2,
        num_tokens=6,
    )
    assert report.model_impl == "fused"
    assert report.ok, report.checks
