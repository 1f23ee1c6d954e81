"""Modules that replace the linear layers and embeddings of a transformers model whose weights stay quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmsched.engine.errors import ModelError
from llmsched.kernels.dispatch import backend_name, load_backend
from llmsched.kernels.fp8 import as_bytes
from llmsched.kernels.packed_matrix import PackedMatrix

#: Names that transformers changes while it loads a model (GPT-NeoX).
_RENAMED = {"embed_out.weight": "lm_head.weight"}


class PackedModule(nn.Module):
    codes: Tensor

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        for name, part in matrix._asdict().items():
            self.register_buffer(name, part)

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix._make(getattr(self, name) for name in PackedMatrix._fields)


class PackedLinear(PackedModule):
    def __init__(self, matrix: PackedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__(matrix)
        self.bias, self.out_features = bias, len(matrix.codes)

    def forward(self, inputs: Tensor) -> Tensor:
        backend: Any = load_backend(backend_name(inputs.device.type))
        output: Tensor = backend.linear(inputs.flatten(0, -2), (self.matrix,), self.bias)
        return output.view(*inputs.shape[:-1], self.out_features)


class PackedEmbedding(PackedModule):
    """Embedding with a packed matrix. The vectors have the type `dtype` and are multiplied by `scale`, if given."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, scale: Tensor | None) -> None:
        super().__init__(matrix)
        self.dtype, self.scale = dtype, scale

    def forward(self, token_ids: Tensor) -> Tensor:
        vectors = self.matrix.rows(token_ids.flatten()).unpacked().to(self.dtype)
        if self.scale is not None:
            vectors *= self.scale.to(self.dtype)
        return vectors.view(*token_ids.shape, -1)


def pack_modules(model: nn.Module, matrices: Mapping[str, PackedMatrix]) -> None:
    """Replace linear layers and embeddings by modules with packed matrices.

    The keys of `matrices` are the names of the replaced weights, perhaps without the model's prefix. Modules with tied
    weights share one matrix. Raises ModelError if a weight belongs to another kind of module, or if matrices of tied
    weights differ.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_identity = dict[int, PackedMatrix]()
    for name, matrix in matrices.items():
        known = (name, f"{getattr(model, 'base_model_prefix', '')}.{name}", _RENAMED.get(name, ""))
        if (found := next((parameters[each] for each in known if each in parameters), None)) is None:
            raise ModelError(f"{name} cannot be quantised: transformers gives it another name")
        if not _equal(by_identity.setdefault(id(found), matrix), matrix):
            raise ModelError(
                f"config.json has tie_word_embeddings true, but {name} differs from the matrix to which it is tied; "
                "set tie_word_embeddings to false, or remove lm_head.weight"
            )
    for name, module in list(model.named_modules()):
        weight: Any = module._parameters.get("weight")
        if weight is None or id(weight) not in by_identity:
            continue
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelError(f"{name}.weight belongs to a {type(module).__name__}, which cannot be quantised")
        bias: Any = module._parameters.get("bias")
        matrix = by_identity[id(weight)]
        replacement: PackedModule = PackedLinear(matrix, bias)
        if isinstance(module, nn.Embedding):
            replacement = PackedEmbedding(matrix, weight.dtype, getattr(module, "embed_scale", None))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)


def _equal(one: PackedMatrix, other: PackedMatrix) -> bool:
    pairs = zip(one, other, strict=True)
    return one is other or all(
        a is b or (a is not None and b is not None and torch.equal(as_bytes(a), as_bytes(b))) for a, b in pairs
    )
