"""Size of the state that a recurrent layer keeps for each sequence."""

from __future__ import annotations

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


def _gated_delta_net(fields: Fields, dtype_bytes: int) -> int:
    """Return the state of Qwen3-Next: a key_dim x value_dim float32 matrix per value head; convolution over q, k, v."""
    key_width = fields.get("linear_num_key_heads") * fields.get("linear_key_head_dim")
    value_width = fields.get("linear_num_value_heads") * fields.get("linear_value_head_dim")
    matrix = value_width * fields.get("linear_key_head_dim") * _recurrent_type(fields, _FLOAT32)
    window = (fields.get("linear_conv_kernel_dim") - 1) * (2 * key_width + value_width) * dtype_bytes
    return int(matrix + window)


def _mamba2(fields: Fields, dtype_bytes: int) -> int:
    """Return the state of Nemotron-H, Bamba, Falcon-H1: head_dim x state_size per head; convolution over x, B, C."""
    width = fields.get("mamba_num_heads", "mamba_n_heads") * fields.get("mamba_head_dim", "mamba_d_head")
    state = fields.get("ssm_state_size", "mamba_d_state")
    groups = fields.get("n_groups", "mamba_n_groups")
    kernel = fields.get("conv_kernel", "mamba_d_conv")
    matrix = width * state * _recurrent_type(fields, dtype_bytes)
    return int(matrix + (kernel - 1) * (width + 2 * groups * state) * dtype_bytes)


def _mamba1(fields: Fields, dtype_bytes: int) -> int:
    """Return the state of Jamba: state_size numbers per channel, and the convolution over the channels."""
    width = fields.get("mamba_expand", default=2) * fields.get("hidden_size")
    matrix = width * fields.get("mamba_d_state") * _recurrent_type(fields, dtype_bytes)
    return int(matrix + (fields.get("mamba_d_conv") - 1) * width * dtype_bytes)


def _recurrent_type(fields: Fields, otherwise: int) -> int:
    """Return the bytes of one number of the recurrent matrix."""
    named = fields.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(named), otherwise)
