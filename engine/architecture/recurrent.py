"""Sizes of recurrent layers, and of the state that such a layer keeps for each sequence.

A layer keeps the last inputs of its convolution in the model's type, and the state of its scan in float32.
"""

from __future__ import annotations

from typing import NamedTuple

from llmsched.engine.architecture.config_fields import Fields

_FLOAT32 = 4


class RecurrentSizes(NamedTuple):
    width: int  # of the output of all heads together
    state: int  # numbers in the state for each element of `width`
    channels: int  # of a short convolution
    kernel: int  # of the convolution; the layer keeps the last `kernel` - 1 inputs
    heads: int = 0


def recurrent_sizes(fields: Fields) -> RecurrentSizes | None:
    """Return the sizes of the recurrent layers in a config, or None for an unknown kind of layer."""
    get = fields.get
    if heads := get("linear_num_value_heads"):  # gated delta net: a matrix of key_dim x value_dim per value head
        key_dim, width = get("linear_key_head_dim"), heads * get("linear_value_head_dim")
        channels = 2 * get("linear_num_key_heads") * key_dim + width  # the convolution is over q, k and v
        return RecurrentSizes(width, key_dim, channels, get("linear_conv_kernel_dim"), heads)
    if heads := get("mamba_num_heads", "mamba_n_heads"):  # Mamba-2: a matrix of head_dim x state_size per head
        width, state = heads * get("mamba_head_dim", "mamba_d_head"), get("ssm_state_size", "mamba_d_state")
        channels = width + 2 * get("n_groups", "mamba_n_groups") * state  # the convolution is over x, B and C
        return RecurrentSizes(width, state, channels, get("conv_kernel", "mamba_d_conv"), heads)
    if get("mamba_d_state") and not get("n_mamba_heads"):  # Mamba-1 (Jamba): state_size numbers per channel
        width = get("mamba_intermediate_size") or get("mamba_expand", default=2) * get("hidden_size")
        return RecurrentSizes(width, get("mamba_d_state"), width, get("mamba_d_conv"))
    if kernel := get("conv_L_cache"):  # short convolution alone (LFM2)
        return RecurrentSizes(0, 0, get("hidden_size"), kernel)
    if width := get("lru_width"):  # RecurrentGemma: one number per channel
        return RecurrentSizes(width, 1, width, get("conv1d_width", default=4))
    return None


def state_bytes(fields: Fields, dtype_bytes: int) -> int | None:
    """Return the bytes of one recurrent layer's state for one sequence, or None for an unknown kind of layer.

    `dtype_bytes` is the bytes of one number in the model's type.
    """
    if (sizes := recurrent_sizes(fields)) is None:
        return None
    return int(sizes.width * sizes.state * _FLOAT32 + (sizes.kernel - 1) * sizes.channels * dtype_bytes)
