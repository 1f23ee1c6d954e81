"""KV in fp8: the engine's output is that of transformers with rounded keys and values, however it is scheduled."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import ENGINES, facts, requests
from engines import EOS, Choice, generate_all, make_engine, tokenizer
from quantised_files import save_quantised
from safetensors.torch import load_file, save_file
from tiny_models import MAX_POSITION, VOCAB_SIZE, build_model

from llmsched.engine.architecture.dtypes import check_kv_dtype, kv_refusal, planned_kv_dtype
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory, gpu_device
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model import kv_scales as scales
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.parity import verification
from llmsched.engine.parity.logit_comparison import ParityReport, kl_divergence
from llmsched.engine.parity.verification import LoadedModel, check_parity
from llmsched.kernels.cpu import ops
from llmsched.kernels.fp8 import FP8_TYPES
from llmsched.profiles.gpus import find_gpu


def parity(model: Any, kv_cache_dtype: str = "fp8", dtype: torch.dtype = torch.float32) -> ParityReport:
    info = ModelInfo("m", "m", VOCAB_SIZE, MAX_POSITION, frozenset({EOS}))
    subject = LoadedModel(model.to(dtype), info, tokenizer(), "cpu", dtype, kv_cache_dtype=kv_cache_dtype)
    return check_parity(subject, num_prompts=3, num_tokens=8)


#: With windows, soft-capping, sinks, norms of keys, keys without rotary embedding, and attention of their own.
@pytest.mark.parametrize(
    "arch", ["qwen3", "gemma2", "gemma3", "gpt_oss", "gpt2", "bloom", "falcon_new", "stablelm", "deepseek_v3"]
)
def test_logits_are_those_of_transformers_with_rounded_kv(arch: str) -> None:
    report = parity(build_model(arch, seed=3))
    assert report.ok, report.checks
    assert report.rounding is not None
    assert report.rounding.largest > 1e-3
    assert max(check.max_abs_logit_diff or 1 for check in report.checks) < report.rounding.largest


@pytest.mark.parametrize(("kind", "dtype"), [("fp8_e5m2", torch.float32), ("fp8_e4m3", torch.bfloat16)])
def test_other_types(kind: str, dtype: torch.dtype) -> None:
    assert parity(build_model("llama", seed=3), kind, dtype).ok


def test_e4m3_is_more_precise_than_e5m2() -> None:
    found = [parity(build_model("llama", seed=3), kind).rounding for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert found[0] is not None
    assert found[1] is not None
    assert 0 < 2 * found[0].kl < found[1].kl


@pytest.mark.parametrize("row", [0, 1])
def test_a_forgotten_scale_is_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.paged_attention

    def wrong(*tensors: torch.Tensor, kv_scales: torch.Tensor | None, **options: Any) -> torch.Tensor:
        if kv_scales is not None:  # None: while scales are measured
            kv_scales = kv_scales.clone()
            kv_scales[row] *= 2
        return right(*tensors, kv_scales=kv_scales, **options)

    monkeypatch.setattr(ops, "paged_attention", wrong)
    assert not any(check.ok for check in parity(build_model("llama", seed=3)).checks)


@cache
def expected_outputs(arch: str, kv_dtype: torch.dtype) -> list[list[Choice]]:
    return generate_all(make_engine(arch, kv_dtype=kv_dtype, enable_prefix_caching=False), *requests())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [*((name, FP8_TYPES[0]) for name in ENGINES), ("swap", FP8_TYPES[1])], ids=str
)
def test_tokens_do_not_depend_on_scheduling(name: str, kv_dtype: torch.dtype, graphs: bool) -> None:
    """Chunks, prefix hits, recomputation, swap, windows, looking ahead and graphs."""
    arch, settings = ENGINES[name]
    expected = expected_outputs(arch, kv_dtype)
    engine = make_engine(arch, kv_dtype=kv_dtype, looks_ahead=graphs, graphs=graphs, **settings)
    found = generate_all(engine, *requests())
    assert [[facts(choice) for choice in choices] for choices in found] == [
        [facts(choice) for choice in choices] for choices in expected
    ]
    stats = engine.stats()
    assert (stats.num_preemptions > 0) is (settings.get("num_blocks", 0) > 0)
    assert (stats.num_swapped_in > 0) is (name == "swap")


def test_large_keys_are_not_cut_off() -> None:
    """Biases like Qwen2's make keys larger than any number of e4m3."""
    model = build_model("qwen2", seed=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias += 3000 * torch.randn(layer.self_attn.k_proj.bias.shape)
            layer.self_attn.q_proj.weight /= 3000
            layer.self_attn.q_proj.bias /= 3000
    measured = parity(model)
    assert measured.ok
    assert measured.rounding is not None
    assert measured.rounding.kl < 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales, "power_of_two", torch.ones_like)
        cut_off = parity(model).rounding
    assert cut_off is not None
    assert cut_off.kl > 10 * measured.rounding.kl


def test_twice_as_many_tokens_fit(tiny_model: Any) -> None:
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", dtype="bfloat16", kv_cache_memory_bytes=100 * 6144
    )
    wide, narrow = (build_engine(replace(config, kv_cache_dtype=kind)) for kind in ("auto", "fp8"))
    assert wide.plan is not None
    assert narrow.plan is not None
    assert (wide.plan.num_blocks, narrow.plan.num_blocks) == (100, 200)
    executor: Any = narrow.executor
    assert executor.kv_cache_bytes == narrow.plan.kv_bytes == narrow.plan.num_blocks * narrow.plan.block_bytes
    assert {tensor.dtype for tensor in executor._cache.values} == {torch.float8_e4m3fn}
    assert narrow.config.kv_cache_dtype == "fp8"


# Scales.


def test_measured_scales_hold_each_heads_largest_numbers() -> None:
    executor = TorchExecutor(
        build_model("llama", seed=3), num_blocks=8, block_size=16, device="cpu", kv_dtype=torch.float8_e4m3fn
    )
    found = executor._cache.scales
    assert found is not None
    for each in found:
        assert each.shape == (2, 2)
        assert torch.equal(each.log2(), each.log2().round())
    plain = TorchExecutor(
        build_model("llama", seed=3), num_blocks=8, block_size=16, device="cpu", kv_dtype=torch.float32
    )
    plain.execute(plain.rehearsal([(0, 100)]))
    for layer, each in enumerate(found):
        for row, tensor in enumerate(plain._cache.of_layer(layer)[:2]):
            largest = tensor.abs().amax((0, 2, 3))
            assert (largest < 448 / 2 * each[row]).all()
            assert (largest > 448 / 64 * each[row]).all()


def test_scales_of_the_checkpoint_are_rounded_up(tiny_model: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    prefix = "model.layers.{}.self_attn."
    state[prefix.format(0) + "k_proj.k_scale"] = torch.tensor(0.3)
    state[prefix.format(0) + "attn.v_scale"] = torch.tensor([2.0])
    state[prefix.format(2) + "kv_scale"] = torch.tensor([0.1, 5.0])
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_dtype="fp8", max_model_len=64)
    executor: Any = build_engine(config).executor
    found = executor._cache.scales
    assert found[0].tolist() == [[0.5, 0.5], [2.0, 2.0]]
    assert found[2].tolist() == [[0.125, 8.0], [0.125, 8.0]]
    plain: Any = build_engine(replace(config, kv_cache_dtype="auto")).executor
    assert plain._cache.scales is None
    loaded = verification.load_for_parity(config)
    assert len(loaded.checkpoint_scales) == 4
    state[prefix.format(1) + "k_scale"] = torch.tensor([1.0, 0.0])
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"scale of the keys of layer 1 is \[1\.0, 0\.0\]; allowed is one"):
        build_engine(config)
    state[prefix.format(1) + "k_scale"] = torch.tensor(1.0)
    state[prefix.format(3) + "k_scale"] = torch.tensor(1.0)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="has a KV scale of layer 3, but the model has 3 layers"):
        build_engine(config)


def test_a_quantised_checkpoint_asks_for_fp8(tmp_path: Path) -> None:
    folder = save_quantised(tmp_path / "model", "modelopt fp8").path
    state, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    state |= {f"model.layers.{layer}.self_attn.k_proj.k_scale": torch.tensor(0.4) for layer in (0, 1)}
    save_file(state, folder / "model.safetensors")
    settings["quantization_config"]["kv_cache_quant_algo"] = "FP8"
    (folder / "config.json").write_text(json.dumps(settings))
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=64)
    engine = build_engine(config)
    executor: Any = engine.executor
    assert engine.config.kv_cache_dtype == "fp8"
    assert [each[0].tolist() for each in executor._cache.scales] == [[0.5, 0.5]] * 2
    planned, plan = open_planner(str(folder)).resolve(config, device_memory("cpu"))
    assert (planned.kv_cache_dtype, plan.block_bytes) == ("fp8", executor.kv_cache_bytes // executor.num_blocks)
    report = check_parity(verification.load_for_parity(config), num_prompts=2, num_tokens=4)
    assert report.ok
    assert report.rounding is not None


@pytest.mark.parametrize("found", [("fp8", True), ("fp8_e4m3", True), ("fp8_e5m2", False), ("bfloat16", False)])
def test_gpus_before_ada_cannot_convert_e4m3(found: tuple[str, bool]) -> None:
    kind, refused = found
    for name, too_old in (("a100-40gb", True), ("rtx3090", True), ("l4", False), ("h100", False)):
        reason = kv_refusal(kind, gpu_device(find_gpu(name)))
        assert (reason is not None) == (refused and too_old), name
    assert kv_refusal(kind, device_memory("cpu")) is None
    older = gpu_device(find_gpu("a100-40gb"))
    assert planned_kv_dtype(EngineConfig(), "bfloat16", older, checkpoint_fp8=True) == "bfloat16"
    if refused:
        with pytest.raises(ConfigError, match=r"kv_cache_dtype: NVIDIA A100.* use fp8_e5m2, or bfloat16"):
            check_kv_dtype(kind, older)


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        ("model.layers.3.self_attn.k_scale", [(3, 0)]),
        ("model.layers.3.self_attn.attn.v_scale", [(3, 1)]),
        ("model.layers.11.self_attn.k_proj.k_scale", [(11, 0)]),
        ("model.layers.11.self_attn.v_proj.output_scale", [(11, 1)]),
        ("model.layers.1.self_attn.kv_scale", [(1, 0), (1, 1)]),
        ("model.layers.1.self_attn.q_proj.output_scale", []),
        ("model.layers.1.self_attn.k_proj.weight_scale", []),
        ("model.layers.1.self_attn.k_proj.weight", []),
    ],
)
def test_names_of_scales(tensor: str, wanted: list[tuple[int, int]]) -> None:
    assert scales.scale_names(tensor) == wanted


def test_powers_of_two() -> None:
    numbers = torch.tensor([1.0, 1.0001, 0.75, 0.5, 3e-5, 0.0, float("inf"), float("nan")])
    assert scales.power_of_two(numbers).tolist() == [1.0, 2.0, 1.0, 0.5, 2.0**-15, 1.0, 1.0, 1.0]


def test_kl_divergence_is_torchs() -> None:
    logits, others = torch.randn(2, 5, 40).unbind(0)
    wanted = torch.nn.functional.kl_div(
        others.log_softmax(1), logits.log_softmax(1), reduction="none", log_target=True
    ).sum(1)
    torch.testing.assert_close(kl_divergence(logits, others).float(), wanted)
