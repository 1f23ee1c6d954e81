"""`llmsched tune` as it is typed, on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine, Outcome

from llmsched.cli.tune import sweep
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.profiles.tuned import load_profile

QUICK = ("--num-prompts", "4", "--input-len", "40", "--output-len", "4", "--rounds", "1", "--device", "cpu")
SMALL = ("--num-gpu-blocks-override", "64", "--min-num-batched-tokens", "16", "--max-num-batched-tokens", "50")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path / "profiles"))
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def tune(command: CommandLine, tiny_model: Callable[..., Path]) -> Callable[..., Outcome]:
    return lambda *arguments: command("tune", str(tiny_model("llama")), *QUICK, *SMALL, *arguments)


def test_the_winner_is_written_and_can_be_loaded(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--slo-ttft", "10min", "--output", "quick", "--json")
    assert outcome.code == 0
    report = outcome.json
    assert [trial["max_num_batched_tokens"] for trial in report["trials"]] == [16, 32, 50]
    assert all(trial["feasible"] and trial["reason"] is None for trial in report["trials"])
    assert all(trial["p99_itl_ms"] > 0 and trial["p99_ttft_ms"] > 0 for trial in report["trials"])
    assert report["best"]["max_num_batched_tokens"] in (16, 32, 50)
    assert report["profile"] == str(tmp_path / "profiles" / "quick.toml")

    profile = load_profile("quick")
    assert profile.engine == {**report["best"], "num_gpu_blocks_override": 64, "device": "cpu"}
    assert EngineConfig(**profile.engine).max_num_batched_tokens == report["best"]["max_num_batched_tokens"]
    assert profile.slo == {"ttft_ms": 600_000.0}
    assert profile.model["architecture"] == "LlamaForCausalLM"
    assert [trial["max_num_batched_tokens"] for trial in profile.trials] == [16, 32, 50]
    assert profile.reason == report["explanation"]


def test_no_value_meets_the_slo(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--slo-ttft", "0ms", "--json")
    assert outcome.code == 1
    report = outcome.json
    assert report["best"] is report["profile"] is None
    assert all("P99 TTFT" in trial["reason"] for trial in report["trials"])
    assert not (tmp_path / "profiles").exists()


def test_the_table_says_what_was_chosen_and_where_it_is(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--output", str(tmp_path / "here.toml"))
    assert outcome.code == 0
    assert "max_num_batched_tokens" in outcome.out
    assert "3 of 3 values that work (no SLO was given)" in outcome.out
    assert f"serve --profile {tmp_path / 'here.toml'}" in outcome.out
    assert "no SLO given" in outcome.err


def test_an_engine_that_dies_is_one_trial_lost(tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: the sweep goes on with an engine that is built anew."""
    built: list[EngineConfig] = []
    running_engine, reconfigure = sweep.running_engine, Engine.reconfigure

    def counting(config: EngineConfig, progress: object) -> object:
        built.append(config)
        return running_engine(config, progress)  # type: ignore[arg-type]

    def deadly(engine: Engine, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        if max_num_batched_tokens == 32:
            raise MemoryError("out of memory")
        reconfigure(engine, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    monkeypatch.setattr(sweep, "running_engine", counting)
    monkeypatch.setattr(Engine, "reconfigure", deadly)
    report = tune("--json").json
    assert [trial["feasible"] for trial in report["trials"]] == [True, False, True]
    assert "out of memory" in report["trials"][1]["reason"]
    assert len(built) == 2


def test_the_sweep_ends_at_what_fits(
    command: CommandLine, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running_engine = sweep.running_engine

    def small_machine(config: EngineConfig, progress: object) -> object:
        if (config.max_num_batched_tokens or 0) > 64:
            raise ConfigError("gpu_memory_utilization", "no room")
        return running_engine(config, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "running_engine", small_machine)
    model = (str(tiny_model("llama")), "--num-gpu-blocks-override", "64")
    outcome = command("tune", *model, *QUICK, "--json")
    assert outcome.code == 0
    assert [trial["max_num_batched_tokens"] for trial in outcome.json["trials"]] == [32, 64]
    assert "max_num_batched_tokens 128 does not fit (gpu_memory_utilization: no room)" in outcome.err

    refused = command("tune", *model, *QUICK, "--max-num-batched-tokens", "128")
    assert refused.code == 2
    assert "no room" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--min-num-batched-tokens", "64", "--max-num-batched-tokens", "32"), "from 64 to 32 is empty"),
        (("--output", "no good"), "--output: profile 'no good'"),
        (("--slo-ttft", "800"), "needs a unit"),
        (("--request-rate", "nan"), "--request-rate is nan"),
    ],
)
def test_bad_usage_is_exit_code_2(tune: Callable[..., Outcome], arguments: tuple[str, ...], message: str) -> None:
    outcome = tune(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
