"""LoRA adapters as peft saves them, with random weights, and models whose weights have them merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
#: Fields of adapter_config.json as peft 0.18 writes them, except those that tests set.
FIELDS: dict[str, Any] = {
    **{"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None},
    **{"base_model_name_or_path": "tiny", "bias": "none", "corda_config": None, "ensure_weight_tying": False},
    **{"eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True},
    **{"init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None},
    **{"loftq_config": {}, "lora_bias": False, "lora_dropout": 0.0, "megatron_config": None},
    **{"megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0"},
    **{"qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None},
    **{"task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False, "use_qalora": False},
    **{"use_rslora": False},
}


def linear_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Return the linear layers of a model whose names end with one of `targets`."""
    kinds = nn.Linear | Conv1D
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and name.rpartition(".")[2] in targets
    }


def save_adapter(
    directory: Path,
    model: nn.Module,
    targets: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write a random adapter for the layers of `model` named `targets`. `fields` replace those of its config.

    `tensors` are added to the file. `size` is the size of the numbers in the matrices B.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = dict(tensors or {})
    for name, module in linear_layers(model, targets).items():
        weight: Any = module.weight
        outputs, inputs = weight.shape if isinstance(module, nn.Linear) else weight.T.shape
        saved[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        saved[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    directory.mkdir(parents=True, exist_ok=True)
    save_file(saved, directory / "adapter_model.safetensors")
    config = {**FIELDS, "r": rank, "lora_alpha": alpha, "target_modules": list(targets), **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(model: Any, directory: Path) -> Any:
    """Return a copy of the model with weights W + s B A, where s is alpha / r, or alpha / sqrt(r) with rslora."""
    model = copy.deepcopy(model)
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            added = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            module.weight.data += added.T if isinstance(module, Conv1D) else added
    return model
