"""LoRA adapters of a loaded model: where they fit, and their matrices in the form that the kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmsched.engine.architecture.adapter_files import ADAPTER_WEIGHTS, AdapterFiles, LoraPair, padded_rank
from llmsched.engine.architecture.quantised_matrix import EXPANDING
from llmsched.engine.errors import ModelError
from llmsched.engine.model.checkpoint import StateDict, open_safetensors
from llmsched.engine.model.packed_modules import PackedLinear
from llmsched.kernels.lora import LoraMatrices


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters that fit a model. Their matrices are read from disk when they are needed."""

    dtype: torch.dtype  # of the model, in which matrices are computed
    device: torch.device
    rank: int  # to which all matrices are padded
    #: For each adapted module, its two matrices in each adapter; None if the adapter does not change the module.
    by_module: Mapping[nn.Module, Sequence[LoraPair | None]]
    weights: Sequence[StateDict]  # tensors of each adapter

    def __len__(self) -> int:
        return len(self.weights)

    @classmethod
    def fit(cls, model: PreTrainedModel, files: Sequence[AdapterFiles]) -> Adapters:
        """Find the modules that the adapters change.

        Raises ModelError if the model lacks a module, if shapes differ, or if a module is not a linear layer that can
        be adapted.
        """
        by_module: dict[nn.Module, list[LoraPair | None]] = {}
        for number, adapter in enumerate(files):
            for name, pair in adapter.pairs.items():
                module = _adapted_module(model, adapter, name, pair)
                by_module.setdefault(module, [None] * len(files))[number] = pair
        weights = [open_safetensors(adapter.directory / ADAPTER_WEIGHTS) for adapter in files]
        return cls(model.dtype, model.device, padded_rank(files), by_module, weights)

    def matrices(self, linears: Sequence[nn.Module]) -> LoraMatrices | None:
        """Return the matrices for linear layers that are computed as one, or None if no adapter changes them."""
        spans, first = [], 0
        for linear in linears:
            inputs, outputs = linear_shape(linear)
            if linear in self.by_module:
                spans.append((linear, first, outputs))
            first += outputs
        if not spans:
            return None
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        a = torch.zeros(len(self), len(spans) * self.rank, inputs, **options)
        b = torch.zeros(len(self), self.rank, sum(width for *_, width in spans), **options)
        column = 0
        for span, (linear, _, width) in enumerate(spans):
            for number, pair in enumerate(self.by_module[linear]):
                if pair is not None:
                    start = span * self.rank
                    a[number, start : start + pair.rank] = self.weights[number][pair.a][...].to(**options)
                    factor = self._read_b(number, pair).T.to(**options)
                    b[number, : pair.rank, column : column + width] = factor
            column += width
        return LoraMatrices(a, b, tuple((first, width) for _, first, width in spans))

    def merge_into(self, model: nn.Module, files: AdapterFiles, number: int = 0) -> None:
        """Add the changes of an adapter to the weights of `model`, which must not be quantised."""
        for name, pair in files.pairs.items():
            weight: Any = model.get_submodule(name).weight
            added = self._read_b(number, pair) @ self.weights[number][pair.a][...].float()
            added = added.T if isinstance(model.get_submodule(name), Conv1D) else added
            weight.data += added.to(weight.device, weight.dtype)

    def _read_b(self, number: int, pair: LoraPair) -> Tensor:
        return self.weights[number][pair.b][...].float() * pair.scale


def linear_shape(module: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer, packed or not."""
    if isinstance(module, PackedLinear):
        outputs, inputs = module.matrix.shape
        return inputs, outputs
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    return int(module.in_features), int(module.out_features)


def _adapted_module(model: PreTrainedModel, adapter: AdapterFiles, name: str, pair: LoraPair) -> nn.Module:
    def refuse(reason: str) -> ModelError:
        trained = f"it was trained for {adapter.base}"
        return ModelError(f"adapter {adapter.name}: {reason}; {trained}, and the model is a {type(model).__name__}")

    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise refuse(f"changes {name}, which the model does not have") from None
    if module is model.get_output_embeddings():  # type: ignore[no-untyped-call]
        raise refuse(f"changes {name}, the output layer, which is not supported")
    if name.rpartition(".")[2] == EXPANDING:  # no pass runs it as a module
        raise refuse(f"changes {name}, which expands latent vectors; this is not supported")
    if not isinstance(module, nn.Linear | PackedLinear | Conv1D):
        raise refuse(f"changes {name} ({type(module).__name__}), but only linear layers can be adapted")
    if (found := linear_shape(module)) != (pair.inputs, pair.outputs):
        raise refuse(
            f"has matrices for {pair.inputs} inputs and {pair.outputs} outputs of {name}, which has {found[0]} and "
            f"{found[1]}"
        )
    return module
