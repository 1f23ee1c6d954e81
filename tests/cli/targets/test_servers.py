"""Servers differ in how they stream, end and fail; all are measured alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fake_server import FakeServer, Script, end, event, steady, token, usage
from hypothesis import given
from hypothesis import strategies as st
from measured_load import measure_load
from virtual_time import run_virtual

from llmsched.cli.figures.engine_counts import EngineCounts
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import CHUNKS, EXACT, USAGE, served
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.answer import read_answer
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.server_metrics import ServerMetrics
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.metrics import EngineMetrics


def bench(script: Script, owner: str = "someone", **options: Any) -> Measurement:
    """Send one request of three tokens to a server with this `owned_by`."""
    return bench_of(FakeServer(lambda number: script, models={"data": [{"id": "m", "owned_by": owner}]}), **options)


def bench_of(server: FakeServer, work: SyntheticLoad | None = None, **options: Any) -> Measurement:
    work = work or SyntheticLoad(num_prompts=1, input_len=8, output_len=3)
    ids = None if options.get("endpoint") == "chat" else COMMON_IDS
    return run_virtual(measure_load("http://fake", work, transport=server, ids=ids, timeout=9.0, **options))


def delta(content: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": content, "finish_reason": finish}], **more}


def vllm() -> list[tuple[float, bytes]]:
    """A role chunk with a count of 0, a running count with each chunk, two tokens in one."""
    return [
        (0.1, event(delta({"role": "assistant", "content": ""}, **usage(0)))),
        (0.2, event(delta({"content": "a"}, **usage(1)))),
        (0.4, event(delta({"content": "bc"}, "length", **usage(3)))),
        (0.4, event({"choices": [], **usage(3)}) + b"data: [DONE]\n\n"),
    ]


def sglang() -> list[tuple[float, bytes]]:
    """Reasoning apart from content, null where a field is empty, a last chunk without either."""
    return [
        (0.1, event(delta({"role": "assistant", "content": "", "reasoning_content": None}))),
        (0.2, event(delta({"content": None, "reasoning_content": "a"}))),
        (0.3, event(delta({"content": None, "reasoning_content": "b"}))),
        (0.4, event(delta({"content": "c", "reasoning_content": None}))),
        (0.4, event(delta({"content": None}, "length")) + end(3)),
    ]


def llama_cpp() -> list[tuple[float, bytes]]:
    """A role chunk whose content is null; finish, usage and timings in one chunk."""
    timings = {"timings": {"predicted_n": 3, "predicted_ms": 200.0}}
    return [
        (0.1, event(delta({"role": "assistant", "content": None}))),
        *((0.2 + 0.1 * n, event(delta({"content": "x"}))) for n in range(3)),
        (0.4, event(delta({}, "length", **usage(3), **timings)) + b"data: [DONE]\n\n"),
    ]


def tgi() -> list[tuple[float, bytes]]:
    """No blank after "data:", comments to keep the connection, no [DONE]: a finish reason and the end."""
    return [
        (0.1, b":keep-alive\n\n"),
        *((0.2 + 0.1 * n, event(delta({"content": "x"})).replace(b"data: ", b"data:")) for n in range(2)),
        (0.4, event(delta({"content": "x"}, "length", **usage(3))).replace(b"data: ", b"data:").rstrip()),
    ]


def gateway() -> list[tuple[float, bytes]]:
    """Named events, CRLF, blank data to keep the connection, blanks around [DONE]."""
    part = b"event: message\r\nid: 1\r\n" + event(delta({"content": "x"})).replace(b"\n\n", b"\r\n\r\n")
    return [
        (0.1, b": PROCESSING\r\n\r\ndata: \r\n\r\n"),
        *((0.2 + 0.1 * n, part) for n in range(3)),
        (0.4, event({"choices": [], **usage(3)}) + b"data:  [DONE] \r\n\r\n"),
    ]


@pytest.mark.parametrize("stream", [vllm, sglang, llama_cpp, tgi, gateway], ids=lambda stream: stream.__name__)
def test_the_same_answer_of_every_server_has_the_same_figures(stream: Callable[[], list[tuple[float, bytes]]]) -> None:
    figures = bench(Script(stream()), stream.__name__, endpoint="chat")
    assert (figures.requests.completed, figures.requests.failures, figures.tokens.output) == (1, {}, 3)
    assert figures.latency.ttft.mean == pytest.approx(0.2)
    assert figures.latency.e2e.mean == pytest.approx(0.4)
    assert figures.latency.itl.mean == pytest.approx(0.1)
    assert figures.tokens.source == (EXACT if stream is vllm else USAGE)
    assert figures.tokens.input == 8


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([event({"error": {"message": "boom", "code": 500}}) + b"data: [DONE]\n\n"], "error event"),
        ([b'data:{"error":"boom","error_type":"overloaded"}\n\n'], "error event"),
        ([b'error: {"code":500,"message":"boom"}\n\n'], "error event"),
        ([event(delta({}, "abort")) + b"data: [DONE]\n\n"], "ended by abort"),
        ([event(delta({"content": "x"}))], "cut without [DONE]"),
        ([event(delta({}, "stop"))], "empty stream"),
    ],
    ids=["vllm", "tgi", "llama.cpp", "sglang", "cut", "no token"],
)
def test_every_kind_of_failure_has_its_reason(parts: list[bytes], reason: str) -> None:
    first = [] if reason == "empty stream" else [(0.1, event(delta({"content": "x"})))]
    figures = bench(Script([*first, *((0.2, part) for part in parts)]), endpoint="chat")
    assert (figures.requests.completed, figures.requests.failures) == (0, {reason: 1})
    assert reason != "error event" or "boom" in figures.requests.failure_examples[reason]


@pytest.mark.parametrize("content_type", ["application/json", "text/html", "text/event-stream"])
def test_a_plain_json_answer_is_not_a_stream(content_type: str) -> None:
    whole = b'{"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}'
    figures = bench(Script([(0.3, whole)], content_type=content_type))
    assert figures.requests.failures == {"not a stream": 1}
    assert "abc" in figures.requests.failure_examples["not a stream"]


def test_the_content_type_of_a_stream_does_not_matter() -> None:
    figures = bench(Script([(0.1, token()), (0.2, token()), (0.3, token() + end(3))], content_type="application/json"))
    assert (figures.requests.completed, figures.tokens.output) == (1, 3)


def test_only_the_choice_with_index_0_counts() -> None:
    def chunk(*choices: tuple[int, str]) -> bytes:
        return event({"choices": [{"index": index, "text": text} for index, text in choices]})

    parts = [chunk((1, "zz"), (0, "a")), chunk((1, "zz")), chunk((0, "b")), end(2)]
    figures = bench(Script([(0.1 * n, part) for n, part in enumerate(parts, start=1)]))
    assert [chunk.text for chunk in figures.run.records[0].chunks] == ["a", "b"]


def test_reasoning_under_two_names_counts_once() -> None:
    both = delta({"reasoning_content": "a", "reasoning": "a", "content": None})
    parts = [both, delta({"reasoning": "b"}), delta({"content": [{"type": "text", "text": "c"}]}, "length")]
    figures = bench(Script([(0.1 * n, event(part)) for n, part in enumerate(parts, start=1)]), endpoint="chat")
    assert [chunk.text for chunk in figures.run.records[0].chunks] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "said",
    [b"[" * 100_000, b"null", b"{", event(usage(10**9)).removeprefix(b"data: ").strip(), b"x" * (17 << 20)],
    ids=["deep", "null", "half", "usage", "endless"],
)
def test_invalid_data_fails_its_request_only(said: bytes) -> None:
    figures = bench(Script([(0.1, b"data: " + said + b"\n\n"), (0.2, token() + end(1))]))
    assert figures.requests.failures == {"not understood": 1}


def test_control_characters_in_a_servers_message_are_replaced() -> None:
    said = bench(Script([(0.1, b"\x1b[2J\x07boom" + b"x" * 1000)], status=500)).requests.failure_examples["http 500"]
    assert said.startswith("\ufffd[2J\ufffdboom")
    assert len(said) < 400


def test_letters_that_are_split_over_chunks_are_counted_whole() -> None:
    counted: list[str] = []
    parts = [b'{"choices":[{"text":"\\ud83d"}]}', b'{"choices":[{"text":"\\ude00 \\ud83d","finish_reason":"stop"}]}']

    def count(text: str) -> int:
        counted.append(text)
        return 3

    figures = bench(Script([(0.1, b"data: " + part + b"\n\n") for part in parts]))
    assert served(figures.run.records[0], count) is not None
    assert counted == ["\U0001f600 \ufffd"]


@pytest.mark.parametrize(
    ("status", "headers", "detail"),
    [
        (429, {"retry-after": "7"}, "busy (Retry-After: 7)"),
        (307, {"location": "https://other/v1"}, "busy (Location: https://other/v1)"),
        (401, {}, "busy (--api-key sends a key)"),
        (404, {}, "busy (--endpoint chooses the API, --served-model-name the model)"),
        (503, {}, "busy"),
    ],
)
def test_an_error_status_is_quoted(status: int, headers: dict[str, str], detail: str) -> None:
    """A request that is refused, delayed or redirected is a failure; it is not sent again."""
    figures = bench(Script([(0.1, b"busy\n")], status=status, headers=headers))
    assert figures.requests.failure_examples == {f"http {status}": detail}


@pytest.mark.parametrize("owner", ["vllm", "someone", "llmsched"])
def test_usage_is_not_requested_with_no_usage(owner: str) -> None:
    server = FakeServer(lambda number: Script([(0.1, token()), (0.2, token()), (0.2, end())]))
    server.models = {"data": [{"id": "m", "owned_by": owner}]}
    figures = bench_of(server, ask_usage=False)
    assert (figures.requests.completed, figures.tokens.source) == (1, CHUNKS)
    own = {"return_token_ids"} if owner == "llmsched" else set()
    assert server.bodies[0].keys() == {"model", "prompt", "max_tokens", "temperature", "stream", "ignore_eos"} | own


class Endless(httpx.AsyncBaseTransport):
    """Transport whose answers never end."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        class Body(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                while True:
                    await asyncio.sleep(1.0)
                    yield b" "

        return httpx.Response(200, stream=Body())


def test_lookups_without_an_end_are_given_up() -> None:
    async def main() -> float:
        target = HttpTarget(HttpOptions("http://fake", lookup_timeout=10.0), transport=Endless())
        await target.connect()
        assert await target.counts() == EngineCounts()
        await target.close()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.0)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_a_url_may_end_with_parts_of_the_api_path(end: str) -> None:
    assert HttpOptions(f"http://host/deep{end}").root == "http://host/deep"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (b"Unrecognized request argument supplied: ignore_eos", "--stop-at-eos"),
        (b"stream_options: Extra inputs are not permitted", "--no-usage"),
        (b"prompt: data did not match any variant of untagged enum Prompt", "--text-prompts"),
        (b"the model is too busy", None),
    ],
)
def test_a_refused_field_comes_with_the_flag_that_leaves_it_out(said: bytes, hint: str | None) -> None:
    detail = bench(Script([(0.1, said)], status=422)).requests.failure_examples["http 422"]
    assert detail.startswith(said.decode())
    assert (hint in detail) if hint else "--" not in detail


def test_answers_that_end_too_early_have_their_reason() -> None:
    early = Script([(0.1, token()), (0.2, token()), (0.2, end(2))])
    assert "1 of 1 answers are shorter than requested" in bench(early).warnings[0]
    assert not any("fewer tokens" in warning for warning in bench(early, ignore_eos=False).warnings)


_NAMES = ("choices", "delta", "text", "content", "tool_calls", "function", "usage", "completion_tokens", "token_ids")
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False) | st.sampled_from(["", "x", "stop"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"choices": st.lists(_ANYTHING, max_size=2), "usage": _ANYTHING, "id": _ANYTHING}))
def test_no_chunk_stops_the_run(content: dict[str, Any]) -> None:
    """Every JSON object is accepted or fails its request."""
    failures = bench(Script([(0.1, event(content)), (0.2, token() + end(1))])).requests.failures
    assert failures.keys() <= {"error event", "not understood", "ended by abort", "ended by error"}


@given(st.text(alphabet='vl:num_preemtios{}="\\,# \n1+eINa', max_size=60))
def test_no_metrics_stop_the_run(text: str) -> None:
    metrics = ServerMetrics.of(text)
    told = None if metrics is None else metrics.counts().preemptions
    assert told is None or "num_preemptions" in text


def test_the_state_under_each_servers_metric_names() -> None:
    vllm = "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n"
    sglang = "sglang:num_running_reqs 3\nsglang:num_queue_reqs 2\nsglang:token_usage 0.25\n"
    for text in (vllm, sglang):
        metrics = ServerMetrics.of(text)
        assert metrics.sample(1.5) == TargetState(1.5, 3, 2, kv_held=0.25)
    llama_cpp = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\nllamacpp:kv_cache_usage_ratio 0.25\n"
    tgi = "# TYPE tgi_queue_size gauge\ntgi_queue_size 2\ntgi_batch_current_size 3\ntgi_batch_current_max_tokens 9\n"
    for text, held in ((llama_cpp, 0.25), (tgi, None)):
        metrics = ServerMetrics.of(text)
        assert metrics.sample(1.5) == TargetState(1.5, 3, 2, kv_held=held)
        assert metrics.memory() is None
    unknown = ServerMetrics.of("process_cpu_seconds_total 3\nvllm:num_requests_running NaN\n")
    assert unknown.sample(1.5) is None


def test_requests_of_several_engines_add_up_and_shares_do_not() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n}\nvllm:num_requests_waiting{{engine="{n}"}} 1\n'
        f'vllm:kv_cache_usage_perc{{engine="{n}",model_name="a{{\\"b"}} 0.{n}\n'
        for n in (4, 8)
    )
    metrics = ServerMetrics.of(text)
    assert metrics.sample(0.0) == TargetState(0.0, 12, 2, kv_held=pytest.approx(0.6))


def test_metrics_that_are_not_finite_are_ignored() -> None:
    huge = "".join(f'vllm:num_requests_running{{engine="{n}"}} 1e308\n' for n in range(2))
    metrics = ServerMetrics.of(huge + "vllm:num_requests_waiting 0\nvllm:num_preemptions_total 1e999\n")
    assert metrics.sample(0.0) is metrics.counts().preemptions is None


def test_a_restarted_server_has_no_preemption_count() -> None:
    counts = iter([7, 2])
    server = FakeServer(lambda number: Script([(0.1, token() * 3 + end(3))]))
    server.metrics = lambda: f"vllm:num_preemptions_total {next(counts)}\n"
    assert bench_of(server).requests.preemptions is None


def told(metrics: EngineMetrics) -> ServerMetrics:
    """Return what a client reads from an engine's metrics."""
    read = ServerMetrics.of(metrics.render().decode())
    assert read is not None
    return read


@pytest.mark.parametrize("prefix", ["llmsched", "vllm"])
def test_an_llmsched_server_reports_all_of_its_memory(prefix: str) -> None:
    metrics = EngineMetrics("m", 16, 100, prefix=prefix)
    metrics.set("num_requests_running", 3)
    metrics.set("num_requests_waiting", 2)
    metrics.set("kv_cache_usage_perc", 0.5)
    metrics.set("kv_blocks_cached", 25)
    assert told(metrics).sample(1.0) == TargetState(1.0, 3, 2, kv_held=0.5)
    parts = MemoryParts(weights=5000, activations=700, other=30, kv=6400)
    metrics.add_memory(parts, KVUsage(held=800, empty=100, cached=400, total=1600))
    assert told(metrics).memory() == parts
    assert told(metrics).sample(1.0) == TargetState(1.0, 3, 2, kv_held=0.5, kv_empty=0.0625, kv_cached=0.25)


def test_tokens_have_the_time_of_receipt_that_the_transport_reports() -> None:
    """The time does not depend on when the client parses them."""
    parts = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n']
    times = iter([11.0, 12.0])
    last = 0.0

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            nonlocal last
            for part in parts:
                last = next(times)
                await asyncio.sleep(5.0)
                yield part

    async def main() -> RequestRecord:
        record = RequestRecord(0, 10.0)
        response = httpx.Response(200, stream=Body(), extensions={"arrived": lambda: last})
        await read_answer(response, record, asyncio.get_running_loop().time)
        return record

    record = run_virtual(main())
    assert [chunk.time for chunk in record.chunks] == [11.0, 12.0]
    assert record.end == 12.0


@pytest.mark.parametrize(
    ("cached", "prompt", "settings", "warned"),
    [
        (96, 100, {}, True),
        (0, 100, {}, False),
        (3, 100, {}, False),
        (30, 100, {"prefix_len": 40}, False),
        (96, 100, {"prefix_len": 40}, True),
        (60, 160, {}, False),  # 60 tokens of a chat template before each prompt
        (150, 160, {}, True),
    ],
)
def test_hits_that_the_load_does_not_explain_are_a_warning(
    cached: int, prompt: int, settings: dict[str, Any], warned: bool
) -> None:
    server = FakeServer(lambda number: steady(3, first=0.1, gap=0.1, prompt=prompt, cached=cached))
    work = SyntheticLoad(num_prompts=20, input_len=100, output_len=3, **settings)
    found = [warning for warning in bench_of(server, work).warnings if "from its prefix cache" in warning]
    assert len(found) == warned
    if warned and not settings and prompt == 100:
        assert "served 96.0% of prompt tokens from its prefix cache, but the load itself repeats at" in found[0]
