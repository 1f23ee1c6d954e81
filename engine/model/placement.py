"""Which device a model runs on and in which type it computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmsched.engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: CPU flags that mean bfloat16 products in hardware: x86 AVX-512 and AMX, Arm.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_BF16_CAPABILITY = (8, 0)
CPUINFO = Path("/proc/cpuinfo")


def resolve_device(requested: str) -> str:
    """`cuda` or `cpu` for auto, cuda or cpu. Raises ConfigError when cuda is asked for and torch sees no GPU."""
    import torch

    available = torch.cuda.is_available()
    if requested == "auto":
        return "cuda" if available else "cpu"
    if requested == "cuda" and not available:
        built = torch.version.cuda
        reason = f"torch {torch.__version__} sees no GPU (check nvidia-smi)" if built else "this torch has no CUDA"
        raise ConfigError("device", f"cuda is not available: {reason}; use auto or cpu")
    if requested not in ("cuda", "cpu"):
        raise ConfigError("device", f"{requested!r} is not one of auto, cuda, cpu")
    return requested


def resolve_dtype(requested: str, device: str) -> torch.dtype:
    """The type of weights and KV. auto: bfloat16 where `device` computes in it, else float32.

    Raises ConfigError for a type that torch or the device does not offer.
    """
    import torch

    if requested == "auto":
        return torch.bfloat16 if computes_bf16(device) else torch.float32
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if requested not in types:
        raise ConfigError("dtype", f"{requested!r} is not one of auto, {', '.join(types)}")
    return types[requested]


def computes_bf16(device: str) -> bool:
    """Whether `device` (cuda or cpu) multiplies bfloat16 in hardware: from compute capability 8.0, or by CPU flags."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_capability() >= _BF16_CAPABILITY
    return bool(_BF16_FLAGS & _cpu_flags())


def _cpu_flags() -> frozenset[str]:
    """Feature flags of the first processor as Linux names them; empty where there is no /proc/cpuinfo."""
    if not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
