"""CPU kernels for the work of a decoder layer between its matrix products: norms, rotary embedding, activation.

Each op computes the op of the same name in reference.py, for contiguous float32 or bfloat16 tensors.
"""
# Each kernel reads its inputs once, computes in float32 and writes its outputs once. A kernel with little work runs on
# the calling thread alone, because waking the other threads would take longer.

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, erf32, exp32, jit, put, tanh32, to_float32
from llmsched.kernels.cpu.openmp import address_of, arguments_type, as_pointer, own_part, run, thread_num
from llmsched.kernels.reference import Activation

PARALLEL_ELEMENTS = 1 << 14  # elements (about 4 us on one core) from which several threads are faster

NormArguments = arguments_type(
    addresses=("residual", "branch", "branch_weight", "weight", "bias", "output"),
    sizes=("tokens", "size", "centred"),
    floats=("eps", "offset"),
)
RotaryArguments = arguments_type(
    addresses=("projected", "cos", "sin", "query_weight", "key_weight", "query", "keys", "values", "slots", "scales"),
    sizes=(
        *("tokens", "heads", "kv_heads", "head_dim", "rotated"),
        *("by_group", "neighbours", "norm_last", "num_blocks", "block_size"),
    ),
    floats=("eps", "offset"),
)
ActivationArguments = arguments_type(addresses=("rows", "output"), sizes=("tokens", "parts", "size", "activation"))
NUMBERS: dict[Activation, int] = {name: number for number, name in enumerate(get_args(Activation))}
SILU, GELU, RELU2 = NUMBERS["silu"], NUMBERS["gelu"], NUMBERS["relu2"]


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    branch_weight: Tensor | None = None,
) -> Tensor:
    output = torch.empty_like(residual)
    tokens, size = residual.shape
    arguments = NormArguments(
        residual.data_ptr(),
        address_of(branch),
        address_of(branch_weight),
        weight.data_ptr(),
        address_of(bias),
        output.data_ptr(),
        tokens,
        size,
        centred,
        eps,
        offset,
    )
    run(norm_body(ELEMENTS[residual.dtype]), arguments, parallel=tokens > 1 and tokens * size >= PARALLEL_ELEMENTS)
    return output


@cache
def norm_body(element: np.dtype[Any]) -> Any:
    @c_function(types.CPointer(numba.from_dtype(NormArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        residual = numba.carray(as_pointer(a.residual), (a.tokens, a.size), element)
        branch = numba.carray(as_pointer(a.branch), (a.tokens, a.size), element)
        output = numba.carray(as_pointer(a.output), (a.tokens, a.size), element)
        branch_weight = numba.carray(as_pointer(a.branch_weight), (a.size,), element)
        weight = numba.carray(as_pointer(a.weight), (a.size,), element)
        bias = numba.carray(as_pointer(a.bias), (a.size,), element)
        row = np.empty(a.size, np.float32)
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            if a.branch != 0 and a.branch_weight != 0:
                load(branch[token], row)
                normalise(row, branch_weight, bias, False, a.centred != 0, a.eps, a.offset, output[token])
                add(output[token], residual[token])
            elif a.branch != 0:
                add(branch[token], residual[token])
            load(residual[token], row)
            normalise(row, weight, bias, a.bias != 0, a.centred != 0, a.eps, a.offset, output[token])

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
def normalise(
    row: Any, weight: Any, bias: Any, biased: bool, centred: bool, eps: Any, offset: Any, output: Any
) -> None:
    """Write the normalised `row` to `output`, computed as in `reference.norm`. Overwrites `row` if `centred`."""
    if centred:
        total = np.float32(0)
        for i in range(row.shape[0]):
            total += row[i]
        mean = total / np.float32(row.shape[0])
        for i in range(row.shape[0]):
            row[i] -= mean
    squares = np.float32(0)
    for i in range(row.shape[0]):
        squares += row[i] * row[i]
    scale = np.float32(1) / np.sqrt(squares / np.float32(row.shape[0]) + eps)
    if biased:
        for i in range(row.shape[0]):
            put(output, i, row[i] * scale * (to_float32(weight[i]) + offset) + to_float32(bias[i]))
    else:
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
    by_group: bool = False,
    neighbours: bool = False,
    norm_last: bool = False,
    kv_scales: Tensor | None = None,
) -> Tensor:
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
        address_of(kv_scales),
        tokens,
        heads,
        kv_heads,
        head_dim,
        cos.shape[1],
        by_group,
        neighbours,
        norm_last,
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
    @c_function(types.CPointer(numba.from_dtype(RotaryArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        heads, kv_heads, dim = a.heads, a.kv_heads, a.head_dim
        group = heads // kv_heads
        projected = numba.carray(as_pointer(a.projected), (a.tokens, heads + 2 * kv_heads, dim), element)
        query = numba.carray(as_pointer(a.query), (a.tokens, heads, dim), element)
        cos = numba.carray(as_pointer(a.cos), (a.tokens, a.rotated), element)
        sin = numba.carray(as_pointer(a.sin), (a.tokens, a.rotated), element)
        query_weight = numba.carray(as_pointer(a.query_weight), (dim,), element)
        key_weight = numba.carray(as_pointer(a.key_weight), (dim,), element)
        keys = numba.carray(as_pointer(a.keys), (a.num_blocks, kv_heads, a.block_size, dim), cached)
        values = numba.carray(as_pointer(a.values), (a.num_blocks, kv_heads, a.block_size, dim), cached)
        slots = numba.carray(as_pointer(a.slots), (a.tokens,), np.int64)
        scales = numba.carray(as_pointer(a.scales), (2, kv_heads), np.float32)
        row, normed = np.empty(dim, np.float32), np.empty(dim, element)
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            vectors, c, s = projected[token], cos[token], sin[token]
            for head in range(heads):
                place = head // group * (group + 2) + head % group if a.by_group != 0 else head
                load(vectors[place], row)
                if a.query_weight != 0 and a.norm_last == 0:
                    normalise(row, query_weight, query_weight, False, False, a.eps, a.offset, normed)
                    load(normed, row)
                rotate(row, c, s, a.neighbours != 0, query[token, head])
                if a.query_weight != 0 and a.norm_last != 0:
                    load(query[token, head], row)
                    normalise(row, query_weight, query_weight, False, False, a.eps, a.offset, query[token, head])
            if slots[token] >= 0:
                block, offset = slots[token] // a.block_size, slots[token] % a.block_size
                for head in range(kv_heads):
                    place = head * (group + 2) + group if a.by_group != 0 else heads + head
                    load(vectors[place], row)
                    if a.key_weight != 0 and a.norm_last == 0:
                        normalise(row, key_weight, key_weight, False, False, a.eps, a.offset, normed)
                        load(normed, row)
                    rotate(row, c, s, a.neighbours != 0, normed)
                    if a.key_weight != 0 and a.norm_last != 0:
                        load(normed, row)
                        normalise(row, key_weight, key_weight, False, False, a.eps, a.offset, normed)
                    key_scale, value_scale = np.float32(1), np.float32(1)
                    if a.scales != 0:
                        key_scale, value_scale = scales[0, head], scales[1, head]
                    store_row(normed, key_scale, keys[block, head, offset])
                    place += 1 if a.by_group != 0 else kv_heads
                    store_row(vectors[place], value_scale, values[block, head, offset])

    return body


@jit()
def store_row(source: Any, scale: Any, target: Any) -> None:
    inverse = np.float32(1) / scale  # exact for powers of two
    for i in range(target.shape[0]):
        put(target, i, to_float32(source[i]) * inverse)


@jit()
def rotate(row: Any, cos: Any, sin: Any, neighbours: bool, output: Any) -> None:
    """Write the vector `row` with its rotary position embedding to `output`, computed as in `reference.rotate`."""
    half = cos.shape[0] // 2
    if neighbours:
        for i in range(0, 2 * half, 2):
            put(output, i, row[i] * to_float32(cos[i]) - row[i + 1] * to_float32(sin[i]))
            put(output, i + 1, row[i + 1] * to_float32(cos[i + 1]) + row[i] * to_float32(sin[i + 1]))
    else:
        for i in range(half):
            put(output, i, row[i] * to_float32(cos[i]) - row[half + i] * to_float32(sin[i]))
            put(output, half + i, row[half + i] * to_float32(cos[half + i]) + row[i] * to_float32(sin[half + i]))
    for i in range(2 * half, row.shape[0]):
        put(output, i, row[i])


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    return activate(gate_up, 2, activation)


def activated(rows: Tensor, activation: Activation) -> Tensor:
    return activate(rows, 1, activation)


def activate(rows: Tensor, parts: int, activation: Activation) -> Tensor:
    """Return the activation of the first part of each row, multiplied by the second part if there are two parts."""
    tokens, size = rows.shape[0], rows.shape[1] // parts
    output = rows.new_empty(tokens, size)
    arguments = ActivationArguments(rows.data_ptr(), output.data_ptr(), tokens, parts, size, NUMBERS[activation])
    body = activation_body(ELEMENTS[rows.dtype])
    run(body, arguments, parallel=tokens > 1 and tokens * size >= PARALLEL_ELEMENTS)
    return output


@cache
def activation_body(element: np.dtype[Any]) -> Any:
    @c_function(types.CPointer(numba.from_dtype(ActivationArguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        rows = numba.carray(as_pointer(a.rows), (a.tokens, a.parts, a.size), element)
        output = numba.carray(as_pointer(a.output), (a.tokens, a.size), element)
        has_gate = a.parts > 1
        first, end = own_part(a.tokens, thread_num(), a.num_threads)
        for token in range(first, end):
            gate, up = rows[token, 0], rows[token, a.parts - 1]
            if a.activation == SILU:
                silu_row(gate, up, has_gate, output[token])
            elif a.activation == GELU:
                gelu_row(gate, up, has_gate, output[token])
            elif a.activation == RELU2:
                relu2_row(gate, up, has_gate, output[token])
            else:
                gelu_tanh_row(gate, up, has_gate, output[token])

    return body


# LLVM vectorises these loops only if each is as simple as this.
@jit()
def silu_row(gate: Any, up: Any, has_gate: bool, output: Any) -> None:
    if has_gate:
        for i in range(output.shape[0]):
            put(output, i, silu(to_float32(gate[i])) * to_float32(up[i]))
    else:
        for i in range(output.shape[0]):
            put(output, i, silu(to_float32(gate[i])))


@jit()
def gelu_row(gate: Any, up: Any, has_gate: bool, output: Any) -> None:
    if has_gate:
        for i in range(output.shape[0]):
            put(output, i, gelu(to_float32(gate[i])) * to_float32(up[i]))
    else:
        for i in range(output.shape[0]):
            put(output, i, gelu(to_float32(gate[i])))


@jit()
def gelu_tanh_row(gate: Any, up: Any, has_gate: bool, output: Any) -> None:
    if has_gate:
        for i in range(output.shape[0]):
            put(output, i, gelu_tanh(to_float32(gate[i])) * to_float32(up[i]))
    else:
        for i in range(output.shape[0]):
            put(output, i, gelu_tanh(to_float32(gate[i])))


@jit()
def relu2_row(gate: Any, up: Any, has_gate: bool, output: Any) -> None:
    if has_gate:
        for i in range(output.shape[0]):
            put(output, i, relu2(to_float32(gate[i])) * to_float32(up[i]))
    else:
        for i in range(output.shape[0]):
            put(output, i, relu2(to_float32(gate[i])))


@jit()
def silu(x: Any) -> Any:
    decay = exp32(-abs(x))
    return x * ((decay if x < np.float32(0) else np.float32(1)) / (np.float32(1) + decay))


@jit()
def gelu(x: Any) -> Any:
    return np.float32(0.5) * x * (np.float32(1) + erf32(np.float32(0.7071067811865476) * x))


@jit()
def gelu_tanh(x: Any) -> Any:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + tanh32(inner))


@jit()
def relu2(x: Any) -> Any:
    positive = max(x, np.float32(0))
    return positive * positive
