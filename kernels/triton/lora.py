"""LoRA products for CUDA. Tokens are sorted by adapter, and divided into tiles of tokens with the same adapter."""
# One kernel computes A x, and another adds B A x to the output. A step of few tokens has few tiles, so several programs
# share the columns of A, and the second kernel adds their results. A graph of decodes has a fixed number of tiles, of
# which some may be empty. Both kernels have one tiling for all numbers of tokens, so that none is compiled after a
# warm-up.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from llmsched.kernels.lora import LoraMatrices
from llmsched.kernels.triton.tiling import MIN_PRODUCT, Gpu

#: Tokens of a tile, and outputs that one program computes.
BLOCK_T, BLOCK_M = 32, 64
#: Numbers of a row, and ranks, that a program reads at a time.
BLOCK_N, MAX_BLOCK_R = 64, 64
#: Fewest steps through the columns of A that a program gets when several programs share them.
MIN_STEPS = 4
PROGRAMS_PER_PROCESSOR = 2
#: Warps of a program. With 4 warps, registers would spill in float32.
NUM_WARPS = 8


class Work(NamedTuple):
    tiles: Tensor  # int32 [tiles, 3]: adapter, first place in `order`, and number of tokens (0: the tile is empty)
    order: Tensor  # int32 [T], tokens in the order of their adapters


def prepare_lora(
    adapters: npt.NDArray[np.int32], num_adapters: int, put: Callable[[npt.NDArray[np.generic]], Tensor]
) -> Work:
    tokens = len(adapters)
    order = adapters.argsort(kind="stable").astype(np.int32)
    counts = np.bincount(adapters + 1, minlength=num_adapters + 1)  # the first is of tokens without an adapter
    bounds = counts.cumsum().tolist()
    found = [
        (adapter, start, min(BLOCK_T, end - start))
        for adapter, (first, end) in enumerate(pairwise(bounds))
        for start in range(first, end, BLOCK_T)
    ]
    # An adapter has at most one tile that is not full.
    tiles = np.zeros((tokens // BLOCK_T + min(tokens, num_adapters), 3), np.int32)
    tiles[: len(found)] = np.array(found, np.int32).reshape(-1, 3)
    return Work(put(tiles), put(order))


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    rows,  # [num_tokens, SIZE]
    a,  # [adapters, RANKS, SIZE]
    tiles,  # see Work
    order,  # [num_tokens]
    inner,  # float32 [programs that share the columns, num_tokens, RANKS], tokens in the order of `order`
    num_tokens,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute A x for a tile of tokens, for some of the ranks and columns of A."""
    tile, share = tiles + tl.program_id(0) * 3, tl.program_id(2)
    adapter, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0:
        return
    places, ranks = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    real, known = places < count, ranks < RANKS
    tokens = tl.load(order + start + places, mask=real, other=0).to(tl.int64)
    span = tl.cdiv(tl.cdiv(SIZE, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for first in range(share * span, min((share + 1) * span, SIZE), BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        inside = columns < SIZE
        x = tl.load(rows + tokens[:, None] * SIZE + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        weights = a + (adapter * RANKS + ranks)[None, :] * SIZE + columns[:, None]
        w = tl.load(weights, mask=known[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    place = (share * num_tokens + start + places).to(tl.int64)[:, None] * RANKS + ranks[None, :]
    tl.store(inner + place, total, mask=real[:, None] & known[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_shares"])
def expand_kernel(
    inner,  # float32 [num_shares, num_tokens, SPANS x RANK], tokens in the order of `order`
    b,  # [adapters, RANK, WIDTH]
    tiles,  # see Work
    order,  # [num_tokens]
    parts,  # int32 [parts, 4], see `output_parts`
    output,  # [num_tokens, stride]
    num_tokens,
    num_shares,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add B A x to some outputs of a tile of tokens."""
    tile, part = tiles + tl.program_id(0) * 3, parts + tl.program_id(1) * 4
    adapter, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0:
        return
    span, column, first, size = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    places, numbers = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_M)
    real, inside = places < count, numbers < size
    tokens = tl.load(order + start + places, mask=real, other=0).to(tl.int64)
    written = output + tokens[:, None] * stride + (first + numbers)[None, :]
    total = tl.load(written, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for base in range(0, RANK, BLOCK_R):
        ranks = base + tl.arange(0, BLOCK_R)
        known = ranks < RANK
        weights = b + (adapter * RANK + ranks)[:, None] * WIDTH + (column + numbers)[None, :]
        w = tl.load(weights, mask=known[:, None] & inside[None, :], other=0.0)
        x = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for share in range(num_shares):
            place = (share * num_tokens + start + places).to(tl.int64)[:, None] * RANKS + (span * RANK + ranks)[None, :]
            x += tl.load(inner + place, mask=real[:, None] & known[None, :], other=0.0)
        total = tl.dot(x.to(w.dtype), w, total, input_precision="ieee")
    tl.store(written, total.to(output.dtype.element_ty), mask=real[:, None] & inside[None, :])


def add_lora(output: Tensor, rows: Tensor, matrices: LoraMatrices, work: Work, gpu: Gpu) -> None:
    """Compute `lora.add_lora`."""
    a, b, spans = matrices
    (_, ranks, size), (_, rank, width) = a.shape, b.shape
    num_tiles, tokens = len(work.tiles), len(rows)
    if not num_tiles:
        return
    # A block of ranks may reach beyond a span in the first product, but not in the second.
    block_r, blocks = block_of(ranks), -(-ranks // block_of(ranks))
    num_shares = count_shares(num_tiles * blocks, size, gpu)
    inner = rows.new_empty(num_shares, tokens, ranks, dtype=torch.float32)
    shrink_kernel[(num_tiles, blocks, num_shares)](
        rows.contiguous(),
        a,
        work.tiles,
        work.order,
        inner,
        tokens,
        SIZE=size,
        RANKS=ranks,
        BLOCK_T=BLOCK_T,
        BLOCK_R=block_r,
        BLOCK_N=BLOCK_N,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    parts = output_parts(spans, output.device)
    expand_kernel[(num_tiles, len(parts))](
        inner,
        b,
        work.tiles,
        work.order,
        parts,
        output,
        tokens,
        num_shares,
        output.stride(0),
        RANK=rank,
        RANKS=ranks,
        WIDTH=width,
        BLOCK_T=BLOCK_T,
        BLOCK_R=block_of(rank),
        BLOCK_M=BLOCK_M,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def block_of(ranks: int) -> int:
    """Return how many of `ranks` ranks a program reads at a time."""
    return min(MAX_BLOCK_R, max(MIN_PRODUCT, 1 << (ranks - 1).bit_length()))


def count_shares(num_programs: int, size: int, gpu: Gpu) -> int:
    """Return how many programs share `size` columns of A, if `num_programs` programs could each read all columns."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * gpu.num_processors // num_programs)
    return max(1, min(wanted, size // (MIN_STEPS * BLOCK_N)))


@cache
def output_parts(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Divide the adapted outputs into parts of at most BLOCK_M outputs of one span.

    Returns int32 [parts, 4]: the span, the first column of B, the first output, and the number of outputs.
    """
    found, column = [], 0
    for span, (first, width) in enumerate(spans):
        found += [
            (span, column + start, first + start, min(BLOCK_M, width - start)) for start in range(0, width, BLOCK_M)
        ]
        column += width
    return torch.tensor(found, dtype=torch.int32, device=device)
