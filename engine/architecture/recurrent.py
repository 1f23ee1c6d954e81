"""Size of the state that a recurrent layer keeps for each sequence."""

from __future__ import annotations

from typing import NamedTuple

from llmsched.engine.architecture.config_fields import Fields

_FLOAT32 = 4


def state_bytes(fields: Fields, dtype_bytes: int) -> int | None:
    """Return the bytes of one recurrent layer's state for one sequence; None for an unknown kind of layer.

    The state includes the last kernel_size - 1 inputs of the short convolution, of `dtype_bytes` per number. The
    recurrent state itself has the type that the config names, or else the architecture's default type.
    """
    get = fields.get
    named = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")))
    if get("linear_num_value_heads"):  # one matrix of key_dim x value_dim per value head
        delta = DeltaNetSizes.of(fields)
        matrix = delta.value_width * delta.key_dim * (named or _FLOAT32)
        return int(matrix + (delta.kernel - 1) * delta.channels * dtype_bytes)
    if get("mamba_num_heads", "mamba_n_heads"):  # one matrix of head_dim x state_size per head
        mamba = Mamba2Sizes.of(fields)
        matrix = mamba.width * mamba.state * (named or dtype_bytes)
        return int(matrix + (mamba.kernel - 1) * mamba.channels * dtype_bytes)
    if get("mamba_d_state") and not get("n_mamba_heads"):  # Jamba's Mamba-1: state_size numbers per channel
        width = get("mamba_intermediate_size") or get("mamba_expand", default=2) * get("hidden_size")
        matrix = width * get("mamba_d_state") * (named or dtype_bytes)
        return int(matrix + (get("mamba_d_conv") - 1) * width * dtype_bytes)
    if get("conv_L_cache"):
        return int(get("conv_L_cache") - 1) * int(get("hidden_size")) * dtype_bytes
    if width := get("lru_width"):
        return int(width) * (_FLOAT32 + (int(get("conv1d_width", default=4)) - 1) * dtype_bytes)
    return None


class DeltaNetSizes(NamedTuple):
    """Sizes of a gated delta net (Qwen3-Next, Qwen3.5).

    `key_width` and `value_width` are the widths of all heads together, and `kernel` is the size of the convolution.
    """

    key_width: int
    value_width: int
    value_heads: int
    key_dim: int
    kernel: int

    @classmethod
    def of(cls, fields: Fields) -> DeltaNetSizes:
        """Read the sizes from a config."""
        get, value_heads = fields.get, fields.get("linear_num_value_heads")
        key_dim = get("linear_key_head_dim")
        value_width = value_heads * get("linear_value_head_dim")
        return cls(
            get("linear_num_key_heads") * key_dim, value_width, value_heads, key_dim, get("linear_conv_kernel_dim")
        )

    @property
    def channels(self) -> int:
        """Number of channels of the convolution over q, k and v."""
        return 2 * self.key_width + self.value_width


class Mamba2Sizes(NamedTuple):
    """Sizes of a Mamba-2 mixer (Nemotron-H, Bamba, Granite hybrid, Falcon-H1).

    `width` is the width of x for all heads together. `state` is the size of the state per channel of x. `kernel` is the
    size of the convolution.
    """

    width: int
    heads: int
    state: int
    groups: int
    kernel: int

    @classmethod
    def of(cls, fields: Fields) -> Mamba2Sizes:
        """Read the sizes from a config."""
        get, heads = fields.get, fields.get("mamba_num_heads", "mamba_n_heads")
        width = heads * get("mamba_head_dim", "mamba_d_head")
        state, groups = get("ssm_state_size", "mamba_d_state"), get("n_groups", "mamba_n_groups")
        return cls(width, heads, state, groups, get("conv_kernel", "mamba_d_conv"))

    @property
    def channels(self) -> int:
        """Number of channels of the convolution over x, B and C."""
        return self.width + 2 * self.groups * self.state
