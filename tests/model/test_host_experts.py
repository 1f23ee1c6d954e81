"""Experts in host memory: equal logits, copies of routed experts only, the plan, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import save_experts
from stepping import Stepper, make_sequence

from llmsched.engine.blueprint import gpu_blueprint
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model.loader import load_config, load_model
from llmsched.engine.model.source import locate
from llmsched.profiles.gpus import find_gpu

PROMPT = list(range(4, 24))
GPU = DeviceMemory("cuda", "GPU", 8 << 30)


def load(path: Path, layers: tuple[int, ...]) -> Any:
    source = locate(str(path))
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "packed": True}
    return load_model(source, load_config(source), host_layers=layers, **options)


def logits(model: Any, impl: Any, chunks: tuple[int, ...]) -> torch.Tensor:
    sizes: dict[str, Any] = {"num_blocks": 16, "block_size": 16, "device": "cpu"}
    executor = TorchExecutor(model, **sizes, kv_dtype=torch.float32, model_impl=impl)
    assert executor.model_impl == impl
    for copy in copies(model):  # contents that no step may use
        copy.view(torch.uint8).fill_(0x7F)
    return Stepper(executor, [make_sequence("a", PROMPT)], 100).logits(chunks)[0]


def copies(model: Any) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "on_device" in name]


@pytest.mark.parametrize("impl", ["fused", "transformers"])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_moe gptq order", "gpt_oss mxfp4"])
def test_logits_are_the_same(case: str, impl: Any, tiny_model: Any, tmp_path: Path) -> None:
    path = save_experts(tmp_path, case).path if " " in case else tiny_model(case)
    kept = load(path, (1, 2))
    before = {name: parameter.data_ptr() for name, parameter in kept.named_parameters()}
    for chunks in ((1000,), (7, 1)):
        torch.testing.assert_close(logits(kept, impl, chunks), logits(load(path, ()), impl, chunks), rtol=0, atol=1e-5)
    assert {name: kept.get_parameter(name).data_ptr() for name in before if "experts" in name}.items() <= before.items()


def test_only_routed_experts_are_copied_to_memory_that_layers_share(tiny_model: Any) -> None:
    model = load(tiny_model("qwen3_moe", num_experts=8), (0, 1, 2))
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert len(copies(model)) == 2
    assert experts[0].on_device_0 is experts[2].on_device_0
    logits(model, "fused", (1,))
    copied = [bool(torch.equal(*pair)) for pair in zip(experts[2].on_device_0, experts[2].gate_up_proj, strict=True)]
    assert 2 <= sum(copied) <= 2 * len(PROMPT)
    experts[0].on_device_0.fill_(0)
    host, chosen = experts[1].host_experts, [5, 2]
    found = host.routed(experts[1].gate_up_proj.detach(), chosen, 8)
    assert [bool(each.any()) for each in found] == [number in chosen for number in range(8)]
    assert torch.equal(found[5], experts[1].gate_up_proj[5])


def test_the_plan_says_what_stays_in_host_memory_and_what_steps_copy(tiny_model: Any) -> None:
    path = tiny_model("qwen3_moe", num_experts=8)
    layer = 8 * 3 * 64 * 32 * 4
    config = EngineConfig(model=str(path), dtype="float32", expert_offload=2 * layer + 1)
    for found in (open_planner(str(path)), open_planner(str(path / "config.json"))):
        whole = found.plan(EngineConfig(model=str(path), dtype="float32"), GPU)
        plan = found.plan(config, GPU)
        assert plan.offload is not None
        assert (plan.offload.layers, plan.offload.host_bytes, plan.offload.device_bytes) == ((1, 2), 2 * layer, layer)
        assert plan.weights_bytes == whole.weights_bytes - layer
        assert (whole.graph_bytes > 0, plan.graph_bytes) == (True, 0)
        assert plan.offload.copied_bytes(1) == 2 * layer * 2 // 8
        assert 0.99 * 2 * layer < plan.offload.copied_bytes(1000) <= 2 * layer
        assert "a decode of 1 sequence 96.0 KiB (0 ms), of 8 " in plan.offload.describe(8, find_gpu("4090").name)


def test_what_cannot_be_offloaded_is_refused(tiny_model: Any) -> None:
    moe, dense = tiny_model("qwen3_moe"), tiny_model("llama")
    with pytest.raises(ConfigError, match="expert_offload: is for GPUs: on a CPU, experts are in host memory anyway"):
        build_engine(EngineConfig(model=str(moe), device="cpu", expert_offload=1 << 30))
    with pytest.raises(ConfigError, match="expert_offload: needs a model with routed experts"):
        open_planner(str(dense)).plan(EngineConfig(model=str(dense), expert_offload=1 << 30), GPU)
    with pytest.raises(
        ConfigError, match=r"expert_offload: 10\.0 KiB is less than the .* of one layer's experts; set more"
    ):
        open_planner(str(moe)).plan(EngineConfig(model=str(moe), expert_offload=10 << 10), GPU)
    with pytest.raises(ConfigError, match="expert_offload: is not simulated"):
        gpu_blueprint(open_planner(str(moe)), EngineConfig(model=str(moe), expert_offload=1 << 30), "h100")
