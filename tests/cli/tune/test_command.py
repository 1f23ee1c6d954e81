"""`llmsched tune` from the command line, on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import CommandLine, Outcome

from llmsched.cli.tune import runners
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.runners import EngineRunner
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.engine import build
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.profiles.tuned import TunedProfile, load_profile, save_profile

QUICK = ("--num-prompts", "4", "--input-len", "40", "--output-len", "4", "--rounds", "1", "--device", "cpu")
SMALL = ("--num-gpu-blocks-override", "64", "--min-num-batched-tokens", "16", "--max-num-batched-tokens", "50")


#: A search of one knob, and one of a single token budget.
BUDGETS = ("--knobs", "max_num_batched_tokens")
ONE = (*BUDGETS, "--max-num-batched-tokens", "16")


@pytest.fixture
def tune(command: CommandLine, tiny_model: Callable[..., Path]) -> Callable[..., Outcome]:
    return lambda *arguments: command("tune", str(tiny_model("llama")), *QUICK, *SMALL, *arguments)


def test_the_winner_is_written_and_can_be_loaded(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--slo-ttft", "10min", "--output", "quick", "--json", *BUDGETS)
    assert outcome.code == 0
    report = outcome.json
    assert sorted({trial["max_num_batched_tokens"] for trial in report["trials"]}) == [16, 32, 50]
    assert all(trial["feasible"] is (trial["reason"] is None) for trial in report["trials"])
    assert all(trial["skipped"] or trial["p99_itl_ms"] > 0 < trial["p99_ttft_ms"] for trial in report["trials"])
    assert report["best"]["max_num_batched_tokens"] in (16, 32, 50)
    assert report["best"].keys() == {"max_num_batched_tokens", "max_num_seqs", "headroom", "target_itl"}
    assert report["profile"] == str(tmp_path / "profiles" / "quick.toml")

    profile = load_profile("quick")
    known = {name: value for name, value in report["best"].items() if value is not None}
    assert profile.engine == {**known, "num_gpu_blocks_override": 64, "device": "cpu"}
    assert EngineConfig(**profile.engine).max_num_batched_tokens == report["best"]["max_num_batched_tokens"]
    assert profile.slo == {"ttft_ms": 600_000.0}
    assert profile.model["architecture"] == "LlamaForCausalLM"
    assert [trial["max_num_seqs"] for trial in profile.trials] == [t["max_num_seqs"] for t in report["trials"]]
    assert profile.reason == report["explanation"]
    assert profile.workload["fingerprint"] == report["workload"]["fingerprint"]
    assert profile.measured
    assert profile.memory["kv_ratio"] == 1.0
    assert not list((tmp_path / "profiles").glob("*.jsonl"))


def test_no_value_meets_the_slo(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--slo-ttft", "0ms", "--json", *BUDGETS)
    assert outcome.code == 1
    report = outcome.json
    assert report["best"] is report["profile"] is None
    assert report["nearest_miss"]["p99_ttft_ms"] > 0
    assert "the nearest is max_num_batched_tokens" in report["explanation"]
    assert all("P99 TTFT" in trial["reason"] for trial in report["trials"])
    assert not list((tmp_path / "profiles").iterdir())


def test_the_table_says_what_was_chosen_and_where_it_is(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--output", str(tmp_path / "here.toml"))
    assert outcome.code == 0
    assert "max_num_batched_tokens" in outcome.out
    assert "settings work (no SLO was given)" in outcome.out
    assert f"serve --profile {tmp_path / 'here.toml'}" in outcome.out
    assert "no SLO given" in outcome.err


def test_without_an_slo_nothing_is_written_unasked(
    tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command first says what it optimises and where the profile goes. On a terminal, it asks before it saves."""
    outcome = tune(*ONE)
    assert outcome.code == 0
    goal, place = outcome.err.splitlines()[:2]
    assert "no SLO given" in goal
    assert "the highest throughput under this load wins" in goal
    assert "no profile will be written, because no SLO is given; to write one, add --output" in place
    assert "no profile was written; to save these settings, run the command again with --output NAME" in outcome.out
    assert not list((tmp_path / "profiles").iterdir())

    asked: list[str] = []

    def answer(question: str, **options: object) -> bool:
        asked.append(question)
        return len(asked) > 1

    for name in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", answer)
    assert "no profile was written" in tune(*ONE).out
    assert "use it with" in tune(*ONE).out
    written = list((tmp_path / "profiles").iterdir())
    assert asked == [f"write these settings to {written[0]}?"] * 2


def test_a_busy_machine_is_named(tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning is worded as in `bench`."""
    monkeypatch.setattr(runners, "others_cpu", lambda this: 0.6)
    outcome = tune(*ONE)
    assert "runs may be too slow, because this machine was busy with other work, which used up to 60%" in outcome.err


def test_an_engine_that_dies_is_one_trial_lost(tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep continues with a new engine."""
    built: list[EngineConfig] = []
    real_build, step = build.build_engine, Engine.step

    def counting(config: EngineConfig, progress: object) -> object:
        built.append(config)
        return real_build(config, progress)  # type: ignore[arg-type]

    def deadly(engine: Engine) -> Any:
        if engine.scheduler.config.max_num_batched_tokens == 50:
            raise MemoryError("out of memory")
        return step(engine)

    monkeypatch.setattr(build, "build_engine", counting)
    monkeypatch.setattr(Engine, "step", deadly)
    report = tune("--json", *BUDGETS).json
    assert [trial["feasible"] for trial in report["trials"]] == [True, True, False]
    assert "out of memory" in report["trials"][2]["reason"]
    assert len(built) == 2


def test_the_sweep_ends_at_what_fits(
    command: CommandLine, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_build = build.build_engine

    def small_machine(config: EngineConfig, progress: object) -> object:
        if (config.max_num_batched_tokens or 0) > 64:
            raise ConfigError("gpu_memory_utilization", "no room")
        return real_build(config, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "build_engine", small_machine)
    model = (str(tiny_model("llama")), "--num-gpu-blocks-override", "64", *BUDGETS)
    outcome = command("tune", *model, *QUICK, "--json")
    assert outcome.code == 0
    assert "max_num_batched_tokens 128 does not fit (--gpu-memory-utilization: no room)" in outcome.err

    outcome = command("tune", *model, *QUICK, "--json", "--max-num-batched-tokens", "200", "--output", "swept")
    assert outcome.code == 0
    reasons = {trial["max_num_batched_tokens"]: trial["reason"] for trial in outcome.json["trials"]}
    no_room = "does not fit: --gpu-memory-utilization: no room"
    assert reasons == {32: None, 64: None, 128: no_room, 200: no_room}
    assert outcome.json["best"]["max_num_batched_tokens"] in (32, 64)
    written = {trial["max_num_batched_tokens"]: trial.get("reason") for trial in load_profile("swept").trials}
    assert written == reasons

    assert "no room" in command.refused("tune", *model, *QUICK, "--min-num-batched-tokens", "128")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--min-num-batched-tokens", "64", "--max-num-batched-tokens", "32"),
            "--min-num-batched-tokens 64 is above --max-num-batched-tokens 32",
        ),
        (("--output", "no good"), "--output: profile 'no good'"),
        (("--slo-ttft", "800"), "needs a unit"),
        (("--knobs", "max_num_seqs,speed"), "'speed' is not a knob; choose from max_num_batched_tokens"),
        (("--knobs", ","), "names no knob"),
        (("--knobs", "headroom", "--headroom", "20%"), "--knobs headroom: --headroom 0.2 fixes it"),
        (("--knobs", "target_itl", "--target-itl", "50ms"), "--knobs target_itl: --target-itl 0.05 fixes it"),
        (
            ("--min-num-batched-tokens", "9" * 20),
            "'--min-num-batched-tokens': '99999999999999999999'; allowed is 1 to 1048576",
        ),
        (("--output", "/dev/null/p.toml"), "--output: profiles cannot be written in /dev/null"),
        (("--arrivals", "constant"), "--arrivals: only has an effect with a finite"),
        (("--resume",), "there is no unfinished search at"),
        (("--maximize", "luck"), "luck"),
        (("--scheduling-policy", "static"), "--scheduling-policy static is a baseline"),
        (("--scheduling-policy", "fcfs", "--target-itl", "20ms"), "--target-itl: 0.02 has no effect"),
    ],
)
def test_bad_usage_is_exit_code_2(tune: Callable[..., Outcome], arguments: tuple[str, ...], message: str) -> None:
    outcome = tune(*arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_warning_if_the_load_takes_long_to_send(tune: Callable[..., Outcome]) -> None:
    slow = ("--request-rate", "20", "--arrivals", "constant", *ONE)
    outcome = tune(*slow, "--time-limit", "1s")
    assert "sending this load once takes 150 ms, but the time limit of the whole search is 1.00 s" in outcome.err
    assert "sending this load" not in tune(*slow).err


@pytest.mark.parametrize("server", ["http://localhost:8000", "localhost:8000", "[::1]:8000"])
def test_a_server_is_refused_with_the_reason(command: CommandLine, server: str) -> None:
    assert "cannot tune a running server" in command.refused("tune", server)


def test_an_interrupted_search_can_be_resumed(
    tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = EngineRunner.run
    ran: list[int] = []

    async def interrupted(
        self: EngineRunner, setting: Setting, requests: int, round_index: int, rate: float | None = None
    ) -> TrialRun:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(setting.max_num_batched_tokens)
        return await measured(self, setting, requests, round_index, rate)

    monkeypatch.setattr(EngineRunner, "run", interrupted)
    stopped = tune("--output", "quick", *BUDGETS)
    assert stopped.code == 130
    assert "to continue the search, run the same command with --resume" in stopped.err
    assert (tmp_path / "profiles" / "quick.state.jsonl").exists()

    other = tune("--output", "quick", "--resume", "--slo-itl", "1s", *BUDGETS)
    assert other.code == 2
    assert "another SLOs" in other.err

    monkeypatch.setattr(EngineRunner, "run", measured)
    outcome = tune("--output", "quick", "--resume", "--json", *BUDGETS)
    assert outcome.code == 0
    assert {trial["max_num_batched_tokens"] for trial in outcome.json["trials"]} == {16, 32, 50}
    assert not (tmp_path / "profiles" / "quick.state.jsonl").exists()


def test_the_search_starts_from_the_last_profile_of_the_model(tune: Callable[..., Outcome]) -> None:
    assert tune("--output", "first", *ONE).code == 0
    profile = load_profile("first")
    save_profile(replace(profile, engine={**profile.engine, "max_num_batched_tokens": 24, "headroom": 0.2}), "first")
    outcome = tune("--json", *BUDGETS)
    assert outcome.json["notes"][0] == "the search started from profile first"
    tried = [(trial["max_num_batched_tokens"], trial["headroom"]) for trial in outcome.json["trials"]]
    assert {(16, 0.2), (24, 0.2), (32, 0.2), (50, 0.1), (50, 0.2)} <= set(tried), "the default's row is there too"
    assert {tokens for tokens, _ in tried} == {16, 24, 32, 50}, "beside it only its neighbours, if it led the race"
    cold = tune("--json", "--no-warm-start", *BUDGETS).json
    assert {trial["max_num_batched_tokens"] for trial in cold["trials"]} == {16, 32, 50}
    assert {trial["headroom"] for trial in cold["trials"]} == {0.1}


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"headroom": 7.0}, "headroom: 7.0 is out of range"),
        ({"headroom": "much"}, "profile: bad sets headroom to 'much'"),
        ({"max_num_batched_tokens": 4096}, "flags or limits exclude its settings"),
    ],
)
def test_a_profile_that_cannot_be_the_start_is_named_with_the_reason(
    tune: Callable[..., Outcome], tiny_model: Callable[..., Path], engine: dict[str, float | str], reason: str
) -> None:
    save_profile(TunedProfile(engine=engine, model={"name": tiny_model("llama").name}), "bad")
    report = tune("--json", *ONE).json
    assert report["notes"][0].startswith(f"profile bad was not used as the start of the search: {reason}")
    assert [trial["headroom"] for trial in report["trials"]] == [0.1]
