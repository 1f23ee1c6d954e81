"""Kernels for the work of a decoder layer between its matrix products: norms, rotary embedding, activation."""

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from llmsched.kernels.triton.fp8 import stored


@triton.jit
def normalise(x, weight, inside, numbers, size, eps, offset, CENTRED: tl.constexpr):
    """Return a normalised row of `size` numbers, computed as in `reference.norm` without a bias."""
    # `x` has the row, padded with zeros. `numbers` are the indices in `x`, and `inside` is False for padding.
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    return x * scale * (tl.load(weight + numbers, mask=inside, other=0.0).to(tl.float32) + offset)


@triton.jit
def norm_kernel(
    residual,  # [T, SIZE]; gets the sum if BRANCH
    branch,  # [T, SIZE]; unused unless BRANCH
    branch_weight,  # [SIZE]; unused unless BRANCH_NORM
    weight,  # [SIZE]
    bias,  # [SIZE]; unused unless BIAS
    output,  # [T, SIZE]
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCH: tl.constexpr,
    BRANCH_NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Compute `reference.add_norm` for one token."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    numbers = tl.arange(0, BLOCK)
    inside = numbers < SIZE
    x = tl.load(residual + row + numbers, mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + row + numbers, mask=inside, other=0.0)
        if BRANCH_NORM:
            normed = normalise(added.to(tl.float32), branch_weight, inside, numbers, SIZE, eps, offset, CENTRED)
            added = normed.to(added.dtype)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual + row + numbers, x, mask=inside)
    normed = normalise(x.to(tl.float32), weight, inside, numbers, SIZE, eps, offset, CENTRED)
    if BIAS:
        normed += tl.load(bias + numbers, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row + numbers, normed.to(x.dtype), mask=inside)


@triton.jit
def rotate(
    x,
    vector,
    numbers,
    inside,
    cos,
    sin,
    weight,
    eps,
    offset,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORM_LAST: tl.constexpr,
):
    """Return the vector `x`, which is at `vector`, after its norm and rotation."""
    # `y` is `x` with the numbers of each pair exchanged.
    HALF: tl.constexpr = ROTATED // 2
    STEP: tl.constexpr = 1 if NEIGHBOURS else HALF
    rotated, low = numbers < ROTATED, numbers % 2 == 0 if NEIGHBOURS else numbers < HALF
    partner = tl.where(low, numbers + STEP, numbers - STEP)
    y = tl.load(vector + partner, mask=rotated, other=0.0)
    if NORM:
        x_weight = tl.load(weight + numbers, mask=inside, other=0.0).to(tl.float32) + offset
        if not NORM_LAST:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
            y_weight = tl.load(weight + partner, mask=rotated, other=0.0).to(tl.float32) + offset
            x, y = (wide * scale * x_weight).to(x.dtype), (y.to(tl.float32) * scale * y_weight).to(x.dtype)
    c = tl.load(cos + numbers, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + numbers, mask=rotated, other=0.0).to(tl.float32)
    turned = tl.where(low, -y.to(tl.float32), y.to(tl.float32))
    x = (x.to(tl.float32) * c + turned * s).to(x.dtype)
    if NORM and NORM_LAST:
        wide = x.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps) * x_weight).to(x.dtype)
    return x


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rotary_kernel(
    projected,  # [T, HEADS + 2 x KV_HEADS, DIM]
    cos,  # [T, ROTATED]
    sin,  # [T, ROTATED]
    query_weight,  # [DIM]; unused unless NORM
    key_weight,  # [DIM]; unused unless NORM
    query,  # [T, HEADS, DIM]
    key_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    value_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    slot_mapping,  # [T] int64
    scales,  # [2, KV_HEADS] of keys and values; unused unless FP8
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    BY_GROUP: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORM_LAST: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute `reference.rotate_and_write` for one vector of one token."""
    # Heads of queries come first, then of keys, then of values.
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head = (head - HEADS) % KV_HEADS
    place = head
    if BY_GROUP:
        if head < HEADS:
            place = head // GROUP * (GROUP + 2) + head % GROUP
        else:
            place = kv_head * (GROUP + 2) + GROUP + (head - HEADS) // KV_HEADS
    vector = projected + (token * (HEADS + 2 * KV_HEADS) + place) * DIM
    numbers = tl.arange(0, BLOCK_D)
    inside = numbers < DIM
    x = tl.load(vector + numbers, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        weight = query_weight
        if NORM:
            weight = query_weight if head < HEADS else key_weight
        x = rotate(
            x, vector, numbers, inside, cos + token * ROTATED, sin + token * ROTATED, weight, eps, offset,
            DIM, ROTATED, NORM, NEIGHBOURS, NORM_LAST,
        )  # fmt: skip
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * DIM + numbers, x, mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        cell = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        cache = key_cache if head < HEADS + KV_HEADS else value_cache
        if slot >= 0:
            scale = tl.load(scales + head - HEADS) if FP8 else 1.0
            tl.store(cache + cell * DIM + numbers, stored(x, scale, cache.dtype.element_ty, FP8), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def latent_kernel(
    query,  # [T, HEADS, WIDTH]
    compressed,  # [T, RANK + ROPE]
    weight,  # [RANK]
    cos,  # [T, ROPE]
    sin,  # [T, ROPE]
    latents,  # [num_slots, RANK]
    rope_keys,  # [num_slots, ROPE]
    slot_mapping,  # [T] int64
    scales,  # [2] of latent vectors and rotary keys; unused unless FP8
    eps,
    offset,
    compressed_stride,  # elements from token to token
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute `reference.rotate_and_write_latents` for one query head of one token, or for its cached vectors."""
    # The last program of a token is for the cached vectors. A query is rotated in place, so it must have one warp,
    # which loads all numbers before it stores any.
    HALF: tl.constexpr = ROPE // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cached = head == HEADS
    source = query + (token * HEADS + head) * WIDTH + WIDTH - ROPE
    if cached:
        source = compressed + token * compressed_stride + RANK
    pairs = tl.arange(0, BLOCK_R)
    inside = pairs < HALF
    first, second = pairs, pairs + HALF
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    x = tl.load(source + first, mask=inside, other=0.0)
    y = tl.load(source + second, mask=inside, other=0.0)
    c = tl.load(cos + token * ROPE + pairs, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * ROPE + pairs, mask=inside, other=0.0).to(tl.float32)
    low = (x.to(tl.float32) * c - y.to(tl.float32) * s).to(x.dtype)
    high = (y.to(tl.float32) * c + x.to(tl.float32) * s).to(x.dtype)
    if not cached:
        tl.store(source + pairs, low, mask=inside)
        tl.store(source + HALF + pairs, high, mask=inside)
        return
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    TYPE: tl.constexpr = latents.dtype.element_ty
    scale = tl.load(scales + 1) if FP8 else 1.0
    tl.store(rope_keys + slot * ROPE + pairs, stored(low, scale, TYPE, FP8), mask=inside)
    tl.store(rope_keys + slot * ROPE + HALF + pairs, stored(high, scale, TYPE, FP8), mask=inside)
    numbers = tl.arange(0, BLOCK_L)
    real = numbers < RANK
    row = tl.load(compressed + token * compressed_stride + numbers, mask=real, other=0.0)
    normed = normalise(row.to(tl.float32), weight, real, numbers, RANK, eps, offset, CENTRED=False)
    scale = tl.load(scales) if FP8 else 1.0
    tl.store(latents + slot * RANK + numbers, stored(normed.to(row.dtype), scale, TYPE, FP8), mask=real)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return activation(x). The number of the activation is its index in `Activation`."""
    if ACTIVATION == 1:  # gelu
        y = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    elif ACTIVATION == 2:  # gelu_tanh: 0.5 x (1 + tanh(z)) is x times the sigmoid of 2 z
        y = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == 3:  # relu2
        y = tl.where(x > 0, x * x, 0.0)
    else:  # silu
        y = x / (1 + tl.exp(-x))
    return y


@triton.jit
def activation_kernel(
    rows,  # [T, 2 if GATED else 1, SIZE]
    output,  # [T, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute `reference.gated` or `reference.activated` for BLOCK numbers of one token."""
    # Token and block are the program ids.
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = numbers < SIZE
    row = rows + token * (2 if GATED else 1) * SIZE + numbers
    gate = tl.load(row, mask=inside, other=0.0)
    y = activate(gate.to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(row + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + numbers, y.to(gate.dtype), mask=inside)
