"""Engine classes and what they reach, by GPU."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from llmsched.profiles.engines import UnknownEngineError, engines, find_engine
from llmsched.profiles.gpus import find_gpu, gpus


def test_every_constant_is_plausible() -> None:
    for engine in engines().values():
        assert 0 < engine.step_seconds < 5e-3, engine
        assert 0 < engine.layer_seconds < 200e-6, engine
        assert 0 < engine.row_seconds < 100e-6, engine
        for kind, share in engine.shares.items():
            values = asdict(share)
            assert values.pop("error") is None or 0 < share.error < 0.5, (engine.key, kind)  # type: ignore[operator]
            assert 0.05 < values.pop("decode") < 8, (engine.key, kind)
            assert all(0.1 < value <= 1 for value in values.values()), (engine.key, kind)


def test_kinds_are_gpus_or_architectures() -> None:
    known = {"default", *gpus(), *(gpu.architecture for gpu in gpus().values())}
    assert all(kind in known for engine in engines().values() for kind in engine.shares)


def test_a_gpu_has_its_own_shares_or_its_architectures_or_the_default() -> None:
    engine = find_engine("SGLang")
    assert engine.on(find_gpu("h20")) is engine.shares["h20"]
    assert engine.on(find_gpu("h200")) is engine.shares["hopper"]
    assert engine.on(find_gpu("b200")) is engine.shares["default"]
    assert engine.on(find_gpu("b200")).error is None


def test_a_class_without_shares_for_a_kind_has_the_defaults_but_not_their_error() -> None:
    default, lmdeploy = find_engine("default").on(find_gpu("h100")), find_engine("lmdeploy").on(find_gpu("h100"))
    assert default.error is not None
    assert lmdeploy == replace(default, error=None)


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownEngineError, match=r"'vlm' is not a known engine class; known are default, .*vllm"):
        find_engine("vlm")
