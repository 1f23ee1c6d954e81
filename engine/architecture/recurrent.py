"""Size of the state that a recurrent layer keeps for each sequence."""

from __future__ import annotations

from typing import NamedTuple

from llmsched.engine.architecture.fields import Fields

_FLOAT32 = 4


def state_bytes(fields: Fields, dtype_bytes: int) -> int | None:
    """Return the bytes of one recurrent layer for one sequence; None for an unknown kind of recurrence.

    The state is the recurrent matrix and the last kernel-1 inputs of the short convolution before it. The convolution
    has the model's type, the matrix the type that the config names, or else the one that the architecture uses.
    """
    if fields.get("linear_num_value_heads"):
        return _gated_delta_net(fields, dtype_bytes)
    if fields.get("mamba_num_heads", "mamba_n_heads"):
        return _mamba2(fields, dtype_bytes)
    if fields.get("mamba_d_state") and not fields.get("n_mamba_heads"):
        return _mamba1(fields, dtype_bytes)
    if fields.get("conv_L_cache"):
        return int(fields.get("conv_L_cache") - 1) * int(fields.get("hidden_size")) * dtype_bytes
    if width := fields.get("lru_width"):
        return int(width) * (_FLOAT32 + (int(fields.get("conv1d_width", default=4)) - 1) * dtype_bytes)
    return None


class DeltaNetSizes(NamedTuple):
    """Sizes of a gated delta net (Qwen3-Next, Qwen3.5); widths are of all heads together."""

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
        """Channels of the convolution over q, k and v."""
        return 2 * self.key_width + self.value_width


class Mamba2Sizes(NamedTuple):
    """Sizes of a Mamba-2 mixer (Nemotron-H, Bamba, Granite hybrid, Falcon-H1); `width` is of all heads together."""

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
        """Channels of the convolution over x, B and C."""
        return self.width + 2 * self.groups * self.state


def _gated_delta_net(fields: Fields, dtype_bytes: int) -> int:
    """Return the state: a key_dim x value_dim matrix, by default in float32, per value head, and the convolution."""
    sizes = DeltaNetSizes.of(fields)
    matrix = sizes.value_width * sizes.key_dim * _recurrent_type(fields, _FLOAT32)
    return int(matrix + (sizes.kernel - 1) * sizes.channels * dtype_bytes)


def _mamba2(fields: Fields, dtype_bytes: int) -> int:
    """Return the state: a head_dim x state_size matrix per head, and the convolution."""
    sizes = Mamba2Sizes.of(fields)
    matrix = sizes.width * sizes.state * _recurrent_type(fields, dtype_bytes)
    return int(matrix + (sizes.kernel - 1) * sizes.channels * dtype_bytes)


def _mamba1(fields: Fields, dtype_bytes: int) -> int:
    """Return the state of Jamba: state_size numbers per channel, and the convolution over the channels."""
    width = fields.get("mamba_expand", default=2) * fields.get("hidden_size")
    matrix = width * fields.get("mamba_d_state") * _recurrent_type(fields, dtype_bytes)
    return int(matrix + (fields.get("mamba_d_conv") - 1) * width * dtype_bytes)


def _recurrent_type(fields: Fields, otherwise: int) -> int:
    """Return the bytes of one number of the recurrent matrix."""
    named = fields.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(named), otherwise)
