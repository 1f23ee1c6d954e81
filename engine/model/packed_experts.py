"""Module that replaces the experts of a gpt-oss model whose matrices stay quantised."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from llmsched.engine.model.packed_modules import PackedModule
from llmsched.kernels.dispatch import backend_name, load_backend
from llmsched.kernels.experts import Gate
from llmsched.kernels.packed_matrix import PackedMatrix


class PackedExperts(nn.Module):
    """Experts with one packed matrix for the first products of all experts, and one for their second products."""

    def __init__(self, experts: Any, up: PackedMatrix, down: PackedMatrix) -> None:
        super().__init__()
        self.up, self.down = PackedModule(up), PackedModule(down)
        self.gate_up_proj_bias, self.down_proj_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        self.gate = Gate(interleaved=True, slope=experts.alpha, limit=experts.limit, shift=1.0)

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
        setattr(model.get_submodule(parent), child, PackedExperts(model.get_submodule(module), up, down))
