"""Which backend serves which device: CUDA has Triton, the CPU has Numba, every other device the reference.

LLMSCHED_KERNELS=reference in the environment sends everything to the reference, to tell a kernel's fault from
another's.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

BackendName = Literal["triton", "cpu", "reference"]
ENVIRONMENT_VARIABLE = "LLMSCHED_KERNELS"
MODULES: dict[BackendName, str] = {
    "triton": "llmsched.kernels.triton.ops",
    "cpu": "llmsched.kernels.cpu.ops",
    "reference": "llmsched.kernels.reference",
}


class Backend(Protocol):
    """A module that implements the ops as `llmsched.kernels.reference` specifies them."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor: ...

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None: ...


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention` by the backend of the query's device. Raises ValueError when shapes do not match."""
    check_attention(query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens, window, softcap)
    check_per_head(query.shape[1], sinks=sinks, slopes=slopes)
    return backend_of(query).paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
    )


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """`reference.write_kv` by the backend of the keys' device. Raises ValueError when shapes do not match."""
    tokens = slot_mapping.shape[0]
    for name, new, kv in (("key", key, key_cache), ("value", value, value_cache)):
        if new.shape != (tokens, kv.shape[1], kv.shape[3]):
            raise ValueError(f"{name} {tuple(new.shape)} does not fit {tokens} slots of a cache {tuple(kv.shape)}")
    check_caches(key_cache, value_cache)
    backend_of(key).write_kv(key, value, key_cache, value_cache, slot_mapping)


def backend_name(device_type: str) -> BackendName:
    """Who serves tensors of `torch.device.type` device_type. Raises ValueError for an unknown LLMSCHED_KERNELS."""
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if forced == "reference":
        return "reference"
    if forced != "auto":
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {forced!r}; allowed is auto or reference")
    names: dict[str, BackendName] = {"cuda": "triton", "cpu": "cpu"}
    return names.get(device_type, "reference")


def backend_of(tensor: Tensor) -> Backend:
    return load_backend(backend_name(tensor.device.type))


@cache
def load_backend(name: BackendName) -> Backend:
    """Import a backend on first use: Numba and Triton take a second each, and no machine needs both."""
    return cast(Backend, importlib.import_module(MODULES[name]))


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    """Raise ValueError unless the arguments fit each other. Looks at shapes only, so a GPU is never waited for."""
    check_caches(key_cache, value_cache)
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
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; allowed is 1 or more, or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; allowed is more than 0, or None")


def check_per_head(heads: int, **options: Tensor | None) -> None:
    for name, option in options.items():
        if option is not None and option.shape != (heads,):
            raise ValueError(f"{name} are {tuple(option.shape)}; allowed is one number for each of {heads} heads")


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key cache {tuple(key_cache.shape)} and value cache {tuple(value_cache.shape)} may differ in head_dim only"
        )
