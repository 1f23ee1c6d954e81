"""Recurrent layers of transformers models, and the tensors with the states of all sequences."""
# A recurrent layer is a short convolution, mostly followed by a scan. Its module is called with transformers' cache,
# which gives it the state before its input and takes the state after it. So the module itself computes prefills, one
# sequence at a time, and decodes, all sequences at once. Its forward function is replaced only during a pass, so that
# the model stays usable on its own.

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from llmsched.engine.errors import ModelError
from llmsched.engine.kv.recurrent_state import StatePiece

#: Names of the argument for the cache; transformers 5.24 has renamed it.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")

#: Tensor of one part of the states of all rows of a batch: the convolution's last inputs, or the scan's state.
Part = Tensor


class StateShape(NamedTuple):
    """Shape and type of one part of a layer's state, without the dimension of sequences."""

    size: tuple[int, ...]
    dtype: torch.dtype


#: Parts of one layer's state: that of the convolution and, if the layer has one, that of the scan.
LayerState = ListLike[StateShape]


class StateTensors:
    """States of all sequences in all recurrent layers: for each part of a layer [num_slots + 1, *size].

    Slot -1, the last one, is for padding rows.
    """

    def __init__(self, layers: ListLike[LayerState], num_slots: int, device: torch.device) -> None:
        self.layers = [
            [torch.zeros(num_slots + 1, *part.size, dtype=part.dtype, device=device) for part in layer]
            for layer in layers
        ]
        self.num_slots = num_slots

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy each slot sources[i] to destinations[i] (int64 [N]). All sources are read before anything is written."""
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    def clear(self, slots: Tensor) -> None:
        """Reset the states in `slots` (int64 [N]) to the state before the first token."""
        for tensor in self.tensors:
            tensor[slots] = 0


class StepStates(NamedTuple):
    """Recurrent states of the rows of a batch (see PackedStates)."""

    tensors: StateTensors
    single: Tensor | None  # int64 [N]; None if every token is its row's only one
    slots: Tensor  # int64 [N]
    pieces: ListLike[StatePiece]


class RecurrentLayers:
    """Recurrent layers of a model, each of which computes a packed batch with the states of its sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: list[Any] = [module for module in model.modules() if _is_recurrent(module)]
        self._forwards = [module.forward for module in self._modules]
        self._cache_names = [_cache_name(module) for module in self._modules]
        #: Filled by `silenced()`.
        self.layers: list[LayerState] = []
        #: Layers that take the state of the scan into account only for single tokens (Mamba-1).
        self._stepwise: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Let the layers return zeros, and record the shapes of their states.

        Raises ModelError if the model does not call each layer once.
        """
        found: dict[int, LayerState] = {}

        def record(index: int, hidden: Tensor) -> Tensor:
            if index in found:
                raise ModelError(f"{self._name(index)} is computed twice in one pass: the model cannot be served")
            state = LinearAttentionLayer()
            self._call(index, hidden, state)
            conv, scan = state.conv_states[0], state.recurrent_states[0]
            if conv is None or conv.shape[-1] < 2:
                raise ModelError(f"{self._name(index)} keeps no inputs of a convolution: the model cannot be served")
            # transformers also keeps the oldest input of a window, which no later token needs.
            parts = [conv[..., 1:], *([] if scan is None else [scan])]
            found[index] = [StateShape(tuple(part.shape[1:]), part.dtype) for part in parts]
            if scan is not None:
                after, other = (
                    self._continue(index, hidden[:, :2], [parts[0].clone(), each])
                    for each in (scan.clone(), torch.ones_like(scan))
                )
                if torch.equal(after, other):
                    self._stepwise.add(index)
            return torch.zeros_like(hidden)

        with self._replaced(record):
            yield
        if missing := set(range(len(self._modules))) - found.keys():
            raise ModelError(f"{self._name(min(missing))} is not computed in a pass: the model cannot be served")
        self.layers = [found[index] for index in range(len(self._modules))]

    @contextmanager
    def computing(self, step: StepStates) -> Iterator[None]:
        """Let the layers compute the batch of `step`."""

        def compute(index: int, hidden: Tensor) -> Tensor:
            rows, parts = hidden[0], step.tensors.layers[index]
            if step.single is None:
                return self._single(index, rows, parts, step.slots)[None]
            output = torch.empty_like(rows)
            if len(step.single):
                output[step.single] = self._single(index, rows[step.single], parts, step.slots)
            for first, end, source, destination, begins in step.pieces:
                own = [part[destination : destination + 1] for part in parts]
                if source != destination:
                    for part, state in zip(parts, own, strict=True):
                        state.copy_(part[source : source + 1])
                size = 1 if index in self._stepwise and not begins else end - first
                for start in range(first, end, size):
                    output[start : start + size] = self._continue(index, hidden[:, start : start + size], own)[0]
            return output[None]

        with self._replaced(compute):
            yield

    def _single(self, index: int, rows: Tensor, parts: ListLike[Part], slots: Tensor) -> Tensor:
        """Compute rows [N, hidden], the next tokens of N sequences, and replace the sequences' states."""
        own = [part[slots] for part in parts]
        output = self._continue(index, rows[:, None], own)
        for part, state in zip(parts, own, strict=True):
            part[slots] = state
        return output[:, 0]

    def _continue(self, index: int, hidden: Tensor, parts: ListLike[Part]) -> Tensor:
        """Compute the next tokens of N sequences, hidden [N, S, width], and replace their states, parts [N, *size]."""
        state = LinearAttentionLayer()
        state.conv_states[0], state.conv_kernel_size[0] = parts[0], parts[0].shape[-1]
        state.is_conv_states_initialized[0] = state.has_previous_state[0] = True
        if len(parts) > 1:
            state.recurrent_states[0], state.is_recurrent_states_initialized[0] = parts[1], True
        return self._call(index, hidden, state)

    def _call(self, index: int, hidden: Tensor, state: LinearAttentionLayer) -> Tensor:
        layers: list[Any] = [state] * (self._modules[index].layer_idx + 1)
        output: Tensor = self._forwards[index](hidden, **{self._cache_names[index]: Cache(layers=layers)})
        return output

    @contextmanager
    def _replaced(self, function: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Call `function(number of the layer, hidden states)` in place of the layers' forward functions."""
        try:
            for index, module in enumerate(self._modules):
                module.__dict__["forward"] = _with_number(function, index)
            yield
        finally:
            for module in self._modules:
                module.__dict__.pop("forward", None)

    def _name(self, index: int) -> str:
        module = self._modules[index]
        return f"{type(module).__name__} of layer {module.layer_idx}"


def _with_number(function: Callable[[int, Tensor], Tensor], index: int) -> Callable[..., Tensor]:
    return lambda hidden_states, *_, **__: function(index, hidden_states)


def _is_recurrent(module: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and hasattr(module, "layer_idx") and _cache_name(module) is not None


def _cache_name(module: nn.Module) -> Any:
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)
