"""`bench --find-knee`: on a target whose knee is known, and as it is typed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from command_line import CommandLine

from llmsched.cli.bench.knee.knee_exploration import SLACK, Exploration, KneeLimits, check, explore
from llmsched.cli.bench.knee.knee_report import knee_content, knee_json, verdict
from llmsched.cli.bench.report.report_content import show
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import Progress, silent
from llmsched.engine.provenance import Provenance

SERVICE_S = 0.1


class Queue:
    """Target that serves one request at a time in SERVICE_S seconds, with tokens after half of it and at its end."""

    def __init__(self, *, remembers: bool = False) -> None:
        self.loads: list[Load] = []
        self.remembers = remembers

    async def measure(self, workload: Load, slo: Slo, progress: Progress) -> Measurement:
        self.loads.append(workload)
        free, records = 0.0, []
        for request in workload.plan(COMMON_IDS):
            due = free if workload.closed else request.offset
            begin = max(due, free)
            free = begin + SERVICE_S
            chunks = [Chunk(begin + SERVICE_S / 2, "x", 1), Chunk(free, "y", 1)]
            usage = ReportedUsage(8, 8 if self.remembers and len(self.loads) > 3 else 0, 2)
            records.append(RequestRecord(request.index, due, ready=due, sent=due, end=free, chunks=chunks, usage=usage))
        return measure(RunRecord(records), workload, slo)


async def refuse(workload: Load, slo: Slo, progress: Progress) -> Measurement:
    failure = RequestFailed("refused", "no room")
    return measure(RunRecord([RequestRecord(0, 0.0, end=0.1, failure=failure)]), workload, slo)


def find(opened: OpenTarget, plan: RunPlan, highest: float | None = None) -> Exploration:
    return asyncio.run(explore(opened, plan, KneeLimits(highest, 0.9, 0.1), silent))


def plan(slo: Slo = Slo(ttft=0.5), **load: Any) -> RunPlan:  # noqa: B008 - frozen
    return RunPlan(SyntheticLoad(**{"num_prompts": 400, "input_len": 8, "output_len": 2, **load}), slo, 60, 0)


def opened(queue: Queue) -> OpenTarget:
    return OpenTarget("queue", Provenance("here"), 0, queue.measure)


def test_the_knee_of_a_queue_that_serves_ten_a_second() -> None:
    """With constant arrivals the queue is empty below 10 requests/s and grows without bound above."""
    queue = Queue()
    work = plan(arrivals="constant", request_rate=1.0)
    found = find(opened(queue), work)
    assert found.knee.verdict == "found"
    assert 10 / 1.1 <= found.knee.rate <= 10.5
    assert (found.idle, found.goal.low) == (None, 1.0)
    assert found.burst["requests_per_s"] == pytest.approx(10)
    assert found.goal.high == pytest.approx(40)
    kept = [point for point in found.attempts if point.run is not None]
    assert {point.rate for point in kept} == set(sorted({p.rate for p in found.attempts if p.attainment >= 0.9})[-2:])
    assert found.at_knee in kept
    seeds = [load.seed for load in queue.loads]
    assert len(set(seeds)) == len(seeds), "no attempt may find the prompts of another in a cache"
    assert work.workload.seed not in seeds


def test_without_rate_and_slo_they_come_from_the_idle_target() -> None:
    queue = Queue()
    found = find(opened(queue), plan(Slo()))
    assert found.slo == Slo(ttft=pytest.approx(SLACK * SERVICE_S / 2), tpot=pytest.approx(SLACK * SERVICE_S / 2))
    assert queue.loads[0].closed
    assert queue.loads[0].num_requests == 8
    assert found.goal.start == pytest.approx(5)
    assert found.goal.low == pytest.approx(0.5)
    assert 0.5 <= found.knee.rate < 10


def test_report_of_a_knee(capsys: pytest.CaptureFixture[str]) -> None:
    target, work = opened(Queue()), plan(arrivals="constant", request_rate=1.0)
    found = find(target, work)
    document = knee_json(work, found)
    assert document["knee_rps"] == found.knee.rate
    assert document["at_knee"]["attainment"]["all"] >= 0.9
    assert document["at_knee"]["completed"] == 400
    assert document["at_knee"]["workload"]["request_rate"] == found.knee.rate
    assert document["workload"]["request_rate"] == 1.0
    assert found.at_knee
    assert found.at_knee.run
    assert f"arrivals at {found.knee.rate:.2f}"[:-1] in found.at_knee.run.experiment.headline()
    assert [point["rate"] for point in document["points"]] == [attempt.rate for attempt in found.knee.attempts]
    assert {point["met"] for point in document["points"]} == {True, False}
    assert document["slo"] == {"ttft_ms": 500.0}
    show(knee_content(document, target.experiment(work.workload, found.slo)))
    printed = capsys.readouterr().out
    assert "MEASURED queue (here)" in printed
    assert f"knee at {found.knee.rate:.3g} requests/s: 90% of requests or more meet the SLO" in printed


def test_the_report_says_how_a_rate_that_was_tried_twice_counts(capsys: pytest.CaptureFixture[str]) -> None:
    target, work = opened(Queue()), plan(Slo(ttft=0.5, e2e=20.0), num_prompts=50, request_rate=1.0)
    found = find(target, work)
    assert found.knee.rate in [attempt.rate for attempt in found.attempts if attempt is not found.at_knee]
    document = knee_json(work, found)
    content = knee_content(document, target.experiment(work.workload, found.slo))
    show(content)
    printed = capsys.readouterr().out
    assert "latency in ms; a rate that was tried twice counts by the mean of both" in printed
    goodput = [point["goodput_rps"] for point in document["points"] if point["rate"] == found.knee.rate]
    assert (found.knee.rate, pytest.approx(fmean(goodput))) in content.charts[-1].series[0].points
    for chart in content.charts:
        for series in chart.series:
            assert [rate for rate, _ in series.points] == sorted({point["rate"] for point in document["points"]})
    assert "SLO: TTFT 500 ms, E2E 20000 ms, met by 90% of requests" in printed


def test_a_knee_with_a_growing_backlog_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    """With a TTFT limit of 15 s a load of 40 s meets its SLO up to 14 requests/s, although only 10 are served."""
    target, work = opened(Queue()), plan(Slo(ttft=15.0), arrivals="constant", request_rate=12.0)
    found = find(target, work)
    document = knee_json(work, found)
    assert found.knee.rate > 12
    assert document["knee_sustained"] is False
    show(knee_content(document, target.experiment(work.workload, found.slo)))
    assert "10 served: the backlog kept growing" in capsys.readouterr().err
    steady = find(target, plan(arrivals="constant", request_rate=1.0))
    assert knee_json(work, steady)["knee_sustained"] is True


@pytest.mark.parametrize("remembers", [True, False])
def test_prompts_cached_from_earlier_rates_are_warned_about(
    remembers: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target, work = opened(Queue(remembers=remembers)), plan(request_rate=1.0)
    found = find(target, work)
    show(knee_content(knee_json(work, found), target.experiment(work.workload, found.slo)))
    assert ("the prefix hit rate rose from 0% to 100%" in capsys.readouterr().err) == remembers


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (Slo(ttft=0.01), "no knee: even at 1 requests/s fewer than 90% of requests meet the SLO"),
        (Slo(ttft=1e3), "no knee up to 90 requests/s, the highest rate tried"),
    ],
)
def test_verdict_without_a_knee(slo: Slo, words: str) -> None:
    target, work = opened(Queue()), plan(slo, request_rate=1.0)
    found = find(target, work, highest=90)
    document = knee_json(work, found)
    assert verdict(document).startswith(words)
    assert (document["at_knee"] is None) == (document["verdict"] == "never met")


def test_a_target_that_serves_nothing_is_an_error_with_its_reason() -> None:
    broken = OpenTarget("broken", Provenance("here"), 0, refuse)
    with pytest.raises(LlmschedError, match=r"no request was served.*refused \(no room\)"):
        find(broken, plan())
    with pytest.raises(LlmschedError, match=r"no request was served.*refused \(no room\)"):
        find(broken, plan(Slo(), request_rate=1.0))
    assert find(broken, plan(request_rate=1.0), highest=2.0).knee.verdict == "never met"


@pytest.mark.parametrize(
    ("load", "wish", "message"),
    [
        (
            {"request_rate": 90.0},
            KneeLimits(3.0, 0.9, 0.1),
            "--max-request-rate must be finite and at least the lowest rate, 90 requests/s, not 3",
        ),
        (
            {"request_rate": float("inf")},
            KneeLimits(None, 0.9, 0.1),
            "--request-rate, the lowest rate, must be above 0 and finite, not inf",
        ),
        (
            {},
            KneeLimits(0.0, 0.9, 0.1),
            "--max-request-rate must be finite and at least 1e-09 requests per second, not 0",
        ),
        ({}, KneeLimits(None, 0.0, 0.1), "--knee-attainment must be above 0 and at most 1 .100%., not 0"),
        ({}, KneeLimits(None, 0.9, 5.0), "--knee-tolerance must be 0.001 to 1 .100%., not 5"),
        (
            {"arrivals": "constant", "burstiness": 2.0},
            KneeLimits(None, 0.9, 0.1),
            "burstiness: 2 has no effect with arrivals",
        ),
        ({"max_concurrency": 2, "duration": 5.0}, KneeLimits(None, 0.9, 0.1), "needs --request-rate"),
        (
            {"request_rate": 1.0, "arrivals": "ramp", "ramp_to": 5.0},
            KneeLimits(None, 0.9, 0.1),
            "arrivals: ramp",
        ),
    ],
)
def test_invalid_searches_are_refused_before_any_work(load: dict[str, Any], wish: KneeLimits, message: str) -> None:
    with pytest.raises(LlmschedError, match=message):
        check(SyntheticLoad(**load), wish)


def test_the_shape_of_arrivals_needs_no_rate_of_its_own() -> None:
    check(SyntheticLoad(arrivals="constant"), KneeLimits(None, 0.9, 0.1))


def test_a_model_in_this_process(command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu", "--find-knee"),
        *("--num-prompts", "3", "--input-len", "16", "--output-len", "2", "--slo-e2e", "10min"),
        *("--request-rate", "40", "--max-request-rate", "90", "--json"),
    )
    assert outcome.code == 0
    document = outcome.json
    assert (document["measured"], document["verdict"], document["knee_rps"]) == (True, "always met", 90.0)
    assert [point["rate"] for point in document["points"]] == [40.0, 80.0, 90.0]
    assert document["engine"]["num_gpu_blocks_override"] == 64


def test_no_rate_that_meets_the_slo_is_exit_code_1(command: CommandLine, tiny_model: Callable[..., Path]) -> None:
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu", "--find-knee"),
        *("--num-prompts", "3", "--input-len", "16", "--output-len", "2", "--slo-ttft", "0ms"),
        *("--request-rate", "50", "--max-request-rate", "90"),
    )
    assert outcome.code == 1
    assert "no knee: even at 50 requests/s" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--find-knee", "--compare", "static,fair"), "exclude each other"),
        (("--max-request-rate", "3"), "--max-request-rate: applies only to --find-knee"),
        (("--knee-attainment", "0%"), "--knee-attainment: applies only to --find-knee"),
        (("--rounds", "3"), "--rounds applies only to --compare"),
        (("--find-knee", "--knee-attainment", "0%"), "--knee-attainment must be above 0"),
        (("--find-knee",), "the target is unreachable, so there is no knee to find"),
    ],
)
def test_bad_usage_is_one_line(command: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    assert message in command.refused("bench", "http://127.0.0.1:9", *arguments)
