"""Kernels for the work of a decoder layer between its matrix products: norms, rotary embedding, gated activation."""

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, weight, inside, numbers, size, eps, offset):
    """Return the RMS norm of a row of `size` numbers, with weights `weight + offset`.

    `x` has the row, padded with zeros. `numbers` are the indices in `x`, and `inside` is False for padding.
    """
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    return x * scale * (tl.load(weight + numbers, mask=inside, other=0.0).to(tl.float32) + offset)


@triton.jit
def norm_kernel(
    residual,  # [T, SIZE]; gets the sum if BRANCH
    branch,  # [T, SIZE]; unused unless BRANCH
    branch_weight,  # [SIZE]; unused unless BRANCH_NORM
    weight,  # [SIZE]
    output,  # [T, SIZE]
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCH: tl.constexpr,
    BRANCH_NORM: tl.constexpr,
):
    """Compute `reference.add_norm` of one token. The number of the token is the program id."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    numbers = tl.arange(0, BLOCK)
    inside = numbers < SIZE
    x = tl.load(residual + row + numbers, mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + row + numbers, mask=inside, other=0.0)
        if BRANCH_NORM:
            normed = normalise(added.to(tl.float32), branch_weight, inside, numbers, SIZE, eps, offset)
            added = normed.to(added.dtype)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual + row + numbers, x, mask=inside)
    normed = normalise(x.to(tl.float32), weight, inside, numbers, SIZE, eps, offset)
    tl.store(output + row + numbers, normed.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rotary_kernel(
    projected,  # [T, HEADS + 2 x KV_HEADS, DIM]
    cos,  # [T, DIM]
    sin,  # [T, DIM]
    query_weight,  # [DIM]; unused unless NORM
    key_weight,  # [DIM]; unused unless NORM
    query,  # [T, HEADS, DIM]
    key_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    value_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    slot_mapping,  # [T] int64
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute `reference.rotate_and_write` of one vector. Token and head are the program ids.

    Query heads have the first numbers, then key heads, then value heads.
    """
    HALF: tl.constexpr = DIM // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = tl.arange(0, BLOCK_H)
    inside = numbers < HALF
    vector = projected + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + numbers
    low = tl.load(vector, mask=inside, other=0.0)
    high = tl.load(vector + HALF, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if NORM:
            weight = query_weight if head < HEADS else key_weight
            scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / DIM + eps)
            x *= scale * (tl.load(weight + numbers, mask=inside, other=0.0).to(tl.float32) + offset)
            y *= scale * (tl.load(weight + HALF + numbers, mask=inside, other=0.0).to(tl.float32) + offset)
            x, y = x.to(low.dtype).to(tl.float32), y.to(low.dtype).to(tl.float32)
        place = token * DIM + numbers
        cos_low = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + place + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + place + HALF, mask=inside, other=0.0).to(tl.float32)
        low = (x * cos_low - y * sin_low).to(low.dtype)
        high = (y * cos_high + x * sin_high).to(high.dtype)
    if head < HEADS:
        target = query + (token * HEADS + head) * DIM + numbers
        tl.store(target, low, mask=inside)
        tl.store(target + HALF, high, mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        kv_head = (head - HEADS) % KV_HEADS
        cell = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        cache = key_cache if head < HEADS + KV_HEADS else value_cache
        target = cache + cell * DIM + numbers
        if slot >= 0:
            tl.store(target, low.to(cache.dtype.element_ty), mask=inside)
            tl.store(target + HALF, high.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    gate_up,  # [T, 2, SIZE]
    output,  # [T, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """Compute `reference.gated` of BLOCK numbers of one token. Token and block are the program ids."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = numbers < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + numbers, mask=inside, other=0.0)
    up = tl.load(gate_up + (token * 2 + 1) * SIZE + numbers, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    steep = x
    if GELU:  # 0.5 x (1 + tanh(z)) is x times the sigmoid of 2 z
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    tl.store(output + token * SIZE + numbers, (x / (1 + tl.exp(-steep)) * up).to(gate.dtype), mask=inside)
