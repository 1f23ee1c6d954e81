"""Names and sizes of the data types of weights and KV. The module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError

#: Bytes of one number of each type.
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def planned_dtype(config: EngineConfig, *, computes_bf16: bool) -> str:
    """Return the data type of the model. "auto" is bfloat16 if the device computes in bfloat16, else float32."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if computes_bf16 else "float32"


def planned_kv_dtype(config: EngineConfig, dtype: str, *, checkpoint_fp8: bool = False) -> str:
    """Return the data type of the KV cache. "auto" is fp8 if the checkpoint has scales for fp8 KV, else `dtype`."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "fp8" if checkpoint_fp8 else dtype


def check_servable(config: EngineConfig) -> None:
    """Raise ConfigError if the KV cache would be fp8, which this engine's kernels cannot read."""
    if config.kv_cache_dtype.startswith("fp8"):
        raise ConfigError(
            "kv_cache_dtype",
            f"{config.kv_cache_dtype} cannot be served: the kernels read KV in float32, bfloat16 and float16; use auto "
            "or bfloat16 (`llmsched kv-budget` plans fp8 for other engines)",
        )
