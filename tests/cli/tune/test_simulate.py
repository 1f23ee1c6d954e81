"""tune on a virtual clock: trials on a simulated GPU, and predictions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import CommandLine, Outcome

from llmsched.cli.figures.measure import measure
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.simulated_target import simulate_run
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.runners import SimulatedRunner, TrialLoad
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.engine.blueprint import gpu_blueprint
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.planner import open_planner
from llmsched.profiles.tuned import list_profiles, load_profile

CONFIG = Path(__file__).parents[2] / "data" / "model_configs" / "meta-llama--Meta-Llama-3.1-8B_config.json"
LOAD_FLAGS = ("--num-prompts", "40", "--input-len", "400", "--output-len", "30", "--request-rate", "20")
#: Prompts share nothing here, so the prefix cache would only take time.
LOAD_FLAGS += ("--no-enable-prefix-caching",)
SLO_FLAGS = ("--slo-ttft", "200ms", "--slo-itl", "30ms")
FEW = ("--knobs", "max_num_batched_tokens", "--max-num-batched-tokens", "512")
LOAD = SyntheticLoad(num_prompts=40, input_len=400, output_len=30, request_rate=20.0)
SLO = Slo(ttft=1.0, itl=0.03)


@pytest.fixture
def tune(command: CommandLine) -> Callable[..., Outcome]:
    return lambda *arguments: command("tune", str(CONFIG), "--simulate", "h100", *LOAD_FLAGS, *SLO_FLAGS, *arguments)


def test_a_whole_run_is_what_bench_simulates() -> None:
    config = EngineConfig(str(CONFIG), max_num_batched_tokens=1024)
    blueprint = gpu_blueprint(open_planner(str(CONFIG)), config, "h100")
    setting = Setting(256, 16)
    run = SimulatedRunner(blueprint.engine, TrialLoad(LOAD, SLO, 60.0)).simulate(setting, 40, 0)
    figures = measure(simulate_run(blueprint, LOAD, max_num_batched_tokens=256, max_num_seqs=16), LOAD, SLO)
    assert run.completed == figures.requests.completed == 40
    assert run.tokens_per_s == figures.rates.output_tokens_steady
    assert figures.goodput is not None
    assert run.met["all"] == round(40 * figures.goodput.attainment["all"])
    assert run.demand is not None
    assert 1 < run.demand.running <= 16
    assert 0 < run.demand.kv_share < 1
    assert not run.demand.preempted
    short = SimulatedRunner(blueprint.engine, TrialLoad(LOAD, SLO, 60.0)).simulate(setting, 10, 0)
    assert short.completed == 10

    runner = SimulatedRunner(blueprint.engine, TrialLoad(LOAD, SLO, 60.0))
    again = asyncio.run(runner.run(setting, 40, 0))
    assert again.samples == run.samples
    assert asyncio.run(runner.run(setting, 40, 1)).samples == run.samples
    assert runner.predict([setting], 40) == {}


def test_requests_that_end_in_their_first_step_count_as_demand() -> None:
    blueprint = gpu_blueprint(open_planner(str(CONFIG)), EngineConfig(str(CONFIG)), "h100")
    load = SyntheticLoad(num_prompts=8, input_len=16, output_len=1, max_concurrency=4)
    demand = SimulatedRunner(blueprint.engine, TrialLoad(load, SLO, 60.0)).simulate(Setting(256, 16), 8, 0).demand
    assert demand is not None
    assert demand.running == 4
    assert demand.kv_share > 0


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


def test_the_profile_keeps_the_type_of_the_kv_cache(
    tune: Callable[..., Outcome], command: CommandLine, tmp_path: Path
) -> None:
    profile = tmp_path / "fp8.toml"
    assert tune(*FEW, "--kv-cache-dtype", "fp8_e5m2", "--output", str(profile)).code == 0
    line = f"llmsched serve {CONFIG} --profile {profile}"
    assert command.served(line).kv_cache_dtype == "fp8_e5m2"
    assert command.served(f"{line} --kv-cache-dtype bfloat16").kv_cache_dtype == "bfloat16"


def test_every_setting_has_the_figures_that_bench_gives_it(tune: Callable[..., Outcome], command: CommandLine) -> None:
    """The same load in full with the same seed: bench reproduces every trial of tune."""
    few = ("--knobs", "max_num_batched_tokens", "--max-num-batched-tokens", "128")
    report = tune("--json", "--rate", "given", *few).json
    assert report["runs"] == len(report["trials"]) == 3
    for trial in report["trials"]:
        budget = ("--max-num-batched-tokens", str(trial["max_num_batched_tokens"]))
        run = command("bench", str(CONFIG), "--simulate", "h100", *LOAD_FLAGS, *SLO_FLAGS, *budget, "--json").json
        assert trial["p99_ttft_ms"] == pytest.approx(run["ttft_ms"]["p99"], abs=1e-3)
        assert trial["p99_itl_ms"] == pytest.approx(run["itl_ms"]["p99"], abs=1e-3)
        assert trial["output_tokens_per_s"] == run["output_tokens_per_s_steady"]
        assert trial["attainment"] == run["attainment"]


def test_budgets_that_do_not_fit_are_trials(command: CommandLine) -> None:
    room = ("--max-model-len", "2048", "--num-gpu-blocks-override", "2000", "--max-num-batched-tokens", "65536")
    knobs = ("--knobs", "max_num_batched_tokens", "--min-num-batched-tokens", "4096")
    outcome = command("tune", str(CONFIG), "--simulate", "l4", *LOAD_FLAGS, *room, *knobs, "--json")
    assert outcome.code == 0
    reasons = {trial["max_num_batched_tokens"]: trial["reason"] for trial in outcome.json["trials"]}
    assert list(reasons) == [4096, 8192, 16384, 32768, 65536]
    fits = [tokens for tokens, reason in reasons.items() if reason is None]
    assert 4096 in fits
    assert 65536 not in fits
    assert all(reasons[tokens].startswith("does not fit: ") for tokens in reasons.keys() - set(fits))


def test_a_search_is_not_resumed_with_another_engines_step_times(
    tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> TrialRun:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRunner, "simulate", interrupted)
        assert tune("--output", "one", *FEW).code == 130
    outcome = tune("--output", "one", "--resume", "--simulate", "h100:vllm", *FEW)
    assert outcome.code == 2
    assert "another cost of steps" in outcome.err
    assert tune("--output", "one", "--resume", *FEW).code == 0


@pytest.mark.parametrize("rate", ["given", "knee"])
def test_a_limit_too_short_for_one_run_is_said(tune: Callable[..., Outcome], rate: str) -> None:
    outcome = tune("--time-limit", "1ms", "--rate", rate)
    assert outcome.code == 1
    assert "nothing was measured; set a longer --time-limit" in outcome.out


def test_the_same_search_gives_the_same(tune: Callable[..., Outcome]) -> None:
    def without_clock(report: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in report.items() if name not in ("duration_s", "notes")}

    arguments = ("--json", "--no-warm-start", *FEW)
    assert without_clock(tune(*arguments).json) == without_clock(tune(*arguments).json)


def test_the_table_says_that_it_is_simulated_and_draws_the_curve(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--report", str(tmp_path / "curve.html"), *FEW)
    assert outcome.out.startswith("SIMULATED ")
    assert "TTFT: from the moment" not in outcome.out
    html = (tmp_path / "curve.html").read_text()
    for part in ("<dd>simulated</dd>", "<dd>NVIDIA H100 SXM5 80GB</dd>", "gain over the default", 'class="points"'):
        assert part in html
    assert '<path class="line"' not in html, "a line would join settings over those that were not measured"
    assert list_profiles() == [f"{CONFIG.stem}-h100"]
    assert "step times: roofline model" in outcome.out
    for title in ("P99 ITL by token budget", "P99 TTFT by token budget", "goodput by token budget"):
        assert title in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulate", "abacus"), "abacus"),
        (("--rounds", "2"), "--rounds: a simulation gives the same figures each time"),
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
    assert "llmsched calibrate" in command.refused("tune", str(small), "--simulate", "local", "--device", "cpu")
