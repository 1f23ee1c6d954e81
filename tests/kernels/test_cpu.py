"""CPU kernels against the reference."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import MIXED, SHAPES, Shape, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops
from llmsched.kernels.cpu.compiled import directory_of, jit
from llmsched.kernels.fp8 import FP8_TYPES, as_bytes


def tolerance(dtype: torch.dtype, largest_value: float) -> float:
    """Return the largest difference allowed: 1e-5 in float32, two units of `largest_value` in half types.

    In half types, rounding of the output and of the softmax weights, which add up to 1, makes half a unit each.
    """
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * largest_value


def test_compiled_code_belongs_to_the_text_of_all_kernels(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a")
    first = directory_of(tmp_path)
    assert directory_of(tmp_path) == first
    (tmp_path / "one.py").write_text("b")
    assert directory_of(tmp_path).parent == first.parent
    assert directory_of(tmp_path) != first


def check(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0, fp8: torch.dtype | None = None) -> None:
    batch = make_batch(shape, dtype=dtype, seed=seed, fp8=fp8)
    expected = reference.paged_attention(*batch.tensors, **batch.options)
    actual = ops.paged_attention(*batch.tensors, **batch.options)
    assert actual.dtype == dtype
    largest = max(float(values.abs().max()) for values in batch.values)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance(dtype, largest))


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        *((dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, fp8) for dtype in (torch.float32, torch.bfloat16) for fp8 in FP8_TYPES),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(shape: Shape, dtype: torch.dtype, fp8: torch.dtype | None) -> None:
    check(shape, dtype, fp8=fp8)


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_any_block_size(block_size: int) -> None:
    check(Shape("", MIXED, block_size=block_size, window=45))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    data=st.data(),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([1, 8, 20, 64, 80]),
    value_dim=st.sampled_from([None, 4, 64]),
    block_size=st.sampled_from([1, 2, 16, 32]),
    window=st.none() | st.integers(1, 400),
    softcap=st.none() | st.floats(0.5, 50),
    sinks=st.booleans(),
    slopes=st.booleans(),
    seed=st.integers(0, 1000),
    fp8=st.sampled_from([None, None, *FP8_TYPES]),
)
def test_any_batch(data: st.DataObject, seed: int, fp8: Any, kv_heads: int, group: int, **options: Any) -> None:
    contexts = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=5))
    sequences = tuple((data.draw(st.integers(0, min(context, 40))), context) for context in contexts)
    check(Shape("", sequences, heads=kv_heads * group, kv_heads=kv_heads, **options), seed=seed, fp8=fp8)


def test_chunk_longer_than_a_query_tile() -> None:
    check(Shape("", ((300, 310),), window=70))
    check(Shape("", ((300, 310),), softcap=4.0, sinks=True))
    check(Shape("", ((300, 310),), window=70), fp8=FP8_TYPES[0])


def test_large_scores_do_not_overflow() -> None:
    """Use whole numbers, so that scores of tens of thousands and their differences are exact."""
    batch = make_batch(Shape("", MIXED))
    tensors = (batch.query.round(), batch.key_cache.round(), *batch.tensors[2:])
    batch.options["scale"] = 256.0
    expected = reference.paged_attention(*tensors, **batch.options)
    torch.testing.assert_close(ops.paged_attention(*tensors, **batch.options), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fp8", [None, *FP8_TYPES], ids=str)
def test_nan_is_not_hidden(fp8: torch.dtype | None) -> None:
    """A decode that sees a NaN key yields NaN; its neighbour in the batch does not."""
    batch = make_batch(Shape("", ((1, 300), (1, 300))), fp8=fp8)
    as_bytes(batch.key_cache)[batch.block_tables[0, 1], :, 3] = torch.nan if fp8 is None else 0x7F
    output = ops.paged_attention(*batch.tensors, **batch.options)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("head_dim", [32, 64])  # read one by one, and in vectors
@pytest.mark.parametrize("dtype", [torch.float16, *FP8_TYPES], ids=str)
def test_all_numbers_are_read_right(dtype: torch.dtype, head_dim: int) -> None:
    """Every number, subnormal ones and NaN too, as the value of the only key of a sequence."""
    count = 256**dtype.itemsize
    numbers = torch.arange(count).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    values = numbers[numbers.float().isfinite()] if dtype.itemsize == 2 else numbers
    values = values.view(-1, 1, 1, head_dim)
    count = len(values)
    output = ops.paged_attention(
        torch.zeros(count, 1, 4),
        torch.zeros(count, 1, 1, 4, dtype=dtype),
        values,
        torch.arange(count, dtype=torch.int32)[:, None],
        torch.arange(count + 1, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32),
        scale=1.0,
        kv_scales=None if dtype.itemsize == 2 else torch.tensor([[8.0], [0.25]]),
    )
    wanted = values.float().flatten() * (1 if dtype.itemsize == 2 else 0.25)
    torch.testing.assert_close(output.flatten(), wanted, rtol=0, atol=0, equal_nan=True)


def test_a_row_is_the_same_in_every_batch() -> None:
    """A row's result is the same, bit for bit, alone on one thread and in a batch on all threads."""
    shape = Shape("", ((1, 700),) + ((1, 400),) * 12, heads=9, kv_heads=3)
    batch = make_batch(shape)
    together = ops.paged_attention(*batch.tensors, **batch.options)
    alone = ops.paged_attention(
        batch.query[:1],
        batch.key_cache,
        batch.value_cache,
        batch.block_tables[:1],
        batch.cu_seqlens_q[:2],
        batch.context_lens[:1],
        **batch.options,
    )
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=0)


def test_strided_queries() -> None:
    """As transformers hands them over: a transposed view of [heads, tokens, head_dim]."""
    batch = make_batch(Shape("", MIXED))
    expected = ops.paged_attention(*batch.tensors, **batch.options)
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(ops.paged_attention(query, *batch.tensors[1:], **batch.options), expected)


def test_query_and_cache_of_different_types() -> None:
    batch = make_batch(Shape("", MIXED), dtype=torch.bfloat16)
    tensors = (batch.query.float(), *batch.tensors[1:])
    expected = reference.paged_attention(*tensors, **batch.options)
    actual = ops.paged_attention(*tensors, **batch.options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_threads_of_several_engines_at_once() -> None:
    """Calls from many Python threads, each large enough for a team of its own, do not disturb each other."""
    batch = make_batch(Shape("", ((1, 600),) * 8, heads=9, kv_heads=3))
    expected = ops.paged_attention(*batch.tensors, **batch.options)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                actual = ops.paged_attention(*batch.tensors, **batch.options)
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_write_kv_touches_its_slots_only(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(6, 3, d, generator=generator).to(dtype) for d in (8, 12))
    caches = [torch.randn(5, 3, 4, d, generator=generator).to(cache_dtype) for d in (8, 12)]
    slots = torch.tensor([19, 0, -1, 7, 8, 3])
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // 4, :, slot % 4] = key[token].to(cache_dtype)
            expected[1][slot // 4, :, slot % 4] = value[token].to(cache_dtype)
    for module in (ops, reference):
        written = [cache.clone() for cache in caches]
        module.write_kv(key, value, *written, slots)
        torch.testing.assert_close(written, expected, rtol=0, atol=0)


def test_cache_of_another_type_is_refused() -> None:
    batch = make_batch(Shape("", ((1, 20),)))
    tensors = list(batch.tensors)
    tensors[1] = batch.key_cache.double()
    with pytest.raises(ValueError, match=r"torch\.float64 on the CPU; allowed is float32, bfloat16, float16, float8"):
        ops.paged_attention(*tensors, **batch.options)


def test_without_a_place_for_the_cache() -> None:
    """Numba cannot cache code that comes from no file, or without a writable directory; it compiles without."""
    namespace: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", namespace)
    assert jit()(namespace["double"])(21) == 42  # type: ignore[type-var, operator]
