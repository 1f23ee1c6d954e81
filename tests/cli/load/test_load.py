"""When requests are sent: schedules, concurrency, seeds."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import Any

import pytest
from virtual_time import run_virtual

from llmsched.cli.figures.record import RequestFailed, RequestRecord
from llmsched.cli.load.load import PlannedRequest, run_load
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.engine.errors import LlmschedError


def plan(**settings: Any) -> list[PlannedRequest]:
    return SyntheticLoad(**settings).plan(COMMON_IDS)


def offsets(**settings: Any) -> list[float]:
    return [request.offset for request in plan(**settings)]


def run(workload: SyntheticLoad, seconds: float = 0.0, timeout: float | None = None) -> list[RequestRecord]:
    """Return the records of a load on a target that takes `seconds` for each request."""

    async def send(request: PlannedRequest, record: RequestRecord) -> None:
        record.sent = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)

    return run_virtual(
        run_load(
            workload.plan(COMMON_IDS),
            send,
            closed=workload.closed,
            max_concurrency=workload.max_concurrency,
            stop_after=workload.stop_after,
            timeout=timeout,
        )
    )


def test_same_seed_same_load_other_seed_other_load() -> None:
    work = {"num_prompts": 50, "input_len": 16, "request_rate": 200.0}
    assert plan(seed=1, **work) == plan(seed=1, **work)
    assert {request.prompt for request in plan(seed=1, **work)}.isdisjoint(
        request.prompt for request in plan(seed=2, **work)
    )
    assert offsets(seed=1, **work) != offsets(seed=2, **work)


def test_prompts_do_not_depend_on_the_rate() -> None:
    slow, fast = plan(num_prompts=9, request_rate=1.0), plan(num_prompts=9, request_rate=50.0)
    assert [request.prompt for request in slow] == [request.prompt for request in fast]


def test_constant_arrivals_keep_the_schedule() -> None:
    """The last of 1,000 requests at 200/s is sent at 4.995 s, however long the others take."""
    records = run(SyntheticLoad(num_prompts=1000, input_len=1, request_rate=200, arrivals="constant"), seconds=0.7)
    assert [record.sent for record in records] == pytest.approx([index / 200 for index in range(1000)])
    assert [record.scheduled for record in records] == pytest.approx([record.sent for record in records])


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    """Gaps of an exponential distribution: mean and standard deviation are both 1 / rate."""
    times = offsets(num_prompts=5001, input_len=1, request_rate=200)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 200, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 200, rel=0.1)


@pytest.mark.parametrize("rate", [None, float("inf")])
def test_all_at_once(rate: float | None) -> None:
    records = run(SyntheticLoad(num_prompts=20, input_len=1, request_rate=rate), seconds=1)
    assert {record.scheduled for record in records} == {0.0}
    assert {record.end for record in records} == {1.0}


def test_closed_loop_schedules_a_request_when_another_ends() -> None:
    records = run(SyntheticLoad(num_prompts=7, input_len=1, max_concurrency=3), seconds=1)
    assert [record.scheduled for record in records] == [0, 0, 0, 1, 1, 1, 2]
    assert all(record.sent == record.ready == record.scheduled for record in records)


def test_latency_in_a_capped_open_loop_includes_the_wait() -> None:
    records = run(
        SyntheticLoad(num_prompts=4, input_len=1, request_rate=10, arrivals="constant", max_concurrency=1), seconds=1
    )
    assert [record.scheduled for record in records] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [record.sent for record in records] == pytest.approx([0, 1, 2, 3])
    assert [record.ready for record in records] == pytest.approx([0, 1, 2, 3])


def test_a_timeout_ends_a_request_and_lets_the_next_start() -> None:
    records = run(SyntheticLoad(num_prompts=2, input_len=1, max_concurrency=1), seconds=1e9, timeout=2)
    assert [record.end for record in records] == [2, 4]
    assert [record.failure.reason for record in records if record.failure] == ["timeout", "timeout"]


@pytest.mark.parametrize(
    ("problem", "reason", "detail"),
    [
        (RequestFailed("http 500", "broken"), "http 500", "broken"),
        (LookupError("unexpected"), "fault of the bench", "LookupError: unexpected"),
    ],
)
def test_a_failure_is_recorded_and_the_other_requests_continue(problem: Exception, reason: str, detail: str) -> None:
    async def send(request: PlannedRequest, record: RequestRecord) -> None:
        if request.index == 1:
            raise problem

    ended: list[int] = []
    records = run_virtual(
        run_load(
            plan(num_prompts=3),
            send,
            closed=False,
            max_concurrency=None,
            timeout=None,
            on_end=lambda record: ended.append(record.index),
        )
    )
    assert [record.completed for record in records] == [True, False, True]
    assert [(record.failure.reason, record.failure.detail) for record in records if record.failure] == [
        (reason, detail)
    ]
    assert ended == [0, 1, 2]


def test_prompts_have_exactly_the_length_and_share_exactly_the_prefix() -> None:
    prompts = [tuple(request.prompt.token_ids or ()) for request in plan(num_prompts=6, input_len=32, prefix_len=20)]
    assert [len(ids) for ids in prompts] == [32] * 6
    assert len({ids[:20] for ids in prompts}) == 1
    assert len({ids[20:] for ids in prompts}) == 6
    assert all(token_id in COMMON_IDS for ids in prompts for token_id in ids)


def test_text_prompts_are_words() -> None:
    planned = SyntheticLoad(num_prompts=3, input_len=12, prefix_len=4).plan(None)
    texts = [(request.prompt.text or "").split(" ") for request in planned]
    assert all(len(words) == 12 and all(words) for words in texts)
    assert len({tuple(words[:4]) for words in texts}) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0}, "request_rate: 0"),
        ({"request_rate": -1}, "request_rate: -1"),
        ({"request_rate": float("nan")}, "request_rate: nan"),
        ({"num_prompts": 0}, "num_prompts: 0"),
        ({"max_concurrency": 0}, "max_concurrency: 0"),
        ({"input_len": 4, "prefix_len": 5}, r"prefix_len: 5 is out of range; allowed is 0 to input_len \(4\)"),
        ({"seed": -1}, "seed: -1"),
        ({"duration": 0.0, "max_concurrency": 1}, "duration: 0 is out of range; allowed is above 0 s"),
        ({"duration": 5.0}, "duration: has no effect when all requests are sent at once"),
        ({"num_prompts": 1_000_001}, "num_prompts: 1000001 is out of range; allowed is 1 to 1000000"),
        ({"input_len": 1 << 25}, "input_len: 33554432"),
        ({"num_prompts": None}, "num_prompts: may be left out only with duration"),
        ({"max_concurrency": 1_000_001}, "max_concurrency: 1000001 is out of range; allowed is 1 to 1000000"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmschedError, match=message):
        SyntheticLoad(**settings)


def test_the_load_in_words() -> None:
    assert SyntheticLoad(max_concurrency=4).describe() == "closed loop, 4 at a time"
    assert SyntheticLoad().describe() == "all at once"
    assert SyntheticLoad(request_rate=2.5).describe() == "poisson arrivals at 2.5 requests/s"
    assert SyntheticLoad(request_rate=float("inf"), max_concurrency=4).describe() == "all at once, at most 4 at a time"


def test_a_duration_ends_a_closed_loop() -> None:
    records = run(SyntheticLoad(num_prompts=None, input_len=1, max_concurrency=2, duration=2.5), seconds=1)
    assert [record.scheduled for record in records] == [0, 0, 1, 1, 2, 2]
    assert len(run(SyntheticLoad(num_prompts=3, input_len=1, max_concurrency=2, duration=2.5), seconds=1)) == 3


def test_a_duration_ends_an_open_loop() -> None:
    workload = SyntheticLoad(num_prompts=None, input_len=1, request_rate=4, arrivals="constant", duration=2)
    assert workload.num_requests == 8
    assert [record.scheduled for record in run(workload)] == pytest.approx([n / 4 for n in range(8)])
    assert workload.describe() == "constant arrivals at 4 requests/s for 2 s"


def test_a_request_does_not_depend_on_the_number_of_requests() -> None:
    work = {"input_len": parse_lengths("8..64", "input_len"), "output_len": parse_lengths("lognormal:64,1", "o")}
    assert plan(num_prompts=50, request_rate=3.0, **work)[:20] == plan(num_prompts=20, request_rate=3.0, **work)


def test_a_prompt_shorter_than_the_prefix_is_a_part_of_it() -> None:
    prompts = [
        request.prompt.token_ids or []
        for request in plan(num_prompts=40, input_len=parse_lengths("lognormal:20,1", "input_len"), prefix_len=16)
    ]
    longest = max(prompts, key=len)
    assert any(len(ids) < 16 < len(longest) for ids in prompts)
    assert all(ids[:16] == longest[: min(16, len(ids))] for ids in prompts)


def test_a_load_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(LlmschedError, match=r"request_rate: 1000000000.0 for 60 s makes too many requests"):
        SyntheticLoad(num_prompts=None, request_rate=1e9, duration=60)


def test_the_fingerprint_depends_on_every_setting() -> None:
    def fingerprint(**settings: Any) -> str:
        return str(SyntheticLoad(**settings).parameters()["fingerprint"])

    assert fingerprint() == fingerprint(num_prompts=100)
    different: list[dict[str, Any]] = [{"seed": 1}, {"input_len": 9}, {"max_concurrency": 1}, {"prefix_len": 3}]
    different += [{"max_concurrency": 1, "request_rate": float("inf")}]
    assert len({fingerprint(**settings) for settings in [{}, *different]}) == 6


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"arrivals": "constant", "max_concurrency": 1}, "arrivals"),
        ({"arrivals": "gamma", "burstiness": 0.5}, "burstiness"),
        ({"arrivals": "daynight", "day_amplitude": 0.5}, "arrivals, day_amplitude"),
        ({"request_rate": float("inf"), "arrivals": "gamma", "burstiness": 0.5}, "burstiness"),
    ],
)
def test_a_shape_needs_a_rate(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(LlmschedError, match=f"^{names}: only has an effect with a finite"):
        SyntheticLoad(**settings).check_shape()
    SyntheticLoad(**settings).at_rate(1.0).check_shape()
