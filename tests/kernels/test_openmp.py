"""Compiled bodies run once on each of torch's threads, or on the calling thread without an OpenMP runtime."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import types

from llmsched.kernels.cpu import openmp
from llmsched.kernels.cpu.compiled import c_function

Arguments = openmp.arguments_type(addresses=("visits",), sizes=(), floats=("unused",))


@c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
def visit(pointer: Any) -> None:
    numba.carray(openmp.as_pointer(numba.carray(pointer, 1)[0].visits), 64, np.intp)[openmp.thread_num()] += 1


def visits(*, parallel: bool) -> tuple[int, list[int]]:
    """Return the number of threads that `run` reported, and how often each of up to 64 threads ran the body."""
    counts = np.zeros(64, np.intp)
    arguments = Arguments(counts.ctypes.data)
    openmp.run(visit, arguments, parallel=parallel)
    return arguments.num_threads, counts.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_runs_the_body_once(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = visits(parallel=True)
    finally:
        torch.set_num_threads(before)
    expected = threads if openmp.load_runtime() else 1
    assert found == (expected, [1] * expected + [0] * (64 - expected))


def test_not_parallel_is_the_calling_thread() -> None:
    assert visits(parallel=False) == (1, [1] + [0] * 63)


def test_the_runtime_is_torchs() -> None:
    """sentencepiece, which transformers imports, brings an OpenMP runtime too, whose threads would be additional."""
    import sentencepiece  # noqa: F401

    runtime, maps = openmp.load_runtime(), Path("/proc/self/maps")
    if runtime is None or not maps.exists():
        return
    address = ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
    for line in maps.read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= address < high:
            assert Path(line.split()[-1]).is_relative_to(Path(torch.__file__).parent)
            return
    raise AssertionError("no library has GOMP_parallel")


def test_without_an_openmp_runtime() -> None:
    """Simulate macOS and Windows, where torch has no such runtime."""
    code = (
        f"import sys, numba, torch; sys.platform = 'darwin'; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "import test_openmp as t; assert t.openmp.load_runtime() is None;"
        "t.test_each_thread_runs_the_body_once(2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
