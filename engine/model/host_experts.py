"""Experts that stay in host memory, and are copied to the device before they are used."""
# The decoder copies only experts that tokens are routed to, for which it waits until the device has chosen them.
# Modules of transformers compute with all experts of a layer, so a hook copies all of them. Layers share the memory on
# the device: copies and products run on one stream, so a layer's products end before the next layer's copies begin.

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmsched.kernels.experts import Matrices
from llmsched.kernels.packed_matrix import PackedMatrix

_EXPERTS = re.compile(r"(.*\.)?layers\.(?P<layer>\d+)\.(.*\.)?experts")


class Place(NamedTuple):
    """Tensor of a module: its parameter or buffer `name`, which is in host memory, and its copy on the device."""

    owner: nn.Module
    name: str
    host: Tensor
    device: Tensor


class HostExperts:
    """Experts of one layer whose matrices are in host memory."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    def routed(self, matrices: Matrices, experts: list[int], num_experts: int) -> Matrices:
        """Copy the matrices of `experts` to the device. Return the layer's matrices there, valid for `experts` only."""
        if isinstance(matrices, Tensor):
            return self._routed(matrices, experts, num_experts)
        parts = (None if part is None else self._routed(part, experts, num_experts) for part in matrices)
        return PackedMatrix._make(parts)

    def _routed(self, tensor: Tensor, experts: list[int], num_experts: int) -> Tensor:
        found = next((each for each in self._places if each.host.data_ptr() == tensor.data_ptr()), None)
        if found is None:  # a table of codes
            return tensor
        source, target = found.host.view(num_experts, -1), found.device.view(num_experts, -1)
        if len(experts) == num_experts:
            target.copy_(source, non_blocking=True)
        else:
            for expert in experts:
                target[expert].copy_(source[expert], non_blocking=True)
        return found.device.as_strided(tensor.shape, tensor.stride())

    def bring(self, *_: Any) -> None:
        """Copy all matrices, and make the modules use the copies."""
        for place in self._places:
            _set(place.owner, place.name, place.device.copy_(place.host, non_blocking=True))

    def release(self, *_: Any) -> None:
        """Make the modules use the matrices in host memory again."""
        for place in self._places:
            _set(place.owner, place.name, place.host)


def keep_on_host(model: nn.Module, layers: Collection[int], device: str) -> list[Tensor]:
    """Keep the matrices of the experts in `layers` in host memory.

    Return these matrices; do not move them to `device`.
    """
    shared: dict[tuple[object, ...], Tensor] = {}
    kept = []
    for name, module in list(model.named_modules()):
        match = _EXPERTS.fullmatch(name)
        if match is None or int(match["layer"]) not in layers:
            continue
        places = []
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.ndim < 2 or path.endswith("bias"):
                continue
            owner, _, last = path.rpartition(".")
            if device != "cpu":
                tensor.data = tensor.data.pin_memory()
            key = (path, tensor.shape, tensor.dtype)
            if key not in shared:
                shared[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            places.append(Place(module.get_submodule(owner), last, tensor.data, shared[key]))
            kept.append(tensor)
        host_experts: Any = HostExperts(places)
        module.host_experts = host_experts
        module.register_forward_pre_hook(host_experts.bring)
        module.register_forward_hook(host_experts.release, always_call=True)
        for number, place in enumerate(places):  # counted with the model's memory
            module.register_buffer(f"on_device_{number}", place.device, persistent=False)
    return kept


def _set(owner: nn.Module, name: str, tensor: Tensor) -> None:
    if name in owner._parameters:
        owner._parameters[name].data = tensor  # type: ignore[union-attr]
    else:
        owner._buffers[name] = tensor
