"""Module that replaces the experts of a model whose matrices stay quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llmsched.engine.errors import ModelError
from llmsched.engine.model.modules import UnknownStructureError, activation_of
from llmsched.engine.model.packed_modules import PackedModule
from llmsched.kernels.dispatch import backend_name, load_backend
from llmsched.kernels.experts import Gate, join
from llmsched.kernels.packed_matrix import PackedMatrix


def gate_of(experts: Any) -> Gate:
    """Return the rule by which experts join gate and up. Raises UnknownStructureError for an unknown rule."""
    if isinstance(experts, PackedExperts):
        return experts.gate
    if hasattr(experts, "act_fn"):
        gate = Gate(activation_of(experts.act_fn))
    elif hasattr(experts, "alpha") and hasattr(experts, "limit"):
        gate = Gate(interleaved=True, slope=experts.alpha, limit=experts.limit, shift=1.0)
    else:
        raise UnknownStructureError(f"the gate of {type(experts).__name__} is unknown")
    numbers = torch.linspace(-12, 12, 98)[None]
    if hasattr(experts, "_apply_gate") and not torch.allclose(experts._apply_gate(numbers), join(numbers, gate)):
        raise UnknownStructureError(f"the gate of {type(experts).__name__} is unknown")
    return gate


class PackedExperts(nn.Module):
    """Experts with one packed matrix for the first products of all experts, and one for their second products."""

    def __init__(self, experts: Any, up: PackedMatrix, down: PackedMatrix) -> None:
        super().__init__()
        self.up, self.down = PackedModule(up), PackedModule(down)
        self.gate_up_proj_bias = getattr(experts, "gate_up_proj_bias", None)
        self.down_proj_bias = getattr(experts, "down_proj_bias", None)
        self.gate = gate_of(experts)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        backend: Any = load_backend(backend_name(hidden_states.device.type))
        output: Tensor = backend.run_experts(
            hidden_states,
            router_indices.int(),
            routing_weights.float().contiguous(),
            self.up.matrix,
            self.down.matrix,
            gate=self.gate,
            up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
        )
        return output


def pack_experts(model: nn.Module, matrices: dict[str, PackedMatrix]) -> None:
    """Replace experts whose matrices are among `matrices`, with names of weights as keys, and remove them there."""
    for name in [name for name in matrices if name.endswith(".gate_up_proj")]:
        module = name.rpartition(".")[0]
        up, down = matrices.pop(name), matrices.pop(f"{module}.down_proj")
        parent, _, child = module.rpartition(".")
        try:
            replacement = PackedExperts(model.get_submodule(module), up, down)
        except UnknownStructureError as reason:
            raise ModelError(f"quantised experts of {type(model).__name__} cannot be served: {reason}") from reason
        setattr(model.get_submodule(parent), child, replacement)
