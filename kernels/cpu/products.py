"""Product of one row with a bfloat16 matrix. The kernel reads the matrix in place, without a converted copy."""
# torch's product of one row first converts the matrix and copies it to blocks. This kernel is limited by memory
# bandwidth: it takes 0.7 times as long as torch's product, and 0.85 times as long as torch's product with a matrix that
# oneDNN packed beforehand (measured with all matrices of SmolLM2-135M on a CPU without bfloat16 instructions). For
# float32 and for more rows, torch's products are faster.

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor

from llmsched.kernels.cpu import packed_products
from llmsched.kernels.cpu.compiled import c_function, jit, prefetch_rows, put, to_float32
from llmsched.kernels.cpu.openmp import address_of, arguments_type, as_pointer, own_part, run, thread_num
from llmsched.kernels.packed_matrix import PackedMatrix

AHEAD = 16  # rows of the matrix that are prefetched
PARALLEL_WEIGHTS = 1 << 16  # weights (about 15 us on one core) from which several threads are faster

Arguments = arguments_type(addresses=("row", "weight", "bias", "output"), sizes=("num_rows", "size"))


def linear(rows: Tensor, weight: Tensor | Sequence[PackedMatrix], bias: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor):
        return packed_products.linear(rows, weight, bias)
    if len(rows) != 1 or rows.dtype != torch.bfloat16 or not (rows.is_contiguous() and weight.is_contiguous()):
        return F.linear(rows, weight, bias)
    output = rows.new_empty(1, len(weight))
    addresses = (rows.data_ptr(), weight.data_ptr(), address_of(bias), output.data_ptr())
    run(row_body(), Arguments(*addresses, *weight.shape), parallel=weight.numel() >= PARALLEL_WEIGHTS)
    return output


@cache
def row_body() -> Any:
    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        row = numba.carray(as_pointer(a.row), (a.size,), np.uint16)
        weight = numba.carray(as_pointer(a.weight), (a.num_rows, a.size), np.uint16)
        bias = numba.carray(as_pointer(a.bias), (a.num_rows,), np.uint16)
        output = numba.carray(as_pointer(a.output), (a.num_rows,), np.uint16)
        x = np.empty(a.size, np.float32)
        for i in range(a.size):
            x[i] = to_float32(row[i])
        sums = np.empty(4, np.float32)
        number, stop = own_part(a.num_rows, thread_num(), a.num_threads)
        prefetch_rows(weight, number, min(number + AHEAD, stop))
        while number < stop:
            prefetch_rows(weight, min(number + AHEAD, stop), min(number + AHEAD + 4, stop))
            count = min(4, stop - number)
            multiply(weight[number : number + count], x, sums)
            for i in range(count):
                start = to_float32(bias[number + i]) if a.bias != 0 else np.float32(0)
                put(output, number + i, sums[i] + start)
            number += count

    return body


@jit()
def multiply(weight: Any, x: Any, sums: Any) -> None:
    """Set sums[i] to the dot product of weight[i] and x, for a `weight` of up to four rows."""
    if weight.shape[0] == 4:
        sum0, sum1, sum2, sum3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(x.shape[0]):
            sum0 += x[i] * to_float32(weight[0, i])
            sum1 += x[i] * to_float32(weight[1, i])
            sum2 += x[i] * to_float32(weight[2, i])
            sum3 += x[i] * to_float32(weight[3, i])
        sums[0], sums[1], sums[2], sums[3] = sum0, sum1, sum2, sum3
        return
    for number in range(weight.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[0]):
            total += x[i] * to_float32(weight[number, i])
        sums[number] = total
