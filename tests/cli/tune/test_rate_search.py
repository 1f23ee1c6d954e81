"""Settings judged by their knees: the choice is never worse than the default, and the report says how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from command_line import CommandLine, Outcome
from configs import CONFIGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_machine import made_run
from virtual_time import run_virtual

from llmsched.cli.figures.measure import measure
from llmsched.cli.load.load import Load
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.options.config_flags import EngineOptions
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.cli.tune.explanation import explain
from llmsched.cli.tune.knees import KneeBounds, KneeFinder
from llmsched.cli.tune.knob_search import SearchSpace
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.rate_search import RateSearch
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import ThinnedSamples, TrialRun, TrialRunner
from llmsched.cli.tune.tuning import TuneTask, tune_simulated
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent
from llmsched.profiles.tuned import load_profile

QWEN = str(CONFIGS / "Qwen--Qwen3-8B_config.json")
SLO = Slo(ttft=0.8)
#: Prompts share nothing here, so the prefix cache would only take time.
UNCACHED = {"enable_prefix_caching": False}
SMALL, MIDDLE, DEFAULT, LARGE = (Setting(tokens, 8) for tokens in (32, 512, 2048, 4096))


def tuned(load: Load, slo: Slo, gpu: str, path: Path) -> tuple[Setting, Setting, float | None]:
    """Return the default, tune's choice (the default if no setting meets the SLOs), and the higher knee of both."""
    task = TuneTask(
        model=QWEN,
        options=EngineOptions(UNCACHED),
        load=load,
        slo=slo,
        goal="goodput",
        knobs=("max_num_batched_tokens", "target_itl"),
        timeout=600.0,
        rounds=1,
        time_limit=600.0,
        smallest_budget=128,
        destination=path / "tuned.toml",
        warm_start=False,
    )
    outcome = asyncio.run(tune_simulated(task, gpu, silent))
    default, best = outcome.history.default, best_trial(outcome.history)
    assert default is not None
    knees = [bounds.met for bounds in (outcome.rates.best, outcome.rates.default) if bounds.met]
    return default, default if best is None else best.setting, max(knees, default=None)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gpu=st.sampled_from(["l4", "h100"]),
    lengths=st.sampled_from([(600, 10), (1500, 30), (4000, 20)]),
    rate=st.sampled_from([0.5, 2.0, None]),
    slo=st.sampled_from([Slo(ttft=0.6), Slo(ttft=1.0, tpot=0.08), Slo(ttft=2.0, itl=0.12)]),
    seed=st.integers(0, 3),
)
def test_up_to_its_knee_the_choice_is_not_worse_than_the_default(
    gpu: str, lengths: tuple[int, int], rate: float | None, slo: Slo, seed: int, tmp_path: Path
) -> None:
    """At most 5 % less goodput than the default at any rate, as `bench --simulate` measures it."""
    load = SyntheticLoad(
        num_prompts=30,
        input_len=lengths[0],
        output_len=lengths[1],
        request_rate=rate,
        max_concurrency=None if rate else 2,
        seed=seed,
    )
    default, chosen, knee = tuned(load, slo, gpu, tmp_path)
    if chosen == default:
        return
    largest = max(chosen.max_num_batched_tokens, default.max_num_batched_tokens)
    blueprint = make_blueprint(EngineConfig(QWEN, max_num_batched_tokens=largest, **UNCACHED), gpu)
    for share in (0.3, 0.6, 0.8, 0.9, 1.0):
        sent = load.at_rate(share * (knee or rate or 1.0))
        runs = [measure(simulate_run(blueprint, sent, **asdict(each)), sent, slo) for each in (default, chosen)]
        usual, best = (0.0 if run.goodput is None else run.goodput.requests_per_s for run in runs)
        assert best >= 0.95 * usual, (share, chosen)


@pytest.fixture
def tune(command: CommandLine) -> Callable[..., Outcome]:
    """Tune at 4 requests per second, which every setting serves: far below the knees."""
    load = ("--request-rate", "4", "--num-prompts", "40", "--input-len", "600", "--output-len", "10")
    few = ("--knobs", "max_num_batched_tokens", "--slo-ttft", "800ms", "--max-num-batched-tokens", "4096")
    load += ("--no-enable-prefix-caching",)
    return lambda *arguments: command("tune", QWEN, "--simulate", "h100", *load, *few, "--output", "p", *arguments)


def test_a_light_load_is_judged_at_the_knee(tune: Callable[..., Outcome]) -> None:
    """At 4 requests/s, steps of 128 and of 2,048 tokens perform alike, but their knees differ."""
    report = tune("--json").json
    rates, best = report["rates"], report["best"]["max_num_batched_tokens"]
    assert best >= 1024
    assert report["judged_by"] == "knee"
    assert report["default"]["max_num_batched_tokens"] == 2048
    assert rates["best_knee_rps"] >= rates["default_knee_rps"] > 20
    assert rates["given_rps"] == 4
    assert rates["given_of_knee"] == pytest.approx(4 / rates["best_knee_rps"])
    assert rates["compared_at_rps"] == rates["default_knee_rps"]
    assert [row["label"] for row in rates["rows"]] == ["given", "0.5 x knee", "0.8 x knee", "1 x knee", "1.2 x knee"]
    assert rates["rows"][0]["default"]["attainment"]["all"] == 1.0
    small = next(trial for trial in report["trials"] if trial["max_num_batched_tokens"] == 32)
    assert not small["feasible"]
    assert load_profile("p").knee["best_rps"] == pytest.approx(rates["best_knee_rps"], abs=1e-3)


def test_exactly_the_given_load_and_what_comes_beyond(tune: Callable[..., Outcome]) -> None:
    report = tune("--json", "--rate", "given").json
    assert report["judged_by"] == "given"
    assert report["best"]["max_num_batched_tokens"] == 2048, "of equal settings the default, not the smallest"
    assert report["gain"] == 0.0
    assert [(row["label"], row["rate"]) for row in report["rates"]["rows"]] == [
        ("given", 4.0),
        ("1.5 x given", 6.0),
        ("2 x given", 8.0),
    ]
    assert any("too light to tell the settings apart, so the default stays" in note for note in report["notes"])


def test_the_report_shows_the_default_the_gain_and_the_distance(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = tune("--report", str(tmp_path / "r.html"), "--min-num-batched-tokens", "1024")
    for text in (outcome.out, (tmp_path / "r.html").read_text()):
        assert "requests/s, the default" in text
        assert "by request rate" in text
        assert "the given load, 4 requests/s, is" in text
    assert "best, default" in outcome.out or "\ndefault" in outcome.out


# -- on a machine whose capacity is known ------------------------------------------------------------------------


class Capacity(TrialRunner):
    """TrialRunner whose settings meet the SLO up to a rate. A closed or slow load takes `seconds` of virtual time."""

    def __init__(self, capacity: Mapping[Setting, float], seconds: float = 1.0, margin: float = 0.5) -> None:
        self.capacity, self.seconds, self.margin = capacity, seconds, margin
        self.log: list[tuple[Setting, float | None]] = []

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        await asyncio.sleep(self.seconds)
        self.log.append((setting, rate))
        sent = 4.0 if rate is None else rate
        late = sent > self.capacity[setting]
        run = made_run(setting, requests, round_index, 10 * min(sent, self.capacity[setting]))
        ttft = 0.8 * (2.0 if late else 1 - self.margin)
        samples = {**run.samples, "ttft": ThinnedSamples((ttft,), requests, ttft * requests, ttft)}
        good = requests // 2 if late else requests
        return replace(run, samples=samples, met={"ttft": good, "all": good})


LOAD = SyntheticLoad(num_prompts=20, request_rate=4.0)


def chosen(machine: Capacity, load: Load = LOAD, time_limit: float = 10_000.0) -> tuple[Setting | None, RateSearch]:
    history = TrialHistory(SLO, "goodput", DEFAULT)
    budgets = tuple(setting.max_num_batched_tokens for setting in machine.capacity)

    class Limited(Capacity):
        async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
            try:
                async with asyncio.timeout_at(time_limit):
                    return await machine.run(setting, requests, round_index, rate)
            except TimeoutError:
                raise OutOfTimeError from None

    async def main() -> tuple[Setting | None, RateSearch]:
        limited = Limited(machine.capacity)

        async def race(rate: float | None) -> Race:
            return Race(limited, history, (20,), 1, time_limit, rate=rate)

        finder = KneeFinder(limited, load, SLO, least=20, longest=30.0, tolerance=0.04)
        space = SearchSpace(("max_num_batched_tokens",), budgets, DEFAULT, 8, 0.25)
        chooser = RateSearch(history, load, space, race, finder, None)
        return await chooser.by_knee(), chooser

    return run_virtual(main())


def test_the_highest_knee_wins() -> None:
    best, chooser = chosen(Capacity({SMALL: 5.0, MIDDLE: 61.0, DEFAULT: 40.0, LARGE: 58.0}))
    assert best == MIDDLE
    assert chooser.rates.best.met == pytest.approx(61.0, rel=0.04)
    assert chooser.rates.default.met == pytest.approx(40.0, rel=0.04)
    assert chooser.rates.compared == chooser.rates.default.met


def test_of_equal_knees_the_default_stays() -> None:
    for about in (40.5, 40.9, 41.3):
        best, chooser = chosen(Capacity({SMALL: 5.0, MIDDLE: about, DEFAULT: 40.0, LARGE: 40.0}))
        assert best == DEFAULT
    assert chooser.rates.best == chooser.rates.default


def test_a_load_past_the_knee_is_judged_as_it_is() -> None:
    best, chooser = chosen(Capacity({MIDDLE: 6.0, DEFAULT: 3.0, LARGE: 2.0}))
    assert best == MIDDLE
    assert chooser.rates.compared is None
    assert chooser.rates.default == KneeBounds(pytest.approx(3.0, rel=0.04), pytest.approx(3.0, rel=0.04))
    assert chosen(Capacity({MIDDLE: 3.5, DEFAULT: 3.0}))[0] is None


def test_a_load_that_every_rate_meets_is_too_light() -> None:
    best, chooser = chosen(Capacity({SMALL: 1e9, DEFAULT: 1e9}))
    assert best == DEFAULT
    assert chooser.rates.light
    assert any("the load is too light" in note for note in chooser.notes)


def test_without_time_the_default_stays() -> None:
    """The search ends at its limit, in the middle of a run, and still reports on the default."""
    machine = Capacity({SMALL: 5.0, MIDDLE: 61.0, DEFAULT: 40.0}, seconds=10.0)
    best, chooser = chosen(machine, time_limit=35.0)
    assert best == DEFAULT
    assert [setting for setting, _ in machine.log] == [DEFAULT] * 3, "the fourth is stopped"
    assert chooser.finder.out_of_time
    assert any("so the default stays; set a longer --time-limit" in note for note in chooser.notes)
    assert chooser.history.trial(DEFAULT).completed
    nothing, chooser = chosen(machine, time_limit=5.0)
    assert nothing is None
    assert "nothing was measured; set a longer --time-limit" in explain(chooser.history)
