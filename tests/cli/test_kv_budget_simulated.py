"""`llmsched kv-budget --simulate`: the plan for a GPU and its simulated speed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine
from configs import CONFIGS


@pytest.fixture
def llama(tmp_path: Path) -> str:
    shutil.copy(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json", tmp_path / "config.json")
    return str(tmp_path)


def test_simulate_adds_the_speed_to_the_report(command: CommandLine, llama: str) -> None:
    plain = command("kv-budget", llama, "--gpu", "l4", "--max-model-len", "4096", "--json").json
    found = command("kv-budget", llama, "--simulate", "l4", "--max-model-len", "4096", "--json").json
    served = found.pop("simulated")
    assert found == plain
    # The headroom stays free, and what is left holds so many sequences of 2,048 tokens.
    above = plain["num_blocks"] - plain["plan"]["headroom_blocks"]
    assert served["concurrency"] == above // 128
    assert (served["input_len"], served["output_len"]) == (1536, 512)
    assert served["preemptions"] == 0
    # 16 GB of weights over 300 GB/s: no step takes less than 50 ms.
    assert 50 < served["tpot_ms"] < 200
    rate = served["concurrency"] / served["tpot_ms"] * 1e3
    assert 0.5 * rate < served["output_tokens_per_s"] < rate


def test_a_question_is_simulated_as_asked(command: CommandLine, llama: str) -> None:
    arguments = ("kv-budget", llama, "--simulate", "h100", "--users", "8", "--context", "4k")
    served = command(*arguments, "--json").json["simulated"]
    assert (served["concurrency"], served["input_len"], served["output_len"]) == (8, 3072, 1024)
    shown = command(*arguments)
    assert "SIMULATED 8 requests at a time, each 3,072 tokens in and 1,024 out:" in shown.out
    assert f"roofline model; median error {served['published_error']:.0%} against published TPOT" in shown.out


def test_the_steps_of_another_engine(command: CommandLine, llama: str) -> None:
    question = ("--users", "8", "--context", "4k", "--json")
    plain, other = (command("kv-budget", llama, "--simulate", name, *question).json for name in ("h100", "h100:vllm"))
    assert plain["num_blocks"] == other["num_blocks"]
    assert plain["simulated"]["tpot_ms"] != other["simulated"]["tpot_ms"]
    assert other["simulated"]["where"] == "NVIDIA H100 SXM5 80GB, steps as of vllm"


def test_what_does_not_fit_is_not_simulated(command: CommandLine, llama: str) -> None:
    outcome = command("kv-budget", llama, "--simulate", "t4", "--json")
    assert outcome.code == 1
    assert outcome.json["simulated"] is None
    assert "SIMULATED" not in command("kv-budget", llama, "--simulate", "t4").out


def test_a_machine_that_was_not_calibrated_is_told_to_be(command: CommandLine, tiny_model: Callable[..., Path]) -> None:
    error = command.refused("kv-budget", str(tiny_model("llama")), "--simulate", "local", "--device", "cpu")
    assert "run `llmsched calibrate" in error


def test_gpus_are_counted_until_requests_meet_their_targets(command: CommandLine, llama: str) -> None:
    question = ("kv-budget", llama, "--gpu", "l4", "--users", "8", "--context", "4k")
    found = command(*question, "--json").json["gpus_needed"]
    trials = found["simulated"]
    assert [trial["attainment"] >= found["attainment_target"] for trial in trials[:-1]].count(True) <= 1
    assert found["gpus"] == next(t["gpus"] for t in trials if t["attainment"] >= found["attainment_target"])
    assert trials[0]["ttft_p99_ms"] >= trials[-1]["ttft_p99_ms"]
    shown = command(*question).out
    assert "NVIDIA L4 (SIMULATED)" in shown
    assert f"GPUs needed: {found['gpus']} for 8 users at a time" in shown
    patient = command(*question, "--slo-ttft", "60s", "--json").json["gpus_needed"]
    assert patient["gpus"] <= found["gpus"]
    assert command(*question, "--slo-tpot", "1ms", "--json").json["gpus_needed"]["gpus"] is None


def test_gpus_are_counted_only_for_a_known_speed_and_length(command: CommandLine, llama: str) -> None:
    for device in (
        ("--gpu-memory", "80GiB", "--context", "4k"),
        ("--gpu", "h100"),
        ("--gpu", "all", "--context", "4k"),
    ):
        question = ("kv-budget", llama, *device, "--users", "2")
        assert "gpus_needed" not in command(*question, "--json").json
        assert "--slo-ttft: needs --users, --context and one GPU" in command.refused(*question, "--slo-ttft", "1s")


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (("--gpu", "t4", "--context", "8k", "--users", "2"), "--context: does not fit one of these GPUs"),
        (("--gpu", "h100", "--context", "16", "--users", "60000"), "--users: more than 2,000 per GPU"),
        (
            ("--gpu", "h100", "--context", "4k", "--users", "2", "--lora-count", "2"),
            "--lora: adapters are not simulated",
        ),
    ],
)
def test_a_reason_is_given_if_gpus_cannot_be_counted(
    command: CommandLine, llama: str, question: tuple[str, ...], reason: str
) -> None:
    assert command("kv-budget", llama, *question, "--json").json["gpus_needed"] is None
    assert f"GPUs needed: not simulated ({reason}" in command("kv-budget", llama, *question).out
