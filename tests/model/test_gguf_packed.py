"""Quantised GGUF matrices stay quantised, and the model computes the same as with dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import CASES, write_gguf
from stepping import Stepper, make_sequence
from tiny_models import build_model, build_tokenizer

from llmsched.cli.serve.banner import start_rows
from llmsched.engine.build import build_engine, tensor_bytes
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.planner import gguf_weights, open_planner
from llmsched.engine.model.gguf_file import GGUFTensor, parse_gguf, read_gguf
from llmsched.engine.model.gguf_packed import PACKINGS, packed
from llmsched.engine.model.loader import load_config, load_model
from llmsched.engine.model.packed_experts import PackedExperts
from llmsched.engine.model.packed_modules import PackedEmbedding, PackedLinear
from llmsched.engine.model.source import locate
from llmsched.kernels.dispatch import num_compiled

Q = GGMLQuantizationType
#: Bytes at which the float16 scales of a block begin, by type.
SCALES = {Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q8_0: (0,)}
SCALES |= {Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.IQ4_NL: (0,), Q.IQ4_XS: (0,), Q.MXFP4: ()}
#: Cases of gguf_files with matrices of all roles.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3")
PACKED_CASES = ("llama tied", "llama untied", "llama biases", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")


def mixed(name: str) -> GGMLQuantizationType | None:
    """Return a type for each matrix, as files in "Q4_K_M" mix them."""
    if "norm" in name:
        return None
    if "ffn_up_exps" in name or "ffn_gate_exps" in name:
        return Q.MXFP4
    return Q.Q8_0 if "attn_v" in name or "ffn_down" in name else Q.Q5_1 if "token_embd" in name else Q.Q4_0


@pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name)
def test_values_are_those_that_gguf_defines(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (24, 512)
    data = rng.integers(0, 256, (shape[0] * shape[1] // block, block_bytes), dtype=np.uint8)
    for start in SCALES[kind]:  # any other bytes are valid
        data[:, start : start + 2] = rng.normal(size=(len(data), 1)).astype(np.float16).view(np.uint8)
    if kind == Q.MXFP4:  # an exponent
        data[:, 0] %= 200
    data = data.reshape(shape[0], -1)
    file: Any = SimpleNamespace(tensors={"matrix": GGUFTensor(shape, kind, data)})
    matrix = packed(file, "matrix")
    np.testing.assert_array_equal(matrix.unpacked().numpy(), gguf.dequantize(data, kind))
    num_bytes = sum(part.nbytes for part in matrix[:3] if part is not None)
    assert num_bytes == PACKINGS[kind].bytes_per_weight * shape[0] * shape[1]


def test_scales_that_are_not_finite_are_refused() -> None:
    data = np.zeros((1, 34), np.uint8)
    data[:, :2] = np.float16([np.inf]).view(np.uint8)
    file: Any = SimpleNamespace(path="a.gguf", tensors={"m": GGUFTensor((1, 32), GGMLQuantizationType.Q8_0, data)})
    with pytest.raises(ModelError, match=r"a\.gguf: scales of m are not finite"):
        packed(file, "m")


def tiny(tmp_path: Path, case: str = "llama tied", quantisation: Any = mixed) -> Path:
    name, arch, overrides = CASES[case]
    model = build_model(name, **overrides)
    return write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch=arch, quantisation=quantisation)


def load(path: Path, *, packed: bool, dtype: torch.dtype = torch.float32) -> Any:
    source = locate(str(path))
    return load_model(source, load_config(source), device="cpu", dtype=dtype, packed=packed)


def executor(model: Any, impl: Any = "auto") -> TorchExecutor:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "device": "cpu"}
    return TorchExecutor(model, **sizes, kv_dtype=torch.float32, model_impl=impl)


def generated(
    made: TorchExecutor, count: int = 60, num_sequences: int = 3, chunk: int = 1000
) -> list[list[tuple[int, float]]]:
    """Return the greedy tokens that follow some prompts, with their log-probabilities."""
    sequences = [make_sequence(str(number), list(range(4, 24 + number)), logprobs=1) for number in range(num_sequences)]
    stepper = Stepper(made, sequences, 100)
    stepper.generate(count, (chunk,))
    return [[(row.token_id, row.logprob.logprob) for row in rows if row.logprob] for rows in stepper.results]


def assert_same(found: list[list[tuple[int, float]]], expected: list[list[tuple[int, float]]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        np.testing.assert_allclose([value for _, value in one], [value for _, value in other], atol=1e-4)


@pytest.mark.parametrize("case", [*PACKED_CASES, *MIXTURES])
def test_tokens_and_logits_equal_those_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    path = tiny(tmp_path, case)
    count = 60 if case == "llama tied" else 10
    kept, dense = (generated(executor(load(path, packed=choice), "fused"), count) for choice in (True, False))
    assert len(dense[0]) >= count
    assert_same(kept, dense)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_the_plan_counts_experts_as_they_are_loaded(case: str, tmp_path: Path) -> None:
    model = load(tiny(tmp_path, case), packed=True)
    assert any(isinstance(module, PackedExperts) for module in model.modules())
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name)
    tables += sum(each.table.nbytes for each in model.modules() if getattr(each, "table", None) is not None)
    assert gguf_weights(tmp_path / "tiny.gguf", 4).count == tensor_bytes(model) - tables


def test_experts_of_which_only_some_matrices_are_quantised_are_dequantised(tmp_path: Path) -> None:
    path = tiny(tmp_path, "qwen3_moe", lambda name: Q.F16 if "ffn_down_exps" in name else mixed(name))
    model = load(path, packed=True)
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name)
    assert gguf_weights(path, 4).count == tensor_bytes(model) - tables
    assert_same(generated(executor(model), 20), generated(executor(load(path, packed=False)), 20))


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ3_S", "TQ1_0"])
def test_types_of_few_bits_are_refused_by_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path)
    metadata, tensors = parse_gguf(path)
    name = "blk.0.ffn_down.weight"
    tensors[name] = replace(tensors[name], tensor_type=Q[kind])
    monkeypatch.setattr("llmsched.engine.model.gguf_file.parse_gguf", lambda _: (metadata, tensors))
    with pytest.raises(
        ModelError, match=rf"{name} is quantised as {kind}, which is not supported; use a file of .*Q4_K_M"
    ):
        read_gguf(path)


@pytest.mark.parametrize("impl", ["fused", "transformers"])
def test_chunks_that_sample_nothing(impl: str, tmp_path: Path) -> None:
    path = tiny(tmp_path)
    kept, dense = (generated(executor(load(path, packed=choice), impl), 3, 1, chunk=7) for choice in (True, False))
    assert_same(kept, dense)


def test_the_plan_has_the_bytes_that_are_loaded(tmp_path: Path) -> None:
    path = tiny(tmp_path, "llama untied")
    model = load(path, packed=True)
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name)
    assert gguf_weights(path, 4).count == tensor_bytes(model) - tables
    assert gguf_weights(path, 4).packed_types == ("Q4_0", "Q5_1", "Q8_0")
    assert {type(module) for module in model.modules()} >= {PackedLinear, PackedEmbedding}
    assert not [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    config = EngineConfig(model=str(path), device="cpu", kv_cache_memory_bytes=1 << 22, max_model_len=128)
    engine = build_engine(config)
    assert engine.plan is not None
    assert engine.plan.measured is not None
    assert engine.plan.weights_bytes == gguf_weights(path, 4 if engine.config.dtype == "float32" else 2).count
    assert engine.plan.measured.weights <= 1.02 * engine.plan.weights_bytes
    assert "quantised weights (Q4_0, Q5_1, Q8_0)" in dict(start_rows(engine, "tiny"))["model"]
    planned = open_planner(str(path)).plan(config, engine.plan.device)
    assert (planned.weights_bytes, planned.activation_bytes) == (
        engine.plan.weights_bytes,
        engine.plan.activation_bytes,
    )
    assert "stay quantised" in " ".join(planned.notes)
    on_gpu = open_planner(str(path)).plan(config, DeviceMemory("cuda", "GPU", 8 << 30))
    assert on_gpu.weights_bytes == planned.weights_bytes


def test_other_types_are_dequantised(tmp_path: Path) -> None:
    path = tiny(tmp_path, quantisation=Q.F16)
    model = load(path, packed=True)
    assert not [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert gguf_weights(path, 4).packed_types == ()


def test_projections_of_which_only_some_are_quantised_run_through_transformers(tmp_path: Path) -> None:
    path = tiny(tmp_path, quantisation=lambda name: None if "attn_v" in name else mixed(name))
    made = executor(load(path, packed=True))
    assert made.model_impl == "transformers"
    assert_same(generated(made, 20), generated(executor(load(path, packed=False)), 20))


def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path) -> None:
    made = executor(load(tiny(tmp_path), packed=True))
    made.warmup(128, 8, 512)
    before = num_compiled()
    for count in (1, 2, 3, 5, 8):
        generated(made, 2, count)
    assert num_compiled() == before
