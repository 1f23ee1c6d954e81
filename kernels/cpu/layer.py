"""CPU kernels for the work of a decoder layer between its matrix products: norms, rotary embedding, gated activation.

Each kernel reads its inputs once, computes in float32 and writes its outputs once. A kernel with little work runs on
the calling thread alone, because waking the other threads would take longer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, exp32, jit, put, tanh32, to_float32
from llmsched.kernels.cpu.openmp import address_of, arguments_type, as_pointer, own_part, run, thread_num
from llmsched.kernels.reference import Activation

PARALLEL_ELEMENTS = 1 << 14  # elements (about 4 us on one core) from which several threads are faster

NormArguments = arguments_type(
    addresses=("residual", "branch", "branch_weight", "weight", "output"),
    sizes=("tokens", "size"),
    floats=("eps", "offset"),
)
RotaryArguments = arguments_type(
    addresses=("projected", "cos", "sin", "query_weight", "key_weight", "query", "keys", "values", "slots"),
    sizes=("tokens", "heads", "kv_heads", "head_dim", "num_blocks", "block_size"),
    floats=("eps", "offset"),
)
GateArguments = arguments_type(addresses=("gate_up", "output"), sizes=("tokens", "size", "gelu"))


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    branch_weight: Tensor | None = None,
) -> Tensor:
    """Compute `reference.add_norm` of contiguous float32 or bfloat16 tensors."""
    output = torch.empty_like(residual)
    tokens, size = residual.shape
    arguments = NormArguments(
        residual.data_ptr(),
        address_of(branch),
        address_of(branch_weight),
        weight.data_ptr(),
        output.data_ptr(),
        tokens,
        size,
        eps,
        offset,
    )
    run(norm_body(ELEMENTS[residual.dtype]), arguments, parallel=tokens > 1 and tokens * size >= PARALLEL_ELEMENTS)
    return output


@cache
def norm_body(element: np.dtype[Any]) -> Any:
    """Compile and return the function that each thread runs for `add_norm`."""

    @c_function(types.CPointer(numba.from_dtype(NormArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        residual = numba.carray(as_pointer(a.residual), (a.tokens, a.size), element)
        branch = numba.carray(as_pointer(a.branch), (a.tokens, a.size), element)
        output = numba.carray(as_pointer(a.output), (a.tokens, a.size), element)
        branch_weight = numba.carray(as_pointer(a.branch_weight), (a.size,), element)
        weight = numba.carray(as_pointer(a.weight), (a.size,), element)
        row = np.empty(a.size, np.float32)
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            if a.branch != 0 and a.branch_weight != 0:
                load(branch[token], row)
                normalise(row, branch_weight, a.eps, a.offset, output[token])
                add(output[token], residual[token])
            elif a.branch != 0:
                add(branch[token], residual[token])
            load(residual[token], row)
            normalise(row, weight, a.eps, a.offset, output[token])

    return body


@jit()
def load(source: Any, row: Any) -> None:
    for i in range(row.shape[0]):
        row[i] = to_float32(source[i])


@jit()
def add(source: Any, total: Any) -> None:
    for i in range(total.shape[0]):
        put(total, i, to_float32(total[i]) + to_float32(source[i]))


@jit()
def normalise(row: Any, weight: Any, eps: Any, offset: Any, output: Any) -> None:
    """Write the RMS norm of a row, with weights `weight + offset`, to `output`."""
    squares = np.float32(0)
    for i in range(row.shape[0]):
        squares += row[i] * row[i]
    scale = np.float32(1) / np.sqrt(squares / np.float32(row.shape[0]) + eps)
    for i in range(row.shape[0]):
        put(output, i, row[i] * scale * (to_float32(weight[i]) + offset))


def rotate_and_write(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Compute `reference.rotate_and_write` of contiguous float32 or bfloat16 tensors."""
    tokens, size = projected.shape
    num_blocks, kv_heads, block_size, head_dim = key_cache.shape
    heads = size // head_dim - 2 * kv_heads
    query = projected.new_empty(tokens, heads, head_dim)
    arguments = RotaryArguments(
        projected.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        address_of(query_weight),
        address_of(key_weight),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        heads,
        kv_heads,
        head_dim,
        num_blocks,
        block_size,
        eps,
        offset,
    )
    body = rotary_body(ELEMENTS[projected.dtype], ELEMENTS[key_cache.dtype])
    run(body, arguments, parallel=tokens > 1 and tokens * size >= PARALLEL_ELEMENTS)
    return query


@cache
def rotary_body(element: np.dtype[Any], cached: np.dtype[Any]) -> Any:
    """Compile and return the function that each thread runs for `rotate_and_write`."""

    @c_function(types.CPointer(numba.from_dtype(RotaryArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        heads, kv_heads, dim = a.heads, a.kv_heads, a.head_dim
        projected = numba.carray(as_pointer(a.projected), (a.tokens, heads + 2 * kv_heads, dim), element)
        query = numba.carray(as_pointer(a.query), (a.tokens, heads, dim), element)
        cos = numba.carray(as_pointer(a.cos), (a.tokens, dim), element)
        sin = numba.carray(as_pointer(a.sin), (a.tokens, dim), element)
        query_weight = numba.carray(as_pointer(a.query_weight), (dim,), element)
        key_weight = numba.carray(as_pointer(a.key_weight), (dim,), element)
        keys = numba.carray(as_pointer(a.keys), (a.num_blocks, kv_heads, a.block_size, dim), cached)
        values = numba.carray(as_pointer(a.values), (a.num_blocks, kv_heads, a.block_size, dim), cached)
        slots = numba.carray(as_pointer(a.slots), (a.tokens,), np.int64)
        row, normed = np.empty(dim, np.float32), np.empty(dim, element)
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            vectors, c, s = projected[token], cos[token], sin[token]
            for head in range(heads):
                load(vectors[head], row)
                if a.query_weight != 0:
                    normalise(row, query_weight, a.eps, a.offset, normed)
                    load(normed, row)
                rotate(row, c, s, query[token, head])
            if slots[token] >= 0:
                block, place = slots[token] // a.block_size, slots[token] % a.block_size
                for head in range(kv_heads):
                    load(vectors[heads + head], row)
                    if a.key_weight != 0:
                        normalise(row, key_weight, a.eps, a.offset, normed)
                        load(normed, row)
                    rotate(row, c, s, keys[block, head, place])
                    copy_row(vectors[heads + kv_heads + head], values[block, head, place])

    return body


@jit()
def copy_row(source: Any, target: Any) -> None:
    for i in range(target.shape[0]):
        put(target, i, to_float32(source[i]))


@jit()
def rotate(row: Any, cos: Any, sin: Any, output: Any) -> None:
    """Write the rotary embedding of a vector to `output`; see `reference.rotate_and_write`."""
    half = row.shape[0] // 2
    for i in range(half):
        put(output, i, row[i] * to_float32(cos[i]) - row[half + i] * to_float32(sin[i]))
        put(output, half + i, row[half + i] * to_float32(cos[half + i]) + row[i] * to_float32(sin[half + i]))


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute `reference.gated` of a contiguous float32 or bfloat16 tensor."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(tokens, size)
    arguments = GateArguments(gate_up.data_ptr(), output.data_ptr(), tokens, size, activation == "gelu_tanh")
    run(gate_body(ELEMENTS[gate_up.dtype]), arguments, parallel=tokens > 1 and tokens * size >= PARALLEL_ELEMENTS)
    return output


@cache
def gate_body(element: np.dtype[Any]) -> Any:
    """Compile and return the function that each thread runs for `gated`."""

    @c_function(types.CPointer(numba.from_dtype(GateArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        gate_up = numba.carray(as_pointer(a.gate_up), (a.tokens, 2, a.size), element)
        output = numba.carray(as_pointer(a.output), (a.tokens, a.size), element)
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            if a.gelu != 0:
                gelu_row(gate_up[token, 0], gate_up[token, 1], output[token])
            else:
                silu_row(gate_up[token, 0], gate_up[token, 1], output[token])

    return body


@jit()
def silu_row(gate: Any, up: Any, output: Any) -> None:
    for i in range(output.shape[0]):
        x = to_float32(gate[i])
        decay = exp32(-abs(x))
        sigmoid = (decay if x < np.float32(0) else np.float32(1)) / (np.float32(1) + decay)
        put(output, i, x * sigmoid * to_float32(up[i]))


@jit()
def gelu_row(gate: Any, up: Any, output: Any) -> None:
    for i in range(output.shape[0]):
        x = to_float32(gate[i])
        inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
        put(output, i, np.float32(0.5) * x * (np.float32(1) + tanh32(inner)) * to_float32(up[i]))
