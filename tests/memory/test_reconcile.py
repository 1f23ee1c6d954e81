"""Predicted against actual memory: measurement, the banner of serve, and ratios in profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsched.cli.profiles.apply import profile_settings, store_ratios
from llmsched.cli.serve.banner import predicted_and_actual, start_rows
from llmsched.engine.build import build_engine, tensor_bytes
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.graph_memory import CapturedGraphs
from llmsched.engine.memory.plan import MeasuredMemory, MemoryPlan, Reconciled, ratios, reconcile
from llmsched.engine.sampling_params import SamplingParams
from llmsched.profiles.tuned import TunedProfile, load_profile, save_profile


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Engine:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24}
    folder = str(tiny_model("qwen2", tie_word_embeddings=True))
    return build_engine(EngineConfig(model=folder, device="cpu", dtype="float32", kv_cache_dtype="bfloat16", **limits))


@pytest.fixture
def plan(engine: Engine) -> MemoryPlan:
    assert engine.plan is not None
    return engine.plan


def test_an_engine_measures_itself(plan: MemoryPlan) -> None:
    assert plan.measured is not None
    parts = {part.part: part for part in reconcile(plan, plan.measured)}
    assert parts.keys() == {"weights", "activations", "KV"}
    assert parts["KV"].ratio == 1
    assert parts["weights"].ratio == pytest.approx(1, abs=0.01)
    assert (parts["activations"].actual, parts["activations"].ratio) == (None, None)


def test_kv_has_a_type_of_its_own(engine: Engine, plan: MemoryPlan) -> None:
    assert (engine.config.dtype, engine.config.kv_cache_dtype) == ("float32", "bfloat16")
    assert (plan.dtype_bytes, plan.kv_dtype_bytes) == (4, 2)
    assert plan.block_bytes == 16 * 3 * 2 * 2 * 16 * 2
    executor: Any = engine.executor
    assert {tensor.dtype for tensor in executor._cache.keys} == {torch.bfloat16}
    engine.add_request("r", [5, 6, 7, 8] * 6, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    tokens = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 6


def test_shared_memory_counts_once() -> None:
    linear = torch.nn.Linear(8, 4, bias=False)
    tied = torch.nn.Linear(8, 4, bias=False)
    tied.weight = linear.weight
    model = torch.nn.Sequential(linear, tied)
    model.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    assert tensor_bytes(model) == 8 * 4 * 4 + 80


def test_a_gpu_has_a_context_too(plan: MemoryPlan) -> None:
    on_gpu = replace(plan, context_bytes=400)
    measured = MeasuredMemory(plan.weights_bytes, 5, activations=plan.activation_bytes // 2, context=300)
    context = reconcile(on_gpu, measured)[-1]
    assert (context.part, context.ratio) == ("CUDA context", 0.75)
    assert ratios(replace(on_gpu, measured=measured))["activations_ratio"] == 0.5
    assert ratios(replace(plan, measured=None)) == {}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Reconciled("weights", 1 << 20, 1 << 20), "1.00 MiB predicted, 1.00 MiB actual (1.000 of predicted)"),
        (Reconciled("activations", 1 << 20, None), "1.00 MiB predicted, not counted on a CPU"),
        (
            Reconciled("KV", 1 << 20, 3 << 19),
            "1.00 MiB predicted, 1.50 MiB actual (1.500 of predicted), more than planned",
        ),
        (Reconciled("weights", 0, 1024), "0 B predicted, 1.00 KiB actual"),
    ],
)
def test_ratio_and_exceeds(part: Reconciled, text: str) -> None:
    assert predicted_and_actual(part) == text


def test_the_banner_tells_it(engine: Engine) -> None:
    rows = dict(start_rows(engine, "m"))
    assert "predicted" in rows["weights"]
    assert "actual" in rows["weights"]
    assert rows["KV"].endswith("(1.000 of predicted)")
    assert " in bfloat16: 24 blocks of 16 tokens" in rows["KV cache"]


def test_the_banner_tells_of_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, mib = engine.plan, 1 << 20
    assert plan is not None
    assert plan.measured is not None
    assert "CUDA graphs" not in dict(start_rows(engine, "m"))
    graphs = CapturedGraphs(8, 128, 1.25, 150 * mib)
    captured = replace(plan, graph_bytes=200 * mib, measured=replace(plan.measured, graphs=graphs))
    monkeypatch.setattr(engine, "plan", captured)
    assert dict(start_rows(engine, "m"))["CUDA graphs"] == (
        "8 for steps of up to 128 decodes, captured in 1.2 s; 200 MiB predicted, 150 MiB actual (0.750 of predicted)"
    )
    assert ratios(captured)["graphs_ratio"] == 0.75
    monkeypatch.setattr(engine, "plan", replace(captured, measured=replace(plan.measured, graphs=None)))
    assert dict(start_rows(engine, "m"))["CUDA graphs"].startswith("none, because they could not be captured")


def test_the_banner_counts_tokens_in_all_groups_of_layers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(engine.plan, layout=KVLayout(engine.plan.block_size, 1, 2, 40))
    monkeypatch.setattr(engine, "plan", plan)
    told_tokens = dict(start_rows(engine, "m"))["KV cache"]
    assert f", {plan.num_blocks // 3 * plan.block_size} tokens in all layers; " in told_tokens


HERE = EngineConfig("demo", device="cpu")


def test_a_profile_keeps_the_ratios(plan: MemoryPlan, tmp_path: Path) -> None:
    path = str(tmp_path / "found.toml")
    save_profile(TunedProfile(engine={"max_num_seqs": 4}, reason="why"), path)
    assert store_ratios(path, plan, HERE) is None
    kept = load_profile(path)
    assert kept.memory == ratios(plan) == {"weights_ratio": pytest.approx(1, abs=0.01), "kv_ratio": 1.0}
    assert (kept.reason, profile_settings(path)) == ("why", {"max_num_seqs": 4})
    written = Path(path).stat().st_mtime_ns
    assert store_ratios(path, plan, HERE) is None
    assert Path(path).stat().st_mtime_ns == written, "nothing new, nothing written"


@pytest.mark.parametrize("found_for", [{"model": {"name": "other"}}, {"device": {"kind": "cuda", "name": "NVIDIA L4"}}])
def test_a_profile_of_another_keeps_none(plan: MemoryPlan, tmp_path: Path, found_for: dict[str, Any]) -> None:
    path = str(tmp_path / "found.toml")
    save_profile(TunedProfile(engine={}, memory={"kv_ratio": 0.9}, **found_for), path)
    assert store_ratios(path, plan, HERE) is None
    assert load_profile(path).memory == {"kv_ratio": 0.9}


def test_a_profile_that_cannot_be_read_is_predicted_and_actual(plan: MemoryPlan, tmp_path: Path) -> None:
    problem = store_ratios(str(tmp_path / "missing.toml"), plan, HERE)
    assert problem is not None
    assert "missing.toml" in problem
