"""tests/gpu without a GPU: it says so and ends well, and its parts run on the CPU with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(TESTS / "gpu")
    monkeypatch.syspath_prepend(TESTS / "kernels")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["kernels", "serving", "speed", "memory", "parity", "swap", "peers"])
def test_a_part_on_the_cpu(name: str) -> None:
    from gpu_suite.part import PARTS

    rows = list(PARTS[name].run("cpu", small=True))
    assert rows
    assert [row for row in rows if row.ok is False] == []
    assert (name in ("speed", "peers")) == all(row.ok is None for row in rows)
    json.dumps([row.as_dict() for row in rows], allow_nan=False)


def test_all_parts_stay_below_fifteen_minutes() -> None:
    from gpu_suite.part import PARTS

    assert sum(part.budget_s for part in PARTS.values()) < 15 * 60


def test_steps_are_told_with_all_their_figures() -> None:
    from gpu_suite.llama import SMALL, Size
    from gpu_suite.part import PARTS
    from gpu_suite.steps import covered, scenarios

    found = list(PARTS["steps"].run("cpu", small=True))
    assert [row for row in found if row.ok is False] == []
    rows = {row.name: row.data for row in found}
    names = {"step_s", "step_ahead_s", "launches", "gpu_busy_s", "gap_s", "gap_ahead_s", "floor_s", "tokens_per_s"}
    for name in (*scenarios(SMALL), "3 decodes of 40, eager", "1 decodes of 40, transformers"):
        assert names <= rows[name].keys()
    assert {"256 decodes of 1024", "256 decodes of 8192", "a decode of 32768 among 31 of 1024"} <= set(
        scenarios(Size())
    )
    assert covered([(3, 4), (0, 2), (1, 2.5)]) == 3.5
    # Llama-3.1-8B: 8.03 billion parameters, of which a decode does not read the embedding, and 128 KiB of KV a token
    whole = Size()
    assert whole.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    read = 2 * 7.50e9 + 32 * 1024 * (128 << 10)
    assert whole.least_seconds([(1023, 1)] * 32, 1e12, 1e18) == pytest.approx(read / 1e12, rel=1e-3)


def test_a_fault_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_suite import kernels
    from gpu_suite.part import PARTS

    right = kernels.dispatch.paged_attention
    monkeypatch.setattr(kernels.dispatch, "paged_attention", lambda *a, scale, **k: right(*a, scale=1.01 * scale, **k))
    rows = [row for row in PARTS["kernels"].run("cpu", small=True) if "fp32" in row.name]
    assert [row.ok for row in rows][:4] == [False, False, False, True]
    monkeypatch.setattr(kernels.dispatch, "paged_attention", None)
    rows = list(PARTS["kernels"].run("cpu", small=True))
    assert [row.ok for row in rows].count(False) == 15
    assert any(row.ok for row in rows)
    assert rows[0].found.startswith("TypeError")


def run_suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [str(TESTS / "gpu" / "run.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=TESTS.parent)


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    done = run_suite(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no CUDA GPU (torch ")
    assert run_suite("one", "two").returncode == 2
    assert "no such part: two; there are kernels" in run_suite("--parts", "swap,two").stderr


def test_a_dry_run_writes_its_result(tmp_path: Path) -> None:
    """A driver that fails and a package that is missing are facts about the machine."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    smi.chmod(0o755)
    target = tmp_path / "gpu.json"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_suite("--dry-run", "--parts", "swap", PATH=path, OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert report["ok"]
    assert report["parts"]["swap"]["ok"]
    assert report["nvidia_smi"].startswith("unknown: CalledProcessError")
    assert report["packages"]["torch"] == torch.__version__
    assert "DRY RUN" in done.stdout


def test_the_result_is_rewritten_after_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpu_suite import __main__ as suite

    target, seen = tmp_path / "gpu.json", []

    def run_part(name: str, *_: object) -> dict[str, Any]:
        seen.append(json.loads(target.read_text())["parts"] if target.exists() else {})
        return {"ok": name != "kernels", "seconds": 1.0, "problem": "died" if name == "kernels" else None, "rows": []}

    monkeypatch.setattr(suite, "run_part", run_part)
    monkeypatch.setattr(
        suite,
        "describe",
        lambda: {
            "torch": "unknown: ImportError",
            "packages": dict.fromkeys(("torch", "triton", "transformers"), "unknown"),
            "date": "today",
        },
    )
    monkeypatch.setattr(sys, "argv", ["run.sh", "--dry-run", str(target)])
    assert suite.main() == 1
    assert [list(parts) for parts in seen[:3]] == [[], ["kernels"], ["kernels", "steps"]]
    report = json.loads(target.read_text())
    assert list(report["parts"])[-1] == "peers"
    assert not report["ok"]


def suite_python(code: str) -> Any:
    """Run code as run.sh would, with the packages under their names and the repository's root off the path."""
    script = (TESTS / "gpu" / "run.sh").read_text()
    assert '-P -m gpu_suite "$@"' in script
    shell = script.replace('-P -m gpu_suite "$@"', f"-P -c '{code}'").replace(
        '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', str(TESTS / "gpu")
    )
    done = subprocess.run(
        ["bash", "-c", shell],
        env={**os.environ, "PYTHON": f"{sys.executable}"},
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_packages_are_found_under_their_names_and_nothing_shadows_others() -> None:
    found = suite_python(
        "import importlib.util as u, json, llmsched.engine.errors as e, gpu_suite.part;"
        'print(json.dumps([str(u.find_spec("kernels")), e.__file__, sorted(gpu_suite.part.PARTS)]))'
    )
    assert found[0] == "None"
    assert "/llmsched/engine/errors.py" in found[1]
    assert found[2] == ["kernels", "memory", "parity", "peers", "serving", "speed", "steps", "swap"]


def test_a_part_that_hangs_or_dies_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_suite import __main__ as suite

    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert suite.wait(hanging, 0.05) == "not done after 0 s"
    dying = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    assert suite.wait(dying, 60) == "ended with exit code 3"
    rows = [{"name": "x", "found": "1", "expected": "", "ok": True, "data": {}}]
    report = {
        "torch": {"name": "G"},
        "packages": {"torch": "2", "triton": "3", "transformers": "5"},
        "date": "today",
        "dry_run": False,
        "ok": False,
        "seconds": 1.0,
        "parts": {
            "memory": {"ok": False, "seconds": 1.0, "problem": "not done after 60 s: it said nothing", "rows": rows},
            "kernels": {
                "ok": True,
                "seconds": 1.0,
                "problem": None,
                "rows": [
                    {"name": f"fp32 {i}", "found": f"{i}", "expected": "", "ok": i != 2, "data": {"difference": i}}
                    for i in range(4)
                ],
            },
        },
    }
    suite.show(report)
    printed = capsys.readouterr().out.splitlines()
    assert "FAILED" in printed[-1]
    assert any("memory" in line and "not done after 60 s" in line for line in printed)
    assert any("fp32, 3 of 4" in line and "3 at most" in line for line in printed)
    assert any("fp32 2" in line and "FAILED" in line for line in printed)


def test_the_parts_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the device; the sizes are the real ones, so only a part that is quick on a CPU."""
    from gpu_suite import __main__ as suite
    from gpu_suite.part import SuitePart

    paths = [TESTS / "gpu", TESTS / "support", TESTS / "kernels"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    result = suite.run_part("unknown", SuitePart("no such part", "", "", 60.0), device="cpu")
    assert not result["ok"]
    assert "exit code 1" in result["problem"]
    assert "KeyError: 'unknown'" in result["problem"]
