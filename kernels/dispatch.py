"""Dispatch of ops by device: Triton kernels on CUDA, CPU kernels on the CPU, the reference on other devices.

With the environment variable LLMSCHED_KERNELS=reference, all devices use the reference.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmsched.kernels.reference import AttentionOptions, AttentionShape, Int32, Put

BackendName = Literal["triton", "cpu", "reference"]
ENVIRONMENT_VARIABLE = "LLMSCHED_KERNELS"
#: Modules that implement the ops as `llmsched.kernels.reference` specifies them.
MODULES: dict[BackendName, str] = {
    "triton": "llmsched.kernels.triton.ops",
    "cpu": "llmsched.kernels.cpu.ops",
    "reference": "llmsched.kernels.reference",
}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    work: Any = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute `reference.paged_attention` with the backend of the query's device.

    Raises ValueError if shapes and options do not fit each other. Values in tensors are not checked.
    """
    _check_caches(key_cache, value_cache, options.get("kv_scales"))
    _, heads, head_dim = query.shape
    _, kv_heads, _, cached_head_dim = key_cache.shape
    sequences = context_lens.shape[0]
    if head_dim != cached_head_dim:
        raise ValueError(f"query head_dim {head_dim} differs from the key cache's {cached_head_dim}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if block_tables.shape[0] != sequences or cu_seqlens_q.shape[0] != sequences + 1:
        raise ValueError(
            f"{sequences} context_lens need as many block_tables (not {block_tables.shape[0]}) "
            f"and one more cu_seqlens_q (not {cu_seqlens_q.shape[0]})"
        )
    if (window := options.get("window")) is not None and window < 1:
        raise ValueError(f"window is {window}; allowed is 1 or more, or None")
    if (softcap := options.get("softcap")) is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; allowed is more than 0, or None")
    for name, option in (("sinks", options.get("sinks")), ("slopes", options.get("slopes"))):
        if option is not None and option.shape != (heads,):
            raise ValueError(f"{name} are {tuple(option.shape)}; allowed is one number for each of {heads} heads")
    backend = load_backend(backend_name(query.device.type))
    batch = (query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens)
    output: Tensor = backend.paged_attention(*batch, work=work, **options)
    return output


def latent_attention(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    weight: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    work: Any = None,
) -> Tensor:
    """Compute `reference.latent_attention` with the backend of the query's device.

    Raises ValueError if the shapes do not fit each other.
    """
    _check_caches(latents, rope_keys, kv_scales)
    rows, heads = weight.shape[0], query.shape[1]
    fits = rows % heads == 0 and rows // heads > query.shape[2] - rope_keys.shape[3] > 0
    if latents.shape[1] != 1 or weight.shape[1] != latents.shape[3] or not fits:
        raise ValueError(
            f"a weight {tuple(weight.shape)} does not fit queries {tuple(query.shape)}, latent vectors "
            f"{tuple(latents.shape)} and rotary keys {tuple(rope_keys.shape)}"
        )
    backend = load_backend(backend_name(query.device.type))
    batch = (query, latents, rope_keys, weight, block_tables, cu_seqlens_q, context_lens)
    output: Tensor = backend.latent_attention(*batch, scale=scale, kv_scales=kv_scales, work=work)
    return output


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[Any]:
    """Compute `reference.prepare_attention` with the backend of `device`."""
    backend = load_backend(backend_name(device.type))
    works: list[Any] = backend.prepare_attention(layers, cu_seqlens_q, context_lens, device, put)
    return works


def prepare_lora(adapters: Int32, num_adapters: int, device: torch.device, put: Put) -> Any:
    """Compute `reference.prepare_lora` with the backend of `device`."""
    return load_backend(backend_name(device.type)).prepare_lora(adapters, num_adapters, put)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Compute `reference.write_kv` with the backend of the key's device. Raises ValueError if the shapes do not fit."""
    tokens = slot_mapping.shape[0]
    for name, new, kv in (("key", key, key_cache), ("value", value, value_cache)):
        if new.shape != (tokens, kv.shape[1], kv.shape[3]):
            raise ValueError(f"{name} {tuple(new.shape)} does not fit {tokens} slots of a cache {tuple(kv.shape)}")
    _check_caches(key_cache, value_cache, kv_scales)
    backend = load_backend(backend_name(key.device.type))
    backend.write_kv(key, value, key_cache, value_cache, slot_mapping, kv_scales=kv_scales)


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    """Compute `reference.sample` with the backend of the logits' device. Raises ValueError if the shapes do not fit."""
    if parameters.shape != (6, len(logits)):
        raise ValueError(f"parameters {tuple(parameters.shape)} do not fit {len(logits)} rows; allowed is (6, rows)")
    outcomes: Tensor = load_backend(backend_name(logits.device.type)).sample(logits, parameters)
    return outcomes


def backend_name(device_type: str) -> BackendName:
    """Return the backend for a device type, such as "cuda".

    Raises ValueError if the environment variable LLMSCHED_KERNELS has an unknown value.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if forced == "reference":
        return "reference"
    if forced != "auto":
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {forced!r}; allowed is auto or reference")
    names: dict[str, BackendName] = {"cuda": "triton", "cpu": "cpu"}
    return names.get(device_type, "reference")


@cache
def load_backend(name: BackendName) -> ModuleType:
    """Import a backend on its first use, because importing Numba or Triton takes a second."""
    return importlib.import_module(MODULES[name])


def starts_empty(device_type: str) -> bool:
    """Return True if no compiled kernels for this device type were on disk when the backend was imported."""
    return getattr(load_backend(backend_name(device_type)), "STARTS_EMPTY", False)


def num_compiled() -> int:
    """Return how many variants of kernels this process has compiled, or loaded from a cache on disk."""
    modules = [sys.modules[name] for name in (MODULES["cpu"], MODULES["triton"]) if name in sys.modules]
    return sum(module.num_compiled() for module in modules)


def _check_caches(key_cache: Tensor, value_cache: Tensor, kv_scales: Tensor | None) -> None:
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key cache {tuple(key_cache.shape)} and value cache {tuple(value_cache.shape)} may differ in head_dim only"
        )
    for kv in (key_cache, value_cache):
        if not kv.is_contiguous():
            raise ValueError(f"KV cache has strides {kv.stride()}; it must be contiguous")
    wanted = (2, key_cache.shape[1]) if key_cache.element_size() == 1 else None  # fp8 has scales, wider types have none
    found = None if kv_scales is None else tuple(kv_scales.shape)
    if key_cache.dtype != value_cache.dtype or found != wanted:
        types = f"{key_cache.dtype} and {value_cache.dtype}"
        raise ValueError(f"kv_scales {found} do not fit caches of {types}; allowed is one type for both, and {wanted}")
