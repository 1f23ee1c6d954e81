"""`llmsched calibrate` from the command line, and simulations with its result."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine

from llmsched.engine.device import computes_bf16

LIMITS = ("--device", "cpu", "--num-gpu-blocks-override", "160", "--max-num-batched-tokens", "64")
QUICK = (*LIMITS, "--max-num-seqs", "16")
LOAD = ("--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--max-concurrency", "3")


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama"))


_SAVED: dict[str, str] = {}


@pytest.fixture
def calibration(command: CommandLine, model: str, tmp_path: Path) -> Path:
    """Return the file of a calibration of the model, which is measured once for all tests."""
    if not _SAVED:
        path = Path(command("calibrate", model, *QUICK, "--repeats", "1", "--json").json["saved"])
        _SAVED[path.name] = path.read_text()
    for name, content in _SAVED.items():
        path = tmp_path / "profiles" / "calibrated" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return path


def test_what_is_measured_is_simulated(command: CommandLine, model: str, tmp_path: Path) -> None:
    report = command("calibrate", model, *QUICK, "--repeats", "1", "--json").json
    assert report["measured"]
    assert len(report["steps"]) >= 12
    assert all(step["measured_ms"] > 0 and step["predicted_ms"] > 0 for step in report["steps"])
    assert report["calibration_error"] <= report["calibration_error_p90"] <= report["calibration_error_max"]
    assert [each["num_seqs"] for each in report["serving"]] == [1, 8, 16]
    assert all(each["between_steps_ms"] > 0 and each["slowdown"] > 0 for each in report["serving"])
    assert report["swap_bytes_per_s"] > 0

    kept = tomllib.loads(Path(report["saved"]).read_text())
    assert Path(report["saved"]).parent == tmp_path / "profiles" / "calibrated"
    assert kept["cost"] == report["cost"]

    simulated = command("bench", model, *QUICK, "--simulate", "local", *LOAD, "--json").json
    assert not simulated["measured"]
    assert simulated["calibration_error"] == report["calibration_error"]
    assert simulated["completed"] == 6
    # A step of three decodes: what was measured, and the time between steps.
    assert simulated["itl_ms"]["p50"] >= report["cost"]["step"] * 1e3


def test_a_report_for_people_says_measured(command: CommandLine, model: str) -> None:
    outcome = command("calibrate", model, *QUICK, "--repeats", "1")
    assert outcome.code == 0
    assert outcome.out.startswith("MEASURED ")
    assert "error on steps left out of the fit:" in outcome.out
    assert f"llmsched bench {model} --simulate local" in outcome.out
    simulated = command("bench", model, *QUICK, "--simulate", "local", *LOAD)
    assert simulated.out.startswith("SIMULATED ")
    assert "step times: fitted to this device" in simulated.out


def test_without_a_calibration_it_says_what_to_do(command: CommandLine, model: str) -> None:
    simulation = ("bench", model, *QUICK, "--simulate", "local", *LOAD)
    dtype = "bfloat16" if computes_bf16("cpu") else "float32"
    assert f"run `llmsched calibrate {model} --dtype {dtype}`" in command.refused(*simulation)
    assert f"run `llmsched calibrate {model} --dtype float32`" in command.refused(*simulation, "--dtype", "float32")


@pytest.mark.usefixtures("calibration")
def test_a_calibration_of_another_model_is_not_taken(command: CommandLine, model: str, tmp_path: Path) -> None:
    other = tmp_path / Path(model).name
    other.mkdir()
    content = json.loads((Path(model) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 9}))
    error = command.refused("bench", str(other), *QUICK, "--simulate", "local", *LOAD)
    assert "belongs to another model of the same name" in error


def test_another_number_of_threads_is_told(command: CommandLine, model: str, calibration: Path) -> None:
    calibration.write_text(calibration.read_text().replace("threads = ", "threads = 9"))
    outcome = command("bench", model, *QUICK, "--simulate", "local", *LOAD, "--json")
    assert outcome.code == 0
    assert "warning: calibrated with 9" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repeats", "0"), "--repeats"),
        (("--max-num-batched-tokens", "1", "--max-num-seqs", "1"), "raise them"),
        (("--max-model-len", "4"), "raise them"),
        (("--swap-space", "1KiB", "--device", "cpu"), "less than a KV block"),
    ],
)
def test_bad_input_is_told_in_a_line(command: CommandLine, model: str, arguments: tuple[str, ...], words: str) -> None:
    small = ("--device", "cpu", "--num-gpu-blocks-override", "160")
    assert words in command.refused("calibrate", model, *small, *arguments)
