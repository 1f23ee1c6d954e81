"""KV cache of transformers whose keys and values are rounded as in the engine's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from llmsched.kernels.fp8 import restored, stored


class RoundedCache(DynamicCache):
    """Cache that rounds keys and values to `dtype` and back.

    Attention uses the rounded values, for new tokens too.

    If `dtype` is fp8, `scales` has the scales [2, kv_heads] of each layer.
    """

    def __init__(self, dtype: torch.dtype, scales: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._dtype, self._scales = dtype, scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._round(key_states, layer_idx, 0), self._round(value_states, layer_idx, 1)
        return super().update(key, value, layer_idx, *args, **kwargs)

    def _round(self, states: torch.Tensor, layer: int, row: int) -> torch.Tensor:
        scales = None
        if self._scales is not None:  # Falcon repeats each KV head for all of its query heads
            scales = self._scales[layer][row]
            scales = scales.repeat_interleave(states.shape[1] // len(scales))
        rows = states[0].transpose(0, 1)
        return restored(stored(rows, self._dtype, scales), scales).to(states.dtype).transpose(0, 1)[None]
