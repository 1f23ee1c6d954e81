"""`llmsched verify` from the command line: the JSON contract, the printed report, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from engines import PARITY_CHECKS

from llmsched.cli import progress_display as progress
from llmsched.cli import verify
from llmsched.engine.model import paged_cache
from llmsched.engine.parity.logit_comparison import CaseResult, Divergence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model("qwen3", bos=True))


SMALL = ("--num-prompts", "2", "--num-tokens", "4")


def test_the_json_contract(command: CommandLine, model: str) -> None:
    outcome = command("verify", model, "--dtype", "float32", *SMALL, "--seed", "5", "--json")
    assert outcome.code == 0
    answer = outcome.json
    assert answer["ok"] is True
    assert [check["name"] for check in answer["checks"]] == [*PARITY_CHECKS]
    for check in answer["checks"]:
        assert check["tokens_equal"] is True
        assert 0 < check["max_abs_logit_diff"] < 1e-4
        assert check["tolerance"] == 1e-4
        assert check["partings"] == check["problems"] == []
    assert (answer["dtype"], answer["model_impl"]) == ("float32", "fused")
    assert (answer["num_prompts"], answer["num_tokens"], answer["seed"]) == (2, 4, 5)


def test_what_a_person_sees(command: CommandLine, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    outcome = command("verify", model, "--dtype", "float32", *SMALL, "--model-impl", "transformers")
    assert outcome.code == 0
    assert "in float32 on cpu, transformers layers, compared with plain transformers" in outcome.out
    assert "32, 32 cached tokens" in outcome.out
    assert "preemptions, " in outcome.out
    assert "float32: 0.0001" in outcome.out
    assert outcome.out.rstrip().endswith("equal")
    assert "NOT" not in outcome.out
    assert "comparing" in outcome.err


def test_a_fault_gives_exit_code_1(command: CommandLine, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged_cache.paged_attention
    monkeypatch.setattr(paged_cache, "paged_attention", lambda *a, scale, **more: right(*a, scale=1.1 * scale, **more))
    outcome = command("verify", model, "--dtype", "float32", *SMALL, "--json")
    assert outcome.code == 1
    assert outcome.json["ok"] is False
    assert all(check["max_abs_logit_diff"] > 1e-3 and not check["ok"] for check in outcome.json["checks"])
    outcome = command("verify", model, "--dtype", "float32", *SMALL)
    assert outcome.code == 1
    assert "FAILED" in outcome.out
    assert outcome.out.rstrip().endswith("NOT equal")


def test_an_engine_that_raises_gives_exit_code_1(
    command: CommandLine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(paged_cache, "paged_attention", broken)
    outcome = command("verify", model, "--dtype", "float32", *SMALL, "--json")
    assert outcome.code == 1
    for check in outcome.json["checks"]:
        assert check["max_abs_logit_diff"] is None
        assert check["problems"] == ["the engine failed: RuntimeError: no kernel for this device"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-tokens", "1"), "--num-tokens"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--dtype", "float8"), "float8"),
        (("--block-size", "0"), "--block-size: 0 tokens is out of range; allowed is from 1 to 256"),
        (("--num-tokens", "500"), "--num-tokens: 500 tokens after a prompt of"),
        (("--max-num-seqs", "4"), "--max-num-seqs"),
        (("--gpu-memory-utilization", "0.5"), "--gpu-memory-utilization"),
    ],
)
def test_bad_usage_is_one_line(command: CommandLine, model: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in command.refused("verify", model, *arguments)


def test_an_unknown_model_is_one_line(command: CommandLine, tmp_path: Any) -> None:
    assert "has no config.json" in command.refused("verify", str(tmp_path))


def test_remarks_put_faults_first_and_stay_short() -> None:
    partings = [Divergence(f"p{index}", 3, 10, 11, 0.02, explained=index != 5) for index in range(6)]
    lines = list(verify._remarks(CaseResult("alone", divergences=partings, problems=["no request was preempted"])))
    assert lines[0] == "no request was preempted"
    assert lines[1].startswith("p5, token 3 is 11 instead of 10, margin 0.02: NOT explained")
    assert lines[2].endswith("margin 0.02: a near tie")
    assert lines[-1] == "2 more sequences differ"
    assert len(lines) == 1 + 4 + 1


def test_outputs_are_saved_and_compared(
    command: CommandLine, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = str(tmp_path / "before.json"), ("verify", model, "--dtype", "float32")
    assert "saved 2 outputs" in command(*run, *SMALL, "--save", file).out
    outcome = command(*run, "--against", file)
    assert outcome.code == 0
    assert "same model, device, settings and versions" in outcome.out
    assert outcome.out.rstrip().endswith("as before")
    right = paged_cache.paged_attention
    monkeypatch.setattr(paged_cache, "paged_attention", lambda *a, scale, **more: right(*a, scale=3 * scale, **more))
    outcome = command(*run, "--against", file, "--block-size", "8", "--json")
    assert outcome.code == 1
    answer = outcome.json
    assert (answer["ok"], answer["max_kl"], answer["num_positions"]) == (False, 0.01, 8)
    assert answer["largest_kl"] >= answer["mean_kl"] > 0.01
    assert (answer["saved_origin"]["block_size"], answer["origin"]["block_size"]) == (16, 8)
    outcome = command(*run, "--against", file, "--block-size", "8", "--max-kl", "100")
    assert outcome.code == 0
    assert "block_size 16 -> 8" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-kl", "1"), "--max-kl 1: must be a finite number, given with --against"),
        (("--against", "a.json", "--seed", "1"), "--seed: the file of --against fixes the prompts"),
        (("--against", "nothing.json"), "--against nothing.json: No such file"),
        (("--save", "a.json", "--against", "a.json"), "--save a.json: is an input file"),
        (("--save", "no/such/a.json"), "--save no/such/a.json: has no directory"),
    ],
)
def test_bad_usage_of_saved_outputs(
    command: CommandLine, model: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with command.monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert message in command.refused("verify", model, *arguments)
