"""Choice of device and dtype, and refusal of unavailable ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmsched.engine import device
from llmsched.engine.architecture.dtypes import planned_dtype
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import computes_bf16, resolve_device
from llmsched.engine.errors import ConfigError


def auto_dtype(device: str) -> str:
    return planned_dtype(EngineConfig(), computes_bf16=computes_bf16(device))


@pytest.fixture(params=[False, True], ids=["no gpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return bool(request.param)


def test_auto_takes_the_gpu_when_there_is_one(gpu: bool) -> None:
    assert resolve_device("auto") == ("cuda" if gpu else "cpu")
    assert resolve_device("cpu") == "cpu"


def test_cuda_without_a_gpu_is_refused(gpu: bool) -> None:
    if gpu:
        assert resolve_device("cuda") == "cuda"
    else:
        with pytest.raises(ConfigError, match="device: cuda is not available"):
            resolve_device("cuda")


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_auto_dtype_of_a_gpu(capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert auto_dtype("cuda") == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("vendor_id\t: avx512_bf16", False),
    ],
)
def test_auto_dtype_of_a_cpu(flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n", encoding="utf-8")
    monkeypatch.setattr(device, "_CPUINFO", cpuinfo)
    assert computes_bf16("cpu") is expected
    assert auto_dtype("cpu") == ("bfloat16" if expected else "float32")


def test_without_cpuinfo_bf16_is_not_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "none")
    assert not computes_bf16("cpu")


def test_explicit_types() -> None:
    for name in ("float32", "bfloat16", "float16"):
        assert planned_dtype(EngineConfig(dtype=name), computes_bf16=False) == name


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype: .*auto, float32"):
        EngineConfig(dtype="fp4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"device: .*auto, cuda, cpu"):
        EngineConfig(device="tpu")  # type: ignore[arg-type]
