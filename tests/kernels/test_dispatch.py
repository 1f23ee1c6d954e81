"""Choice of the backend, refused arguments, and that no backend is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from batches import Shape, make_batch

from llmsched.kernels import dispatch, reference

FP8 = torch.zeros(6, 2, 16, 64).to(torch.float8_e4m3fn)


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMSCHED_KERNELS", raising=False)
    assert [dispatch.backend_name(device) for device in ("cuda", "cpu", "mps")] == ["triton", "cpu", "reference"]
    monkeypatch.setenv("LLMSCHED_KERNELS", "reference")
    assert {dispatch.backend_name(device) for device in ("cuda", "cpu", "mps")} == {"reference"}


def test_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSCHED_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"LLMSCHED_KERNELS is 'cuda'; allowed is auto or reference"):
        dispatch.backend_name("cpu")


def test_forced_reference_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(Shape("", ((1, 20), (4, 4))))
    monkeypatch.setenv("LLMSCHED_KERNELS", "reference")
    expected = reference.paged_attention(*batch.tensors, **batch.options)
    actual = dispatch.paged_attention(*batch.tensors, **batch.options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_import_is_light() -> None:
    """Backends are imported by the first call that they serve."""
    code = "import sys, llmsched.kernels.dispatch; assert not {'torch', 'numba', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 6, 32)}, "query head_dim 32 differs from the key cache's 64"),
        ({"query": torch.zeros(5, 5, 64)}, "5 query heads are not a multiple of 2 KV heads"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "2 context_lens need as many block_tables"),
        ({"value_cache": torch.zeros(1, 2, 16, 64)}, "may differ in head_dim only"),
        ({"window": 0}, "window is 0; allowed is 1 or more, or None"),
        ({"softcap": 0.0}, "softcap is 0.0; allowed is more than 0, or None"),
        ({"sinks": torch.zeros(2)}, "sinks are .* one number for each of 6 heads"),
        ({"slopes": torch.zeros(2)}, "slopes are .* one number for each of 6 heads"),
        ({"kv_scales": torch.ones(2, 2)}, r"kv_scales \(2, 2\) do not fit caches of torch.float32"),
        ({"key_cache": FP8}, r"caches of torch.float8_e4m3fn and torch.float32; allowed is one type"),
        ({"key_cache": FP8, "value_cache": FP8}, r"kv_scales None do not fit .*, and \(2, 2\)"),
    ],
)
def test_mismatches_are_refused(change: dict[str, object], message: str) -> None:
    batch = make_batch(Shape("", ((1, 20), (4, 4))))
    names = ("query", "key_cache", "value_cache", "block_tables", "cu_seqlens_q", "context_lens")
    arguments = {**dict(zip(names, batch.tensors, strict=True)), **batch.options, **change}
    with pytest.raises(ValueError, match=message):
        dispatch.paged_attention(**arguments)


@pytest.mark.parametrize("index", [1, 2])
def test_a_cache_that_is_not_contiguous_is_refused(index: int) -> None:
    batch = make_batch(Shape("", ((1, 20),)))
    tensors = list(batch.tensors)
    tensors[index] = tensors[index].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"KV cache has strides .* must be contiguous"):
        dispatch.paged_attention(*tensors, **batch.options)
    key, value = torch.zeros(1, *tensors[1].shape[1::2]), torch.zeros(1, *tensors[2].shape[1::2])
    with pytest.raises(ValueError, match=r"KV cache has strides .* must be contiguous"):
        dispatch.write_kv(key, value, tensors[1], tensors[2], torch.zeros(1, dtype=torch.int64))


def test_write_refuses_what_does_not_fit() -> None:
    cache = torch.zeros(2, 3, 16, 8)
    with pytest.raises(ValueError, match=r"value \(2, 3, 4\) does not fit 2 slots of a cache \(2, 3, 16, 8\)"):
        dispatch.write_kv(torch.zeros(2, 3, 8), torch.zeros(2, 3, 4), cache, cache, torch.zeros(2, dtype=torch.int64))
