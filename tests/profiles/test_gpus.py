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
        ("4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("rtx4090-24gb", "rtx4090"),
        ("nvidia/geforce_rtx_5090", "rtx5090"),
        ("h100-sxm", "h100"),
        ("H100 SXM5", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-SXM4-80G", "a100-80gb"),
        ("a100 40 GB", "a100-40gb"),
        ("a6000", "rtxa6000"),
        ("6000 ada", "rtx6000ada"),
        ("l4 24 GiB", "l4"),
        ("rtx 4070 laptop", "laptop-rtx4070"),
    ],
)
def test_spelling_does_not_matter(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a100", "did you mean a100-40gb or a100-80gb or a100-80gb-pcie"),
        ("h100 80gb", "did you mean h100-pcie or h100"),
        ("l40", "did you mean l40s"),
        ("4070", "did you mean laptop-rtx4070"),
        ("h10", "did you mean"),
        ("abacus", "known are t4"),
        ("", "known are t4"),
    ],
)
def test_an_unclear_name_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError, match=hint):
        find_gpu(name)
