"""GPUs by name."""

from __future__ import annotations

import pytest

from llmsched.profiles.gpus import find_gpu, gpus
from llmsched.profiles.toml_files import UnknownNameError


def test_every_entry_is_plausible() -> None:
    for spec in gpus().values():
        assert 7 * 2**30 < spec.memory < 300 * 2**30, spec
        assert 200e9 < spec.bandwidth < 10e12, spec
        assert spec.bf16_flops == 0 or 40e12 <= spec.bf16_flops < 3e15, spec
        assert spec.fp16_flops >= spec.bf16_flops, spec
        assert spec.fp8_flops == 0 or spec.fp8_flops == pytest.approx(2 * spec.bf16_flops, rel=0.03), spec
        assert 5e12 < spec.fp32_flops < spec.fp16_flops, spec
        assert spec.host_bandwidth < spec.bandwidth / 4, spec
        assert spec.architecture in {"volta", "turing", "ampere", "ada", "hopper", "blackwell"}, spec


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("H100-PCIe", "h100-pcie"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("a100_80gb", "a100-80gb"),
        ("Tesla T4", "t4"),
        ("v100", "v100-32gb"),
        ("l40", "l40s"),
    ],
)
def test_spelling_does_not_matter(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a100", "a100-40gb or a100-80gb"), ("h10", "did you mean"), ("abacus", "known are t4"), ("", "known are t4")],
)
def test_an_unclear_name_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError, match=hint):
        find_gpu(name)
