"""Quantised Hugging Face checkpoints: the values, outputs and memory are those of each published format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PARITY_CHECKS
from quantised_files import FORMATS, Checkpoint, save_experts, save_quantised
from safetensors.torch import load_file, save_file
from stepping import Stepper, make_sequence

from llmsched.cli.serve.banner import start_rows
from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.architecture.weights import model_weights
from llmsched.engine.build import build_engine, tensor_bytes
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model.checkpoint import open_checkpoint
from llmsched.engine.model.loader import load_config, load_model
from llmsched.engine.model.packed_experts import PackedExperts
from llmsched.engine.model.packed_modules import PackedEmbedding, PackedLinear
from llmsched.engine.model.quantised_weights import dequantised_state_dict
from llmsched.engine.model.source import locate
from llmsched.engine.model.support import refusal_of_file
from llmsched.engine.parity.verification import check_parity, load_for_parity
from llmsched.kernels.packed_matrix import PackedMatrix

PROMPT = list(range(4, 44))
#: Formats with products of different kinds: tables, orders, offsets, fp8.
VERIFIED = ("fp8 block", "awq", "gptq order", "w8a8", "nf4 nested", "qwen3_moe fp8 block", "deepseek_v3 fp8 block")
#: Formats whose reference multiplies the factors of a scale in another order.
ROUNDED = {"bnb int8": 1e-6, "nf4 nested": 1e-6}


def load(path: Path, *, packed: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    source = locate(str(path))
    return load_model(source, load_config(source), device="cpu", dtype=dtype, packed=packed)


def packed_matrices(checkpoint: Checkpoint) -> dict[str, PackedMatrix]:
    content = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    matrices: dict[str, PackedMatrix] = {}
    stored = open_checkpoint(checkpoint.path)
    state = dequantised_state_dict(stored, content["quantization_config"], "m", matrices, torch.float32)
    for tensor in state.values():
        tensor.read()
    return matrices


def planned(path: Path, dtype_bytes: int = 4, **options: bool) -> Any:
    return model_weights(path, read_fields(json.loads((path / "config.json").read_text())), dtype_bytes, **options)


def loaded_bytes(model: Any) -> int:
    others = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name or "embed_scale" in name)
    return tensor_bytes(model) - others


def assert_logits_equal(model: Any, reference: Any, impl: Any = "auto") -> TorchExecutor:
    """Assert that the engine's logits for chunks of a prompt are those of a transformers model."""
    layout = KVLayout(16, full_groups=bool(kv_geometry(model.config).caches_kv))
    sizes: dict[str, Any] = {"num_blocks": 16, "block_size": 16, "layout": layout, "num_states": 1, "device": "cpu"}
    executor = TorchExecutor(model, **sizes, kv_dtype=torch.float32, model_impl=impl)
    [found] = Stepper(executor, [make_sequence("a", PROMPT)], 100).logits((7,))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    return executor


@pytest.mark.parametrize("case", FORMATS)
def test_values_logits_and_bytes_of_each_format(case: str, tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, case)
    matrices = packed_matrices(checkpoint)
    assert matrices.keys() == checkpoint.dense.keys()
    for name, dense in checkpoint.dense.items():
        torch.testing.assert_close(matrices[name].unpacked(), dense, rtol=ROUNDED.get(case, 0), atol=0)
    model = load(tmp_path)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == len(checkpoint.dense)
    weights = planned(tmp_path)
    held = {id(matrix.table): matrix.table.nbytes for matrix in matrices.values() if matrix.table is not None}
    assert weights.count + sum(held.values()) == loaded_bytes(model)
    assert weights.exact
    assert len(weights.packed_types) == 1
    assert_logits_equal(model, checkpoint.model)


@pytest.mark.parametrize(("arch", "sizes"), [("mamba", {"time_step_rank": 32}), ("qwen3_5", {})])
def test_recurrent_layers_of_quantised_checkpoints(arch: str, sizes: dict[str, int], tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, "fp8 row", arch, num_hidden_layers=3, **sizes)
    model = load(tmp_path)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert planned(tmp_path).count == loaded_bytes(model)
    assert_logits_equal(model, checkpoint.model)


@pytest.mark.parametrize("case", [*VERIFIED, "gpt_oss mxfp4"])
def test_outputs_stay_equal_under_every_schedule(case: str, tmp_path: Path) -> None:
    save = save_experts if case.startswith(("gpt_oss", "qwen3_moe", "deepseek")) else save_quantised
    checkpoint = save(tmp_path, case)
    loaded = load_for_parity(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert loaded.dequantised is not None
    torch.testing.assert_close(loaded.dequantised.state_dict(), checkpoint.model.state_dict(), rtol=1e-6, atol=0)
    report = check_parity(replace(loaded, dequantised=checkpoint.model), num_prompts=2, num_tokens=8)
    assert tuple(check.name for check in report.checks) == PARITY_CHECKS
    assert report.model_impl == "fused"
    for check in report.checks:
        assert check.ok, check
        assert check.tokens_equal, check


@pytest.mark.parametrize(
    ("case", "arch", "overrides"),
    [
        ("gptq order", "qwen2", {}),  # biases
        ("awq", "phi3", {}),  # queries, keys and values in one matrix, and gate and up in one
        ("fp8 block", "gemma2", {}),
        ("int4 group", "qwen3", {"tie_word_embeddings": True}),
        ("w8a8", "gpt_neox", {}),
        ("nf4", "starcoder2", {}),
    ],
)
def test_other_architectures(case: str, arch: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, case, arch, **overrides)
    model = load(tmp_path)
    assert_logits_equal(model, checkpoint.model)
    tables = sum(part.nbytes for name, part in model.named_buffers() if name.endswith("table"))
    assert planned(tmp_path).count == loaded_bytes(model) - tables


def test_modules_that_are_not_quantised_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, "awq", only="mlp")
    model = load(tmp_path)
    assert {name.rpartition(".")[2] for name in checkpoint.dense} == {"weight"}
    kept = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert len(kept) == 6
    assert all("mlp" in name for name in kept)
    assert assert_logits_equal(model, checkpoint.model, "fused").model_impl == "fused"


@pytest.mark.parametrize(("case", "arch"), [("ct fp8 channel", "qwen2"), ("nf4", "gemma")])
def test_quantised_embeddings_and_lm_head(case: str, arch: str, tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, case, arch, vocabulary=True, tie_word_embeddings=False)
    model = load(tmp_path)
    assert {type(model.get_input_embeddings()), type(model.lm_head)} == {PackedEmbedding, PackedLinear}
    assert_logits_equal(model, checkpoint.model)


def test_pickled_checkpoints(tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    assert_logits_equal(load(tmp_path), checkpoint.model)


@pytest.mark.parametrize("impl", ["fused", "transformers"])
def test_experts_in_mxfp4_stay_quantised(impl: Any, tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path, "gpt_oss mxfp4")
    model = load(tmp_path)
    kept = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(kept) == 3
    assert assert_logits_equal(model, checkpoint.model, impl).model_impl == impl
    weights = planned(tmp_path)
    assert weights.count == pytest.approx(loaded_bytes(model), rel=0.002)
    wide = "not quantised: lm_head, embeddings, other matrices (32 bits)"
    assert weights.notes == ("matrices in mxfp4 stay quantised", wide)
    unpacked = kept[0].up.matrix.unpacked().view(4, -1, 64)
    assert torch.equal(unpacked, checkpoint.dense["model.layers.0.mlp.experts.gate_up_proj"].transpose(1, 2))
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(load(tmp_path, packed=False).get_parameter(name), checkpoint.dense[name])


@pytest.mark.parametrize(
    ("case", "impl"),
    [
        ("qwen3_moe fp8 block", "fused"),
        ("qwen3_moe fp8 block", "transformers"),
        ("olmoe awq", "fused"),
        ("mixtral fp8 block", "fused"),
        ("mixtral int4 group", "fused"),
        ("mixtral gptq order", "fused"),
        ("qwen3_moe gptq order", "transformers"),
        ("qwen3_moe gptq sym", "fused"),
        ("glm4_moe nf4", "fused"),
        ("deepseek_v3 fp8 block", "fused"),
        ("deepseek_v3 gptq sym", "transformers"),
        ("deepseek_v2 awq", "fused"),
    ],
)
def test_single_experts_are_joined_and_stay_quantised(case: str, impl: Any, tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path, case)
    model = load(tmp_path)
    number = sum(name.endswith(("experts.0.down_proj.weight", "experts.0.w2.weight")) for name in checkpoint.dense)
    assert sum(isinstance(module, PackedExperts) for module in model.modules()) == number > 0
    assert assert_logits_equal(model, checkpoint.model, impl).model_impl == impl
    weights = planned(tmp_path)
    assert weights.count == pytest.approx(loaded_bytes(model), rel=0.01)
    assert "experts are dequantised on loading" not in weights.notes
    content = json.loads((tmp_path / "config.json").read_text())
    assert model_weights(None, read_fields(content), 4).count == pytest.approx(weights.count, rel=0.02)
    dense = load(tmp_path, packed=False)
    assert_logits_equal(dense, checkpoint.model)


def test_experts_whose_gate_and_up_have_other_orders_are_dequantised(tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path, "qwen3_moe gptq order apart")
    model = load(tmp_path)
    assert not [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert_logits_equal(model, checkpoint.model)
    weights = planned(tmp_path)
    assert weights.count == pytest.approx(loaded_bytes(model), rel=0.002)
    assert "experts are dequantised on loading" in weights.notes
    assert planned(tmp_path, packed=False).count < 0.7 * weights.count


@pytest.mark.parametrize("expert", [1, 3])
def test_experts_of_which_one_is_not_quantised_are_dequantised(expert: int, tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path, "qwen3_moe fp8 block")
    file, prefix = tmp_path / "model.safetensors", f"model.layers.0.mlp.experts.{expert}."
    state = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(prefix)}
    save_file(state | {name: part for name, part in checkpoint.dense.items() if name.startswith(prefix)}, file)
    model = load(tmp_path)
    assert sum(isinstance(module, PackedExperts) for module in model.modules()) == 2
    assert_logits_equal(model, checkpoint.model)
    assert planned(tmp_path).count == pytest.approx(loaded_bytes(model), rel=0.01)


def test_kv_budget_and_serve_plan_the_same(tmp_path: Path) -> None:
    save_quantised(tmp_path, "gptq")
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 22, max_model_len=128)
    engine = build_engine(config)
    assert engine.plan is not None
    assert engine.plan.measured is not None
    plan = open_planner(str(tmp_path)).plan(config, engine.plan.device)
    assert (plan.weights_bytes, plan.activation_bytes) == (engine.plan.weights_bytes, engine.plan.activation_bytes)
    assert plan.weights_bytes <= engine.plan.measured.weights <= 1.02 * plan.weights_bytes
    assert "matrices in int4 stay quantised" in plan.notes
    assert "quantised weights (int4; not quantised: embeddings)" in dict(start_rows(engine, "tiny"))["model"]


@pytest.mark.parametrize(
    "case", ["fp8 block", "awq", "gptq", "gptq sym", "int4 group", "int4 asym", "ct nvfp4", "ct mxfp4", "nf4", "nvfp4"]
)
def test_without_files_the_config_tells_the_bytes(case: str, tmp_path: Path) -> None:
    save_quantised(tmp_path, case)
    content = json.loads((tmp_path / "config.json").read_text())
    assert model_weights(None, read_fields(content), 2).count == pytest.approx(planned(tmp_path, 2).count, rel=0.02)


def test_half_precision(tmp_path: Path) -> None:
    checkpoint = save_quantised(tmp_path, "fp8 row")
    kept, dense = (load(tmp_path, packed=choice, dtype=torch.bfloat16) for choice in (True, False))
    assert planned(tmp_path, 2).count == loaded_bytes(kept)
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(dense.get_submodule(name).weight, checkpoint.dense[f"{name}.weight"].to(torch.bfloat16))
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(kept.get_submodule(name)(rows), dense.get_submodule(name)(rows), rtol=0.02, atol=0.02)


Change = Callable[[dict[str, torch.Tensor]], Any]
UP = "model.layers.1.mlp.up_proj"


def dropped(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{UP}.{part}": change(tensors[f"{UP}.{part}"]).contiguous()})


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        ("fp8 block", dropped("weight_scale_inv"), "its quantised weight has no weight_scale_inv or weight_scale"),
        ("fp8 block", changed("weight_scale_inv", lambda t: t[:1]), r"weight_scale has shape \(1, 2\) instead of"),
        ("fp8 tensor", changed("weight_scale", lambda t: t * torch.nan), "scales of .* are not finite"),
        ("awq", dropped("qzeros"), "no qzeros"),
        ("awq", changed("scales", lambda t: t[:, :8]), r"scales has shape \(2, 8\) instead of \(2, 96\)"),
        ("awq", changed("qweight", lambda t: t.short()), "qweight has type I16 instead of I32"),
        ("gptq", changed("qweight", lambda t: t[:4]), r"g_idx has shape \(64,\) instead of \(32,\)"),
        ("gptq", changed("qzeros", lambda t: t[:, :2]), "qzeros has shape"),
        ("gptq sym", changed("qzeros", lambda t: t + 1), "zero points that differ"),
        ("gptq order", changed("g_idx", lambda t: t.clamp(max=0) + 1), "g_idx does not divide 64 columns into 2"),
        ("int4 group", dropped("weight_shape"), "no weight_shape"),
        ("int4 group", changed("weight_shape", lambda t: t * 3), "weight_packed has shape"),
        ("w8a8", dropped("weight_scale"), "no SCB or weight_scale"),
        ("nf4", dropped("weight.quant_state.bitsandbytes__nf4"), "no weight.quant_state"),
        ("nf4", changed("weight.absmax", lambda t: t[:3]), "do not fit 96 x 64"),
        ("nvfp4", dropped("weight_scale_2"), "no weight_global_scale or weight_scale_2"),
        ("ct mxfp4", changed("weight_scale", lambda t: t[:, :1]), "weight_scale has shape"),
    ],
)
def test_damaged_checkpoints_are_named(case: str, damage: Change, message: str, tmp_path: Path) -> None:
    save_quantised(tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert UP in str(caught.value)


def test_an_unknown_weight_of_a_module_is_named(tmp_path: Path) -> None:
    save_quantised(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {f"{UP}.ghost": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensors that the model lacks: {UP}.ghost"):
        load(tmp_path)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("case", FORMATS)
def test_the_config_alone_says_that_a_format_is_served(case: str) -> None:
    assert refusal_of_file({**LLAMA, "quantization_config": FORMATS[case][0]}) == (True, None)
