"""tune on a virtual clock: as trials of a GPU that is not there, and as predictions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import CommandLine, Outcome

from llmsched.cli.bench.load.synthetic import Workload
from llmsched.cli.bench.target.simulated import simulate_workload
from llmsched.cli.tune.simulate import Asked, SimulatedRunner, simulated_run
from llmsched.cli.tune.space import Setting
from llmsched.engine.blueprint import gpu_blueprint
from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.draft import open_draft
from llmsched.engine.latency import Slo
from llmsched.profiles.tuned import list_profiles, load_profile

CONFIG = Path(__file__).parents[2] / "data" / "model_configs" / "meta-llama--Meta-Llama-3.1-8B_config.json"
LOAD = Workload(num_prompts=40, input_len=400, output_len=30, request_rate=20.0)
SLO = Slo(ttft=1.0, itl=0.03)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path / "profiles"))
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def tune(command: CommandLine) -> Callable[..., Outcome]:
    load = ("--num-prompts", "40", "--input-len", "400", "--output-len", "30", "--request-rate", "20")
    slo = ("--slo-ttft", "200ms", "--slo-itl", "30ms")
    return lambda *arguments: command("tune", str(CONFIG), "--simulate", "h100", *load, *slo, *arguments)


def test_a_whole_run_is_what_bench_simulates() -> None:
    config = EngineConfig(str(CONFIG), max_num_batched_tokens=1024)
    blueprint = gpu_blueprint(open_draft(str(CONFIG)), config, "h100")
    setting = Setting(256, 16)
    run = simulated_run(blueprint.engine(), setting, 40, 0, Asked(LOAD, SLO, 60.0))
    figures = simulate_workload(blueprint, LOAD, SLO, max_num_batched_tokens=256, max_num_seqs=16)
    assert run.completed == figures.completed == 40
    assert run.tokens_per_s == figures.output_tokens_per_s_steady
    assert figures.goodput is not None
    assert run.met["all"] == round(40 * figures.goodput.attainment["all"])
    assert run.demand is not None
    assert 1 < run.demand.running <= 16
    assert 0 < run.demand.kv_share < 1
    assert not run.demand.preempted
    short = simulated_run(blueprint.engine(), setting, 10, 0, Asked(LOAD, SLO, 60.0))
    assert short.completed == 10

    runner = SimulatedRunner(blueprint, Asked(LOAD, SLO, 60.0))
    again = asyncio.run(runner.run(setting, 40, 0))
    assert again.samples == run.samples
    assert asyncio.run(runner.run(setting, 40, 1)).samples != run.samples
    assert runner.predict([setting], 40) == {}


def test_the_winner_of_a_simulation(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--json", "--output", "far", "--report", str(tmp_path / "curve.html"))
    assert outcome.code == 0
    report = outcome.json
    assert report["measured"] is False
    assert report["device"] == {"kind": "cuda", "name": "NVIDIA H100 SXM5 80GB"}
    assert report["best"]["max_num_batched_tokens"] > 32
    assert report["trials"][0]["max_num_batched_tokens"] == 32
    assert not report["trials"][0]["feasible"]
    best = next(trial for trial in report["trials"] if all(trial[k] == v for k, v in report["best"].items()))
    assert best["relative"] == 1.0
    assert 0 <= report["trials"][0]["relative"] < 1.0
    profile = load_profile("far")
    assert not profile.measured
    assert profile.device["name"] == "NVIDIA H100 SXM5 80GB"

    page = (tmp_path / "curve.html").read_text()
    opened: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            opened.append(tag)
            assert not any(name in ("src", "href") for name, _ in attrs), "nothing is fetched"

    Check().feed(page)
    assert opened.count("svg") == 3
    assert report["explanation"] in page
    assert "SIMULATED" in page


def test_the_same_search_gives_the_same(tune: Callable[..., Outcome]) -> None:
    def without_clock(report: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in report.items() if name not in ("duration_s", "notes")}

    first = tune("--json", "--no-warm-start").json
    assert without_clock(tune("--json", "--no-warm-start").json) == without_clock(first)


def test_the_table_says_that_it_is_simulated_and_draws_the_curve(tune: Callable[..., Outcome]) -> None:
    outcome = tune()
    assert outcome.out.startswith("SIMULATED ")
    assert list_profiles() == [f"{CONFIG.name}-h100"]
    assert "step times: a roofline" in outcome.out
    for title in ("P99 ITL by token budget", "P99 TTFT by token budget", "goodput by token budget"):
        assert title in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulate", "abacus"), "abacus"),
        (("--report", "/nowhere/at/all.html"), "has no directory"),
        (("--max-num-seqs", "100000"), "max-num-seqs"),
    ],
)
def test_bad_usage_is_exit_code_2(tune: Callable[..., Outcome], arguments: tuple[str, ...], message: str) -> None:
    outcome = tune(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "does not fit" not in outcome.err


def test_this_device_must_have_been_calibrated(command: CommandLine) -> None:
    small = CONFIG.with_name("Qwen--Qwen3-0.6B_config.json")
    outcome = command("tune", str(small), "--simulate", "local", "--device", "cpu")
    assert outcome.code == 2
    assert "llmsched calibrate" in outcome.err
