"""Engine classes and the shares that they reach, by GPU."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from llmsched.profiles.engines import engine_spec, engines, find_engine
from llmsched.profiles.gpus import find_gpu, gpus
from llmsched.profiles.toml_files import UnknownNameError


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


def test_the_most_specific_share_applies() -> None:
    """Prefer the GPU's shares to its architecture's to typical ones, and the class's to the default class's."""
    on = {
        "default": {name: 0.1 for name in asdict(find_engine("default").shares["default"]) if name != "error"},
        "ampere": {"matrix": 0.2, "bandwidth": 0.2, "error": 0.02},
        "a100-80gb-pcie": {"matrix": 0.3},
    }
    default = {"step_us": 1, "layer_us": 2, "row_us": 3, "on": on}
    own = {"step_us": 9, "on": {"ampere": {"matrix": 0.4, "bandwidth": 0.4, "kv": 0.4, "error": 0.04}}}
    engine = engine_spec("mine", own, default)
    assert (engine.step_seconds, engine.layer_seconds) == (9e-6, 2e-6)
    card, other = engine.on(find_gpu("a100-80gb-pcie")), engine.on(find_gpu("a10"))
    assert (card.matrix, card.bandwidth, card.kv, card.decode, card.error) == (0.3, 0.4, 0.4, 0.1, None)
    assert (other.matrix, other.bandwidth, other.kv, other.decode, other.error) == (0.4, 0.4, 0.4, 0.1, 0.04)


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownNameError, match=r"'vlm' is not a known engine class; known are default, .*vllm"):
        find_engine("vlm")
