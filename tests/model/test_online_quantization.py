"""Rounding of a checkpoint's matrices on loading: nearest numbers, planned bytes, equal tokens, measured loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import capture_fake_graphs
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import build_model, build_tokenizer

from llmsched.cli.serve.banner import start_rows
from llmsched.engine.architecture.online_formats import ONLINE_FORMATS, format_of
from llmsched.engine.build import build_engine, engine_beside, tensor_bytes
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model import online_quantization
from llmsched.engine.model.loader import load_config, load_model, open_model
from llmsched.engine.model.online_quantization import quantised
from llmsched.engine.model.packed_experts import PackedExperts
from llmsched.engine.model.packed_modules import PackedEmbedding, PackedLinear, PackedModule
from llmsched.engine.model.source import locate
from llmsched.engine.parity import quantization_loss
from llmsched.engine.parity.quantization_loss import compare_logits
from llmsched.engine.parity.verification import check_parity, load_for_parity
from llmsched.kernels.dispatch import num_compiled

FORMATS = tuple(ONLINE_FORMATS)
BYTES = torch.arange(256, dtype=torch.uint8)


def representable(name: str, scale: torch.Tensor, offset: torch.Tensor | float) -> torch.Tensor:
    """Return all numbers that a group can have."""
    if name == "int4":
        return torch.arange(16) * scale + offset
    if name == "int8":
        return torch.arange(-127, 128) * scale
    return BYTES.view(torch.float8_e4m3fn)[BYTES & 127 != 127].float() * scale


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_to_the_nearest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_quantization, "TILE_NUMBERS", 5 * 96)  # several tiles
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(13, 96, generator=generator) / 30).to(torch.bfloat16)
    values[3, 7], values[5] = 1.5, 0  # an outlier; a row of zeros
    matrix = quantised(values, ONLINE_FORMATS[name])
    assert sum(part.nbytes for part in matrix if part is not None) == ONLINE_FORMATS[name].num_bytes(values.shape)
    found, group = matrix.unpacked(), 96 // matrix.scales.shape[1]
    for row, column in torch.cartesian_prod(torch.arange(13), torch.arange(96)).tolist():
        place = row, column // group
        offset = 0.0 if matrix.offsets is None else matrix.offsets[place].float()
        numbers = representable(name, matrix.scales[place].float(), offset)
        nearest = (numbers - values[row, column].float()).abs().min()
        assert abs(float(found[row, column]) - float(values[row, column])) <= float(nearest) + 1e-7
    largest = values.float().abs().amax()
    assert float((found - values.float()).abs().max()) <= float(largest) / {"int4": 14, "int8": 120, "fp8": 27}[name]
    assert not found[5].any()


def test_numbers_that_are_not_finite_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    path = tiny_model("llama")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in FORMATS:
        with pytest.raises(ModelError, match=r"up_proj\.weight has numbers that are not finite"):
            load(tmp_path, name)


def load(path: Path, quantization: str | None, dtype: torch.dtype = torch.float32) -> Any:
    source = locate(str(path))
    return load_model(source, load_config(source), device="cpu", dtype=dtype, quantization=quantization)


CASES = [("llama", "fp8"), ("llama", "int8"), ("llama", "int4"), ("qwen3", "int4"), ("gemma2", "int8")]
CASES += [("phi3", "int4"), ("gpt_neox", "int8"), ("bloom", "int4"), ("falcon_new", "int4"), ("qwen3_moe", "int8")]
CASES += [("mixtral", "int4"), ("qwen2_moe", "fp8")]


@pytest.mark.parametrize(("arch", "quantization"), CASES)
def test_the_engine_computes_the_rounded_model(arch: str, quantization: Any, tiny_model: Any) -> None:
    """All schedules give the tokens of transformers with the dequantised weights."""
    config = EngineConfig(model=str(tiny_model(arch)), device="cpu", dtype="float32", quantization=quantization)
    loaded = load_for_parity(config)
    kinds = {type(module) for module in loaded.model.modules()}
    assert kinds >= {PackedLinear, PackedEmbedding}
    assert (PackedExperts in kinds) == (arch in ("qwen3_moe", "mixtral", "qwen2_moe"))
    report = check_parity(loaded, num_prompts=2, num_tokens=6)
    assert report.ok
    assert all(check.tokens_equal for check in report.checks)
    assert report.model_impl == "fused"
    assert loaded.loss is not None
    assert 0 < loaded.loss.mean_kl < (0.5 if quantization == "int4" else 0.05)


@pytest.mark.parametrize(
    "arch", ["llama", "gemma", "gpt_neox", "bloom", "falcon_new", "qwen3_moe", "mixtral", "granitemoe", "mpt"]
)
@pytest.mark.parametrize("quantization", FORMATS)
def test_the_plan_has_the_bytes_that_are_loaded(arch: str, quantization: Any, tiny_model: Any) -> None:
    path = tiny_model(arch)
    model = load(path, quantization)
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if "rotary" in name)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", quantization=quantization)
    planner = open_planner(str(path))
    weights = planner.shape(config, DeviceMemory("cpu", "CPU", 8 << 30)).weights
    assert weights.count == tensor_bytes(model) - tables
    assert weights.packed_types == (quantization,)
    assert weights.wide_parts == (("experts",) if arch == "granitemoe" else ())
    assert ("not quantised: experts (32 bits)" in weights.notes) == (arch == "granitemoe")
    estimated = open_planner(str(path / "config.json")).shape(config, DeviceMemory("cpu", "CPU", 8 << 30)).weights
    assert estimated.wide_parts == weights.wide_parts
    assert estimated.count == pytest.approx(weights.count, rel=0.02)


def test_which_tensors_are_rounded(tiny_model: Any) -> None:
    model = load(tiny_model("llama", tie_word_embeddings=False), "int4")
    bits = {name: module.matrix.bits for name, module in model.named_modules() if isinstance(module, PackedModule)}
    assert bits.pop("lm_head") == bits.pop("model.embed_tokens") == 8
    assert set(bits.values()) == {4}
    assert len(bits) == 3 * 7
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert format_of(expert, (64, 64), "int4", "qwen3_moe") == ONLINE_FORMATS["int4"]
    assert format_of(expert, (48, 64), "int4", "qwen3_moe") is None, "down_proj has rows of 48"
    assert format_of(expert, (64, 64), "int4", "llama") is None
    assert format_of("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 64), "fp8", "mixtral") == ONLINE_FORMATS["fp8"]
    assert format_of("model.layers.0.mlp.gate.weight", (4, 64), "int4") is None
    assert format_of("transformer.wpe.weight", (512, 64), "int8") is None
    assert format_of("model.layers.0.mlp.up_proj.weight", (64, 48), "int8") is None


def test_tied_embeddings_share_one_matrix(tiny_model: Any) -> None:
    model = load(tiny_model("llama"), "fp8")
    assert model.lm_head.codes is model.model.embed_tokens.codes


@pytest.mark.parametrize("quantization", FORMATS)
def test_decodes_of_a_rounded_model_run_as_graphs(quantization: str, tiny_model: Any) -> None:
    """No operation of a step waits for values on the device, and a replay computes what the step computes."""
    model = load(tiny_model("llama"), quantization)
    executor = TorchExecutor(model, num_blocks=32, block_size=4, device="cpu", kv_dtype=torch.float32)
    executor.warmup(4, 4, 16)
    before = num_compiled()
    capture_fake_graphs(executor, 4, 16)
    assert executor._graphs is not None
    assert executor._graphs.sizes == [1, 2, 4]
    assert num_compiled() == before


def test_the_engine_says_what_it_serves(tiny_model: Any) -> None:
    path = str(tiny_model("llama"))
    engine = build_engine(EngineConfig(model=path, device="cpu", quantization="int8", kv_cache_memory_bytes=1 << 22))
    assert engine.plan is not None
    assert engine.plan.measured is not None
    assert engine.plan.measured.weights == pytest.approx(engine.plan.weights_bytes, rel=0.02)
    assert "quantised weights (int8)" in dict(start_rows(engine, "tiny"))["model"]
    with pytest.raises(ConfigError, match="quantization: determines what is loaded"):
        engine_beside(engine, quantization="int4")


def test_the_loss_is_the_mean_kl_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(7, 50, generator=generator) for _ in range(2))
    one[0, 3] = float("-inf")
    other[0, 3] = float("-inf")
    found = compare_logits([one[:3], one[3:]], [other[:3], other[3:]])
    p, q = (logits.double().softmax(1) for logits in (one, other))
    expected = torch.where(p > 0, p * (p / q).log(), 0.0).sum(1).mean()
    assert found.mean_kl == pytest.approx(float(expected))
    assert found.same_token == float((one.argmax(1) == other.argmax(1)).double().mean())
    assert found.num_positions == 7
    assert compare_logits([one], [one]).mean_kl == 0


def test_the_demo_loses_little_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_loss, "NUM_TOKENS", 8)
    loaded = load_for_parity(EngineConfig(model="demo", device="cpu", dtype="float32", quantization="int8"))
    assert loaded.loss is not None
    assert 0 < loaded.loss.mean_kl < 4e-3
    assert loaded.loss.same_token > 0.95
    assert loaded.loss.num_positions > 100


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="'int5' is not one of fp8, int8, int4"):
        EngineConfig(quantization="int5")  # type: ignore[arg-type]


def test_gguf_files_are_not_rounded_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), build_tokenizer(), arch="llama")
    with pytest.raises(ConfigError, match=r"int4 cannot be applied: a \.gguf file keeps its own format"):
        open_model(EngineConfig(model=str(path), device="cpu", quantization="int4"))


def test_a_tied_lm_head_that_differs_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model")
    state, source = load_file(folder / "model.safetensors"), locate(str(folder))

    def save_and_load(head: torch.Tensor) -> None:
        save_file(state | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        load_model(source, load_config(source), device="cpu", dtype=torch.float32, quantization="int8")

    embeddings = state["model.embed_tokens.weight"]
    save_and_load(embeddings.clone())
    with pytest.raises(ModelError, match=r"has tie_word_embeddings true, but .* differs"):
        save_and_load(embeddings + 1)
