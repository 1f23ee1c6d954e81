"""Names and sizes of the data types of weights and KV. The module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError

if TYPE_CHECKING:
    from llmsched.engine.device import DeviceMemory

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


def planned_kv_dtype(config: EngineConfig, dtype: str, device: DeviceMemory, *, checkpoint_fp8: bool) -> str:
    """Return the data type of the KV cache.

    "auto" is fp8 if the checkpoint has scales for fp8 KV and the device can read this type, else `dtype`.
    """
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "fp8" if checkpoint_fp8 and kv_refusal("fp8", device) is None else dtype


def kv_refusal(kv_dtype: str, device: DeviceMemory) -> str | None:
    """Return the reason why `serve` cannot use a KV cache of this type on the device, or None."""
    if kv_dtype not in ("fp8", "fp8_e4m3") or device.computes_fp8:
        return None
    return (
        f"{device.name} cannot convert KV in {kv_dtype} (e4m3), which takes compute capability 8.9 (Ada) or newer; use "
        "fp8_e5m2, or bfloat16"
    )


def check_kv_dtype(kv_dtype: str, device: DeviceMemory) -> None:
    """Raise ConfigError if `serve` cannot use a KV cache of this type on the device."""
    if refused := kv_refusal(kv_dtype, device):
        raise ConfigError("kv_cache_dtype", refused)
