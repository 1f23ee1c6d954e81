"""Calibrations survive the way to disk and back, and a bad one is refused in one line."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tomli_w

from llmsched.profiles.calibrated import (
    Calibration,
    calibration_name,
    list_calibrations,
    load_calibration,
    save_calibration,
)
from llmsched.profiles.toml_files import ProfileError
from llmsched.profiles.tuned import list_profiles

CALIBRATION = Calibration(
    cost={"knee": 16.0, "step": 0.01, "token": 1e-4},
    error=0.03,
    swap_seconds_per_byte=1e-10,
    model={"name": "org/Model-1B", "digest": "0123"},
    device={"kind": "cpu", "name": "CPU with 2 cores", "threads": 1},
    engine={"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    versions={"llmsched": "0.1.0"},
    steps=({"step": "1 decode of 64", "measured_ms": 10.0},),
    created=datetime(2026, 1, 31, 12, 0, tzinfo=UTC),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path / "home"))
    return tmp_path / "home"


def test_round_trip(home: Path) -> None:
    path = save_calibration(CALIBRATION)
    assert path == home / "calibrated" / "Model-1B-CPU-with-2-cores-bfloat16.toml"
    assert load_calibration(CALIBRATION.name) == CALIBRATION
    assert list_calibrations() == [CALIBRATION.name]
    assert list_profiles() == []
    save_calibration(replace(CALIBRATION, error=0.5))
    assert load_calibration(CALIBRATION.name) == replace(CALIBRATION, error=0.5)


def test_types_have_calibrations_of_their_own() -> None:
    assert calibration_name("demo", "NVIDIA H100 (x)", "bfloat16", "bfloat16") == "demo-NVIDIA-H100-x-bfloat16"
    assert calibration_name("demo", "H100", "bfloat16", "float32") == "demo-H100-bfloat16-float32"


def test_a_missing_calibration_is_none() -> None:
    assert load_calibration("missing") is None
    assert list_calibrations() == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[cost]", "[coast]", r"the table \[cost\] is missing"),
        ("error = 0.03", "error = -0.03", "error is -0.03; it must be a number of 0 or more"),
        ("step = 0.01", "step = nan", "step is nan"),
        ("token = 0.0001", 'token = "much"', "token is 'much'"),
        ("token = 0.0001", "", "cost.token is missing"),
        ('digest = "0123"', "", "model.digest is missing"),
        ("created = ", "created = 7 # ", "created is not a date and time"),
        ("error = 0.03", "error 0.03", "calibration .*toml: "),
    ],
)
def test_a_bad_file_is_refused(old: str, new: str, words: str) -> None:
    path = save_calibration(CALIBRATION)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=words) as caught:
        load_calibration(CALIBRATION.name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [7, [7], "none"])
def test_steps_that_are_not_tables_are_refused(steps: object) -> None:
    path = save_calibration(CALIBRATION)
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {"steps": steps}))
    with pytest.raises(ProfileError, match="steps is not a list of tables"):
        load_calibration(CALIBRATION.name)


def test_a_place_that_cannot_be_written_is_told(home: Path) -> None:
    home.mkdir()
    (home / "calibrated").write_text("in the way")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_calibration(CALIBRATION)
