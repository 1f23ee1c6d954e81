"""Kernels for mixtures of experts: the choice of experts, the order of the pairs, and the products of all experts."""
# Pairs of a token and an expert are ordered by expert. A block is up to BLOCK_M neighbouring pairs of one expert, and
# each program multiplies one block by BLOCK_N rows of the expert's matrix. How many blocks an expert has is known only
# on the device. So there are as many programs as blocks are possible, each program finds its own block, and those
# without one end at once. No result depends on the order in which programs run.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from llmsched.kernels.triton.layer import activate
from llmsched.kernels.triton.packed_products import HALF, decoded


@triton.jit
def group_scores(ranked, columns, BEST: tl.constexpr):
    """Return the sum of the BEST largest numbers of each row of `ranked`."""
    total = tl.max(ranked, 1)
    if BEST == 2:
        first = tl.min(tl.where(ranked == total[:, None], columns, 1 << 30), 1)
        total += tl.max(tl.where(columns == first[:, None], float("-inf"), ranked), 1)
    return total


@triton.jit
def route_kernel(
    logits,  # [T, GROUPS x SIZE]
    correction,  # [GROUPS x SIZE] float32; unused unless CORRECTED
    experts,  # [T, CHOSEN] int32
    weights,  # [T, CHOSEN] float32
    factor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute `reference.route` for one token. If scores are equal, lower numbers are chosen."""
    token = tl.program_id(0).to(tl.int64)
    groups, columns = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    numbers, real = groups * SIZE + columns, (groups < GROUPS) & (columns < SIZE)
    x = tl.load(logits + token * GROUPS * SIZE + numbers, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + numbers, mask=real, other=0.0)
    ranked = tl.where(real, ranked, float("-inf"))
    if GROUPS > 1:
        best = group_scores(ranked, columns, GROUP_BEST)
        names = tl.arange(0, BLOCK_G)
        kept = names < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            group = tl.min(tl.where(best == tl.max(best, 0), names, BLOCK_G), 0)
            kept |= names == group
            best = tl.where(names == group, float("-inf"), best)
        ranked = tl.where(kept[:, None], ranked, float("-inf"))
    places = tl.arange(0, BLOCK_C)
    found, shares = tl.zeros([BLOCK_C], tl.int32), tl.zeros([BLOCK_C], tl.float32)
    for place in tl.static_range(CHOSEN):
        equal = real & (ranked == tl.max(tl.max(ranked, 1), 0))
        expert = tl.min(tl.min(tl.where(equal, numbers, GROUPS * SIZE - 1), 1), 0)  # the last one if all are NaN
        share = tl.sum(tl.sum(tl.where(numbers == expert, scores, 0.0), 1), 0)
        found, shares = tl.where(places == place, expert, found), tl.where(places == place, share, shares)
        ranked = tl.where(numbers == expert, float("-inf"), ranked)
    if NORMALISED:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    tl.store(experts + token * CHOSEN + places, found, mask=places < CHOSEN)
    tl.store(weights + token * CHOSEN + places, shares * factor, mask=places < CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"])
def order_kernel(
    experts,  # [P]
    order,  # [P]; gets the numbers of the pairs, sorted by expert and then by number
    starts,  # [E + 1]; gets the index in `order` of the first pair of each expert, and P
    num_pairs,
    BLOCK: tl.constexpr,
):
    """Find the places of one expert's pairs in the order."""
    expert = tl.program_id(0)
    place = tl.full([], 0, tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        found = tl.load(experts + pairs, mask=pairs < num_pairs, other=1 << 30)
        place += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        own = (tl.load(experts + pairs, mask=pairs < num_pairs, other=1 << 30) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, pairs, mask=own == 1)
        place += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, num_pairs)


@triton.jit
def find_block(starts, block, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a block, the place of the block's first pair and the end of the expert's places."""
    # The expert is EXPERTS if there is no such block.
    numbers = tl.arange(0, BLOCK_E)
    begins = tl.load(starts + numbers, mask=numbers < EXPERTS, other=0)
    ends = tl.load(starts + numbers + 1, mask=numbers < EXPERTS, other=0)
    last = tl.cumsum((ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    before = last <= block
    expert = tl.minimum(tl.sum(before.to(tl.int32), 0), EXPERTS)
    index = block - tl.max(tl.where(before, last, 0), 0)
    own = numbers == expert
    begin, end = tl.sum(tl.where(own, begins, 0), 0), tl.sum(tl.where(own, ends, 0), 0)
    return expert, begin + index * BLOCK_M, end


@triton.jit
def dense_product(
    rows,
    sources,
    real,
    matrix,
    names,
    inside,
    row_stride,
    column_stride,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of some rows with the rows `names` of a matrix."""
    # `sources` are the numbers of the rows. `real` and `inside` are False for padding.
    columns = matrix + names[None, :] * row_stride
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left, right = real[:, None], inside[None, :]
        if SIZE % BLOCK_K != 0:
            left, right = left & (depth < SIZE)[None, :], right & (depth < SIZE)[:, None]
        x = tl.load(rows + sources[:, None] * SIZE + depth[None, :], mask=left, other=0.0)
        y = tl.load(columns + depth[:, None] * column_stride, mask=right, other=0.0)
        product = tl.dot(x, y, product, input_precision="ieee")
    return product


@triton.jit
def packed_product(
    rows,
    sources,
    real,
    codes,
    scales,
    offsets,
    table,
    inputs,
    names,
    inside,
    SIZE: tl.constexpr,
    CODING: tl.constexpr,
    PER_BYTE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Return the products of some rows with the rows `names` of a packed matrix, see `packed_products`."""
    # If `inputs` is given, column j belongs to number inputs[j] of a row.
    ROW_BYTES: tl.constexpr = SIZE // PER_BYTE
    places, lanes, numbers = tl.arange(0, BLOCK_B // HALF) * HALF, tl.arange(0, HALF), tl.arange(0, BLOCK_B)
    columns = numbers // HALF * (HALF * PER_BYTE) + numbers % HALF
    code_rows = codes + names[:, None, None] * ROW_BYTES + lanes[None, None, :]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ROW_BYTES, BLOCK_B):
        there = inside[:, None] & (start + places < ROW_BYTES)[None, :]
        packed = tl.load(code_rows + (start + places)[None, :, None], mask=there[:, :, None], other=0)
        for half in tl.static_range(PER_BYTE):
            part = packed
            if PER_BYTE == 2:
                part = packed >> 4 if half else packed & 15
            group = names[:, None] * (SIZE // GROUP) + (((start + places) * PER_BYTE + half * HALF) // GROUP)[None, :]
            scale = tl.load(scales + group, mask=there, other=0.0).to(tl.float32)
            weights = decoded(part, table, CODING) * scale[:, :, None]
            if offsets is not None:
                weights += tl.load(offsets + group, mask=there, other=0.0).to(tl.float32)[:, :, None]
            column = start * PER_BYTE + half * HALF + columns
            left = real[:, None] & (column < SIZE)[None, :]
            if inputs is not None:
                column = tl.load(inputs + column, mask=column < SIZE, other=0)
            x = tl.load(rows + sources[:, None] * SIZE + column[None, :], mask=left, other=0.0)
            weights = tl.trans(weights.to(x.dtype).reshape(BLOCK_N, BLOCK_B))
            product = tl.dot(x, weights, product, input_precision="ieee")
    return product


@triton.jit
def expert_product(
    rows,
    sources,
    real,
    matrices,
    scales,
    offsets,
    table,
    inputs,
    biases,
    expert,
    names,
    inside,
    expert_stride,
    row_stride,
    column_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CODING: tl.constexpr,
    PER_BYTE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of some rows with the rows `names` of an expert's matrix, plus the biases."""
    if PER_BYTE > 0:
        own_inputs = None
        if inputs is not None:
            own_inputs = inputs + expert * SIZE
        product = packed_product(
            rows, sources, real, matrices, scales, offsets, table, own_inputs, expert.to(tl.int64) * WIDTH + names,
            inside, SIZE, CODING, PER_BYTE, GROUP, BLOCK_M, BLOCK_N, BLOCK_K // 2,
        )  # fmt: skip
    else:
        product = dense_product(
            rows, sources, real, matrices + expert.to(tl.int64) * expert_stride, names, inside, row_stride,
            column_stride, SIZE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if biases is not None:
        product += tl.load(biases + expert * WIDTH + names, mask=inside, other=0.0).to(tl.float32)[None, :]
    return product


@triton.jit
def find_columns(tile, WIDTH: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns of a tile of the product, a mask of real ones, and their rows in the expert's matrix."""
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    names = columns
    if GATED and not INTERLEAVED:  # gate and up alternate in the columns of the product
        names = columns % 2 * (WIDTH // 2) + columns // 2
    return columns, columns < WIDTH, names


@triton.jit
def join_halves(
    product,
    slope,
    limit,
    shift,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Join gate and up, which alternate in the columns of a product, see `experts.Gate`."""
    gate, up = tl.split(tl.reshape(product, [BLOCK_M, BLOCK_N // 2, 2]))
    if LIMITED:
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    return activate(gate * slope, ACTIVATION) / slope * (up + shift)


@triton.jit
def expert_kernel(
    rows,  # [T, SIZE] if GATED, else [P, SIZE] in the order of the pairs
    matrices,  # [EXPERTS, WIDTH, SIZE] with the strides below; codes [EXPERTS x WIDTH, SIZE / PER_BYTE] if PER_BYTE > 0
    scales,  # [EXPERTS x WIDTH, SIZE / GROUP]; unused if PER_BYTE is 0
    offsets,  # [EXPERTS x WIDTH, SIZE / GROUP] or None
    table,  # [16]; unused unless CODING is TABLE
    inputs,  # [EXPERTS, SIZE] int64 or None
    biases,  # [EXPERTS, WIDTH] or None
    order,  # [P]
    starts,  # [EXPERTS + 1]
    weights,  # [P] float32; unused if GATED
    output,  # [P, WIDTH / 2] in the order of the pairs if GATED, else [P, WIDTH] by number of the pair
    expert_stride,
    row_stride,
    column_stride,
    slope,
    limit,
    shift,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    CODING: tl.constexpr,
    PER_BYTE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a block of pairs by a part of their expert's matrix: the first product with the gate, or the second."""
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % TILES  # innermost, so that the programs of an expert run together
    expert, first, end = find_block(starts, tl.program_id(0) // TILES, EXPERTS, BLOCK_E, BLOCK_M)
    if expert == EXPERTS:
        return
    places = first + tl.arange(0, BLOCK_M)
    real = places < end
    pairs = tl.load(order + places, mask=real, other=0)
    sources = (pairs // CHOSEN if GATED else places).to(tl.int64)
    columns, inside, names = find_columns(tile, WIDTH, GATED, INTERLEAVED, BLOCK_N)
    product = expert_product(
        rows, sources, real, matrices, scales, offsets, table, inputs, biases, expert, names, inside,
        expert_stride, row_stride, column_stride,
        WIDTH, SIZE, CODING, PER_BYTE, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if GATED:
        result = join_halves(product, slope, limit, shift, ACTIVATION, LIMITED, BLOCK_M, BLOCK_N)
        numbers = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        targets = output + places.to(tl.int64)[:, None] * (WIDTH // 2) + numbers[None, :]
        tl.store(targets, result.to(output.dtype.element_ty), mask=real[:, None] & (numbers < WIDTH // 2)[None, :])
    else:
        result = product * tl.load(weights + pairs, mask=real, other=0.0)[:, None]
        targets = output + pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(targets, result.to(output.dtype.element_ty), mask=real[:, None] & inside[None, :])
