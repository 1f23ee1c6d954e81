"""Figures of a server with known times, exact in virtual time, from HTTP to the JSON report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_server import FakeServer, Script, end, event, steady, token, usage
from measured_load import measure_load
from virtual_time import run_virtual

from llmsched.cli.bench.report.run_report import slo_table
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.registry import as_json
from llmsched.cli.figures.token_times import CHUNKS, EXACT, RETOKENISED, USAGE
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import warm_up
from llmsched.engine.goodput import Slo
from llmsched.engine.provenance import Provenance

ONE = SyntheticLoad(num_prompts=1, input_len=8, output_len=5)
VLLM = {"data": [{"id": "served", "owned_by": "vllm"}]}


def bench(server: FakeServer, workload: SyntheticLoad = ONE, slo: Slo | None = None, **options: Any) -> Measurement:
    return run_virtual(measure_load("http://fake/v1/", workload, slo, transport=server, **options))


def always(script: Script) -> Callable[[int], Script]:
    return lambda number: script


def json_of(figures: Measurement, workload: SyntheticLoad = ONE, slo: Slo | None = None) -> dict[str, Any]:
    """Return the JSON report as parsed from its text."""
    report = as_json(Experiment("m", Provenance("u"), workload, slo or Slo()), figures)
    parsed: dict[str, Any] = json.loads(json.dumps(report, allow_nan=False))
    return parsed


@pytest.mark.parametrize(
    "parts",
    [
        [(1.0 * n, token(" x" * 10)) for n in range(1, 6)],
        [(0.1 * n, token()) for n in range(1, 51)],
    ],
    ids=["5 chunks of 10", "50 chunks of 1"],
)
def test_itl_is_per_token_not_per_chunk(parts: list[tuple[float, bytes]]) -> None:
    figures = bench(FakeServer(always(Script([*parts, (5.0, end(50))]))))
    assert figures.tokens.output == 50
    assert figures.latency.itl.mean == pytest.approx(0.1)
    assert figures.latency.itl.p99 == pytest.approx(0.1)
    assert figures.latency.tpot.mean == pytest.approx((figures.latency.e2e.mean - figures.latency.ttft.mean) / 49)  # type: ignore[operator]
    assert figures.latency.worst_stall == pytest.approx(1.0 if len(parts) == 5 else 0.1)
    assert figures.tokens.source == USAGE


def test_role_and_empty_chunks_are_not_tokens() -> None:

    def delta(content: dict[str, Any]) -> bytes:
        return event({"choices": [{"index": 0, "delta": content, "finish_reason": None}]})

    parts = [
        (0.01, delta({"role": "assistant", "content": ""})),
        (0.02, delta({"content": ""})),
        *((0.5 + 0.1 * n, delta({"content": "x"})) for n in range(5)),
        (0.95, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})),
        (1.5, end(5)),
    ]
    server = FakeServer(always(Script(parts)))
    figures = bench(server, endpoint="chat", ids=None)
    assert server.paths == ["/v1/chat/completions"]
    assert figures.latency.ttft.mean == pytest.approx(0.5)
    assert figures.latency.itl.count == 4
    assert figures.latency.itl.mean == figures.latency.tpot.mean == pytest.approx(0.1)
    assert figures.latency.e2e.mean == pytest.approx(0.9)
    assert figures.tokens.output == 5


def test_tokens_are_counted_by_usage_not_by_their_text() -> None:
    figures = bench(FakeServer(always(steady(100, first=1.0, gap=0.1))), count_tokens=lambda text: 7)
    assert figures.tokens.output == 100
    assert figures.latency.tpot.mean == pytest.approx((10.9 - 1.0) / 99)
    assert figures.tokens.source == USAGE


def test_without_usage_the_token_count_is_marked_as_an_estimate() -> None:
    silent_server = FakeServer(always(Script([(0.1, token(" a b")), (0.5, token(" c d")), (0.5, end())])))
    counted = bench(silent_server, count_tokens=lambda text: len(text.split()))
    assert (counted.tokens.output, counted.tokens.source) == (4, RETOKENISED)
    assert any("re-tokenised" in warning for warning in counted.warnings)
    assert counted.tokens.prefix_hit_rate is None

    uncounted = bench(silent_server)
    assert (uncounted.tokens.output, uncounted.tokens.source) == (2, CHUNKS)
    assert any("one token per chunk" in warning for warning in uncounted.warnings)


def test_token_counts_per_chunk_are_used() -> None:
    """Chunks have 1, 3 and 2 tokens, and one has no text. Each chunk and the end of the stream have a usage."""
    parts = [
        (0.1, token("", **usage(0))),
        (0.2, token("a", **usage(1))),
        (0.5, token("", **usage(4))),
        (0.9, token("b", **usage(6))),
        (0.9, end(6)),
    ]
    server = FakeServer(always(Script(parts)), models=VLLM)
    figures = bench(server)
    assert server.bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert figures.tokens.source == EXACT
    assert figures.tokens.output == 6
    assert figures.latency.ttft.mean == pytest.approx(0.2)
    assert figures.latency.itl.count == 5
    assert figures.latency.itl.max == pytest.approx(0.2)
    assert figures.latency.itl.mean == pytest.approx(0.7 / 5)


def test_token_counts_per_chunk_that_contradict_the_usage_are_ignored() -> None:
    parts = [(0.1, token("a", **usage(1))), (0.5, token("b", **usage(2))), (0.9, end(8))]
    figures = bench(FakeServer(always(Script(parts)), models=VLLM))
    assert (figures.tokens.output, figures.tokens.source) == (8, USAGE)


def test_llmsched_reports_the_tokens_of_each_chunk() -> None:
    """An id without text is a token; the role chunk of a chat is not."""

    def delta(content: str, ids: list[int], **more: Any) -> bytes:
        return event(
            {"choices": [{"index": 0, "delta": {"content": content, **more}, "token_ids": ids}], "usage": None}
        )

    parts = [
        (0.1, delta("", [], role="assistant")),
        (0.3, delta("", [5])),
        (0.6, delta("ü", [6, 7])),
        (0.6, end(3)),
    ]
    server = FakeServer(always(Script(parts)), models={"data": [{"id": "m", "owned_by": "llmsched"}]})
    figures = bench(server, endpoint="chat", ids=None)
    assert server.bodies[0]["return_token_ids"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert (figures.tokens.source, figures.tokens.output) == (EXACT, 3)
    assert figures.latency.ttft.mean == pytest.approx(0.3)
    assert figures.latency.itl.mean == pytest.approx(0.15)


def test_request_body() -> None:
    server = FakeServer(always(steady(5, 0.1, 0.1)), models={"data": [{"id": "served", "owned_by": "someone"}]})
    bench(server)
    body = server.bodies[0]
    assert len(body.pop("prompt")) == 8
    assert body == {
        "model": "served",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    bench(server, model="mine", ignore_eos=False)
    assert server.bodies[1]["model"] == "mine"
    assert "ignore_eos" not in server.bodies[1]


def test_failures_are_counted_by_reason_and_kept_out_of_the_latencies() -> None:
    """Ten requests, four of them good."""
    good = steady(5, first=0.5, gap=0.1)
    broken = event({"error": {"message": "out of memory", "type": "server_error"}})
    scripts = [
        *[Script()] * 2,
        Script([(0.1, end())]),
        Script([(0.1, end(0))]),
        Script([(0.1, token()), (0.2, broken)]),
        Script([(0.1, token()), (0.2, token())]),
        *[good] * 4,
    ]
    work = replace(ONE, num_prompts=10)
    figures = bench(FakeServer(lambda number: scripts[number]), work)
    assert (figures.requests.completed, figures.requests.failed) == (4, 6)
    assert figures.requests.failures == {"empty stream": 4, "error event": 1, "cut without [DONE]": 1}
    assert "out of memory" in figures.requests.failure_examples["error event"]
    assert figures.latency.ttft.count == figures.latency.e2e.count == 4
    assert figures.latency.ttft.mean == pytest.approx(0.5)
    assert figures.tokens.output == 20
    assert figures.rates.requests == pytest.approx(4 / 0.9)
    assert json_of(figures)["failures"] == figures.requests.failures


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script([(0.1, b'{"error": "bad"}')], status=500), "http 500"),
        (Script([(0.1, b"slow down")], status=429), "http 429"),
        (Script([(0.1, token())], cut=True), "cut without [DONE]"),
        (Script([], cut=True), "connection lost"),
        (Script([(0.1, b"data: {no json\n\n")]), "not understood"),
        (Script([(0.1, b"data: 3\n\n")]), "not understood"),
        (Script([(0.1, b"event: error\ndata: boom\n\n")]), "error event"),
        (Script([(0.1, event({"object": "error", "message": "boom"}))]), "error event"),
        (Script([(0.1, token())], hang=True), "timeout"),
        (Script([], hang=True), "timeout"),
    ],
)
def test_every_kind_of_failure_has_a_reason(script: Script, reason: str) -> None:
    figures = bench(FakeServer(always(script)), timeout=2.0)
    assert (figures.requests.completed, figures.requests.failed) == (0, 1)
    assert figures.requests.failures == {reason: 1}
    report = json_of(figures)
    nothing = {
        "mean": None,
        "p50": None,
        "p95": None,
        "p99": None,
        "max": None,
        "count": 0,
        "p99_ci95": None,
        "mean_ci95": None,
    }
    assert [report[name] for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")] == [nothing] * 4
    assert report["valid"] is False


def test_a_server_that_never_answers_ends_with_the_timeout() -> None:
    work = replace(ONE, num_prompts=3)
    figures = bench(FakeServer(always(Script(hang=True))), work, timeout=2.0)
    assert figures.requests.failures == {"timeout": 3}
    assert figures.duration == pytest.approx(2.0)
    assert figures.rates.requests == 0.0


def test_one_token_has_no_tpot_and_no_itl() -> None:
    report = json_of(bench(FakeServer(always(steady(1, first=0.5, gap=0)))))
    assert report["completed"] == 1
    assert report["ttft_ms"]["mean"] == report["e2e_ms"]["mean"] == pytest.approx(500)
    assert report["tpot_ms"]["mean"] is report["itl_ms"]["p99"] is report["worst_stall_ms"] is None


def test_goodput_counts_failures_as_missed() -> None:
    scripts = [steady(5, 0.5, 0.1), steady(5, 2.0, 0.1), Script([], status=500), steady(5, 0.5, 0.3)]
    slo = Slo(ttft=1.0, itl=0.2)
    figures = bench(FakeServer(lambda number: scripts[number]), replace(ONE, num_prompts=4), slo)
    assert figures.duration == pytest.approx(2.4)
    assert figures.goodput.requests_per_s == pytest.approx(1 / 2.4)
    assert figures.goodput.attainment == {"ttft": 0.5, "itl": 0.5, "all": 0.25}
    table = slo_table(slo, figures)
    assert table.rows == [
        ["TTFT", "1000 ms", "50.0%", "1", "1"],
        ["ITL p99", "200 ms", "50.0%", "1", "1"],
        ["failed requests", "", "", "1", ""],
        ["all", "", "25.0%", "3", ""],
    ]


def test_ttft_counts_from_when_the_request_should_have_been_sent() -> None:
    """TTFT includes 0.9 s of waiting for --max-concurrency and 0.2 s of connecting."""
    work = replace(ONE, num_prompts=2, request_rate=10.0, arrivals="constant", max_concurrency=1)
    figures = bench(FakeServer(always(replace(steady(5, 0.5, 0.1), connect=0.2))), work)
    assert figures.latency.connect.mean == pytest.approx(0.2)
    assert figures.latency.ttft.max == pytest.approx((1.1 - 0.1) + 0.2 + 0.5)
    assert figures.client.send.max == 0.0
    assert figures.valid


def test_max_concurrency_is_not_exceeded() -> None:
    server = FakeServer(always(steady(5, 0.5, 0.1)))
    figures = bench(server, replace(ONE, num_prompts=20, max_concurrency=3))
    assert server.most_running == 3
    assert figures.requests.completed == 20


def test_throughput_whole_and_steady() -> None:
    """Four requests that end at 10.0, 10.5, 11.0 and 11.5 s."""
    figures = bench(FakeServer(lambda n: steady(1, 10 + 0.5 * n, 0)), replace(ONE, num_prompts=4))
    assert figures.rates.requests == pytest.approx(4 / 11.5)
    assert figures.rates.requests_steady == pytest.approx(2.0)
    assert figures.rates.output_tokens == pytest.approx(4 / 11.5)
    assert figures.rates.output_tokens_steady == pytest.approx(2.0)


def test_steady_tokens_per_second_of_requests_in_lockstep() -> None:
    """Two requests at a time take 1 s for 10 tokens each and end in pairs: 20 tokens/s."""
    work = replace(ONE, num_prompts=10, max_concurrency=2)
    figures = bench(FakeServer(always(steady(10, 0.1, 0.1))), work)
    assert figures.duration == pytest.approx(5.0)
    assert figures.rates.output_tokens == pytest.approx(100 / 5.0)
    assert figures.rates.output_tokens_steady == pytest.approx(20.0)
    assert figures.rates.requests_steady == pytest.approx(2.0)
    assert figures.rates.steady_window == pytest.approx((1.0, 5.0))


def test_ramp_up_and_drain_are_trimmed() -> None:
    """19 short requests arrive at 10/s and take 0.55 s each; then a long one runs alone.

    The steady state begins after the median E2E. It ends with the first request that ends after 1.9 s, the last start.
    """
    scripts = [steady(5, 0.15, 0.1)] * 19 + [steady(50, 0.15, 0.1)]
    work = replace(ONE, num_prompts=20, request_rate=10.0, arrivals="constant")
    figures = bench(FakeServer(lambda number: scripts[number]), work)
    assert figures.duration == pytest.approx(1.9 + 5.05)
    assert figures.rates.steady_window == pytest.approx((0.55, 1.95))
    assert figures.rates.requests_steady == pytest.approx(10.0)
    assert figures.rates.output_tokens_steady == pytest.approx(50.0)
    assert figures.rates.output_tokens == pytest.approx((19 * 5 + 50) / 6.95)


def test_completions_at_one_moment_have_no_steady_state_rate() -> None:
    """Ten requests that end within a millisecond after 10 s were not served at 9,000 requests/s."""
    figures = bench(FakeServer(lambda n: steady(1, 10 + 0.0001 * n, 0)), replace(ONE, num_prompts=10))
    assert figures.rates.requests == pytest.approx(1.0, rel=1e-3)
    assert figures.rates.requests_steady is None
    assert figures.rates.output_tokens_steady is None


@pytest.mark.parametrize(
    "after",
    [Script(hang=True), Script(refused=True)],
    ids=["hangs until the timeout", "takes no connection any more"],
)
def test_the_steady_state_rate_includes_the_time_a_target_is_silent(after: Script) -> None:
    """Ten requests at 10/s are served in 0.5 s each, the next twenty are not served."""
    work = replace(ONE, num_prompts=30, request_rate=10.0, arrivals="constant")
    figures = bench(FakeServer(lambda n: steady(5, 0.1, 0.1) if n < 10 else after), work, timeout=3.0)
    assert (figures.requests.completed, figures.requests.failed) == (10, 20)
    until = figures.rates.steady_window[1]
    assert until == pytest.approx(figures.duration if after.refused else 4.0)
    assert figures.rates.requests_steady == pytest.approx(9 / (until - 0.5))
    assert figures.rates.output_tokens_steady == pytest.approx((50 - 15) / (until - 0.5))


def test_requested_and_achieved_rate() -> None:
    work = replace(ONE, num_prompts=1000, request_rate=200.0, arrivals="constant")
    server = FakeServer(always(steady(1, 0.0, 0)))
    report = json_of(bench(server, work), work)
    assert report["asked_rate"] == 200.0
    assert report["achieved_rate"] == pytest.approx(200.0)
    assert server.times[-1] == pytest.approx(4.995)
    at_once = json_of(bench(server, replace(ONE, num_prompts=2)))
    assert at_once["asked_rate"] is at_once["achieved_rate"] is None


def test_the_rate_of_the_drawn_schedule_is_reported() -> None:
    """100 requests of a 10-minute day come at night, and a concurrency of one delays them."""
    work = replace(ONE, num_prompts=100, request_rate=5.0, arrivals="daynight")
    due = [request.offset for request in work.plan(COMMON_IDS)]
    report = json_of(bench(FakeServer(always(steady(1, 0.0, 0))), work), work)
    assert report["asked_rate"] == 5.0
    assert report["achieved_rate"] == pytest.approx(report["scheduled_rate"])
    assert report["scheduled_rate"] == pytest.approx(99 / due[-1])
    assert report["scheduled_rate"] < 2.0

    capped = replace(work, max_concurrency=1)
    report = json_of(bench(FakeServer(always(steady(1, 2.0, 0))), capped), capped)
    assert report["scheduled_rate"] == pytest.approx(99 / due[-1])
    assert report["achieved_rate"] == pytest.approx(0.5, rel=0.05)

    closed = replace(ONE, num_prompts=4, max_concurrency=1)
    assert json_of(bench(FakeServer(always(steady(1, 1.0, 0))), closed), closed)["scheduled_rate"] is None


def test_hit_rate_and_preemptions() -> None:
    preempted = iter([3, 10])
    server = FakeServer(
        lambda n: steady(5, 0.5, 0.1, prompt=100, cached=[0, 50, 64][n]),
        metrics=lambda: (
            "# TYPE vllm:num_preemptions counter\n"
            'vllm:num_preemptions_total{model_name="a"} 1.0\n'
            f'vllm:num_preemptions_total{{model_name="b"}} {next(preempted)}.0\n'
        ),
    )
    figures = bench(server, replace(ONE, num_prompts=3))
    assert figures.tokens.prefix_hit_rate == pytest.approx(114 / 300)
    assert figures.requests.preemptions == 7
    assert figures.tokens.input == 300


def test_a_missing_hit_count_is_a_miss_if_others_have_one() -> None:
    """vLLM leaves cached_tokens out if it is 0."""
    scripts = [steady(5, 0.5, 0.1, prompt=100, cached=cached) for cached in (None, 64, None)]
    assert bench(FakeServer(lambda n: scripts[n]), replace(ONE, num_prompts=3)).tokens.prefix_hit_rate == 64 / 300


@pytest.mark.parametrize("metrics", ["", "free memory: lots\n", "other_total 3\n"])
def test_unreported_figures_are_null(metrics: str) -> None:
    report = json_of(bench(FakeServer(always(steady(5, 0.5, 0.1)), metrics=lambda: metrics)))
    assert report["preemptions"] is None
    assert report["prefix_hit_rate"] is None


def test_a_stream_that_comes_byte_by_byte_has_the_same_tokens() -> None:
    """A token's time is that of its event's last byte."""
    stream = b"".join([token(" ü\N{SLIGHTLY SMILING FACE}") for _ in range(5)]) + b":ping\r\n\r\n" + end(5).rstrip()
    parts = [(0.001 * (index + 1), stream[index : index + 1]) for index in range(len(stream))]
    figures = bench(FakeServer(always(Script(parts))))
    one = len(token(" ü\N{SLIGHTLY SMILING FACE}"))
    assert figures.tokens.output == 5
    assert figures.latency.ttft.mean == pytest.approx(0.001 * one)
    assert figures.latency.itl.mean == pytest.approx(0.001 * one)


def test_a_connection_left_open_after_done_does_not_count() -> None:
    figures = bench(FakeServer(always(replace(steady(5, 0.5, 0.1), hang=True))), timeout=30)
    assert figures.requests.completed == 1
    assert figures.duration == pytest.approx(0.9)


def test_percentiles_of_few_samples_are_warned_about() -> None:
    figures = bench(FakeServer(always(steady(5, 0.5, 0.1))), replace(ONE, num_prompts=250))
    assert figures.warnings == (
        "P99 of TTFT, TPOT and E2E rests on 3 of 250 samples; use 1,000 or more for a reliable P99",
    )


def test_warm_up_is_sent_and_not_measured() -> None:
    server = FakeServer(always(steady(5, 0.5, 0.1)))

    async def main() -> None:
        target = HttpTarget(HttpOptions("http://fake"), transport=server)
        await warm_up(target, replace(ONE, request_rate=0.001), 3, ids=COMMON_IDS, timeout=None)
        await warm_up(target, ONE, 0, ids=COMMON_IDS, timeout=None)
        await target.close()

    run_virtual(main())
    assert len(server.bodies) == 3
    assert server.times == [0.0] * 3


def test_text_prompts_are_sent_as_text() -> None:
    server = FakeServer(always(steady(5, 0.5, 0.1)))
    bench(server, ids=None)
    bench(server, ids=None, endpoint="chat")
    assert len(server.bodies[0]["prompt"].split()) == 8
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user"]


def test_reasoning_and_tool_calls_are_tokens() -> None:
    def delta(**content: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": content}]})

    parts = [
        (0.1, delta(role="assistant", content=None)),
        (0.2, delta(reasoning_content="hm")),
        (0.3, delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])),
        (0.4, delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])),
        (0.4, end(3)),
    ]
    figures = bench(FakeServer(always(Script(parts))), endpoint="chat", ids=None)
    assert figures.latency.ttft.mean == pytest.approx(0.2)
    assert figures.latency.itl.count == 2


def test_a_malformed_model_list_is_ignored() -> None:
    for nonsense in ({"data": []}, {"data": ["x"]}, {"data": 3}, {}):
        server = FakeServer(always(steady(5, 0.5, 0.1)), models=nonsense)
        assert bench(server).requests.completed == 1
        assert "model" not in server.bodies[0]


def test_a_failed_model_lookup_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(always(steady(5, 0.5, 0.1)))
    answer = server.handle_async_request

    async def flaky(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            raise httpx.ReadError("reset")
        return await answer(request)

    monkeypatch.setattr(server, "handle_async_request", flaky)
    figures = bench(server)
    assert figures.requests.completed == 1
    assert figures.requests.preemptions is None


def test_stalls_have_their_request_length_and_time() -> None:
    """Two streams that begin at 0 and at 0.5 s; the second stalls for 2 s after its third token."""
    stalled = Script([*((0.5 + 0.1 * n, token()) for n in range(3)), (2.7, token()), (2.8, token() + end(5))])
    scripts = [steady(5, 0.5, 0.1), stalled]
    work = replace(ONE, num_prompts=2, request_rate=2.0, arrivals="constant")
    report = json_of(bench(FakeServer(lambda number: scripts[number]), work), work)
    assert report["worst_stall_ms"] == pytest.approx(2000)
    worst, other = report["worst_stalls"]
    assert (worst["request"], worst["tokens_before"], other["request"]) == (1, 3, 0)
    assert [worst["ms"], worst["at_s"], other["ms"]] == pytest.approx([2000, 1.2, 100])


def test_reading_pauses() -> None:
    """At 10 tokens/s a reader misses a 0.3 s stall of a stream that is ahead, but notices 5 tokens/s and a failure."""
    ahead = Script([*((0.05 * n, token()) for n in range(15)), (1.0, token() + end(16))])
    scripts = [ahead, steady(5, 0.5, 0.2), Script(status=500)]
    work, slo = replace(ONE, num_prompts=3), Slo(reader_speed=10.0)
    reading = json_of(bench(FakeServer(lambda number: scripts[number]), work, slo), work, slo)["reading"]
    assert reading["tokens_per_s"] == 10.0
    assert reading["interrupted_requests"] == pytest.approx(2 / 3)
    assert reading["late_tokens"] == pytest.approx(4 / 21)
    assert reading["waits_ms"]["mean"] == pytest.approx(100)
    assert reading["waits_ms"]["count"] == 4


def test_the_confidence_interval_of_p99_is_in_the_report() -> None:
    scripts = [steady(5, 0.5 + 0.01 * n, 0.1) for n in range(100)]
    first, again = (json_of(bench(FakeServer(lambda n: scripts[n]), replace(ONE, num_prompts=100))) for _ in range(2))
    low, high = first["ttft_ms"]["p99_ci95"]
    assert 500 < low < first["ttft_ms"]["p99"] <= high == pytest.approx(1490)
    assert first["ttft_ms"]["p99_ci95"] == again["ttft_ms"]["p99_ci95"]
    assert json_of(bench(FakeServer(always(steady(5, 0.5, 0.1)))))["ttft_ms"]["p99_ci95"] is None


def test_an_slo_names_its_statistic_and_its_misses() -> None:
    """One gap of 1 s among nine of 0.1 s misses the maximum, not the median."""
    stalled = Script([*((0.5 + 0.1 * n, token()) for n in range(10)), (2.4, token() + end(11))])
    for name, missed in (("p50", 0), ("max", 1)):
        slo = Slo(itl=0.2, itl_statistic=name)
        report = json_of(bench(FakeServer(always(stalled)), slo=slo), slo=slo)
        assert report["slo"] == {"itl_ms": 200.0, "itl_statistic": name}
        assert report["slo_missed"] == report["slo_missed_alone"] == {"itl": missed}
        assert report["attainment"] == {"itl": 1.0 - missed, "all": 1.0 - missed}


def test_scheduler_decisions_are_requested_after_the_load() -> None:
    entry = {"at_ms": 250.0, "until_ms": 250.0, "what": "admitted", "count": 1, "details": {"running": 1}}

    def answer(path: str) -> httpx.Response:
        if path.endswith("cmpl-0/explain"):
            return httpx.Response(200, json={"id": "cmpl-0", "choices": [{"index": 0, "entries": [entry]}]})
        return httpx.Response(404, json={"error": {"message": "forgotten"}})

    def script(number: int) -> Script:
        return Script([(0.5, token(id=f"cmpl-{number}")), (0.5, end(1))])

    work = replace(ONE, num_prompts=2, output_len=1, max_concurrency=1)
    for owner, timelines, told in (("llmsched", True, 1), ("llmsched", False, 0), ("vllm", True, 0)):
        models = {"data": [{"id": "m", "owned_by": owner}]}
        records = bench(FakeServer(script, models=models, other=answer), work, timelines=timelines).run.records
        assert [record.request_id for record in records] == ["cmpl-0", "cmpl-1"]
        assert sum(record.timeline is not None for record in records) == told
        if told:
            timeline = records[0].timeline
            assert (timeline.start, timeline.entries[0].time) == (0.0, 0.25)
            assert timeline.entries[0].details == {"running": 1}
