"""OpenTelemetry: spans of requests, their parents, times and attributes, and a collector that gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from scripted import MODEL, ScriptedServer

from llmsched.cli.serve.request_context import DEADLINE_HEADER
from llmsched.cli.serve.tracing import RequestTracer, otlp_tracer
from llmsched.engine.errors import ConfigError

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 6}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def shared_server(exporter: InMemorySpanExporter) -> Iterator[ScriptedServer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = ScriptedServer(observers=[RequestTracer(provider)]).start()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_spans(exporter: InMemorySpanExporter) -> None:
    exporter.clear()


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the spans of the request that has been sent, by name."""
    deadline = time.monotonic() + 20
    while not any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_spans_of_a_chat(http: httpx.Client, exporter: InMemorySpanExporter, stream: bool) -> None:
    before = time.time_ns()
    http.post(CHAT, json=BODY | {"stream": stream, "temperature": 0.5}, headers={"X-Request-Id": "mine"})
    found = spans(exporter)
    after = time.time_ns()
    root, parts = found[f"chat {MODEL}"], [found[name] for name in ("queue", "prefill", "decode")]
    assert len(found) == 4
    assert root.parent is None
    assert all(part.parent.span_id == root.context.span_id for part in parts)
    moments = [root.start_time, *(part.start_time for part in parts), parts[-1].end_time, root.end_time]
    assert moments == sorted(moments)
    assert [part.end_time for part in parts[:-1]] == [part.start_time for part in parts[1:]]
    assert before - 1e7 < root.start_time < root.end_time < after + 1e7
    attributes = dict(root.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == MODEL
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (6, 0.5)
    assert (attributes["gen_ai.usage.output_tokens"], attributes["llmsched.preemptions"]) == (6, 0)
    assert attributes["gen_ai.usage.input_tokens"] > attributes["gen_ai.usage.cache_read.input_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.stream"] is stream
    assert attributes["llmsched.request_id"] == "mine"
    assert 0 < attributes["gen_ai.response.time_to_first_chunk"] < (after - before) / 1e9
    assert root.status.status_code is StatusCode.UNSET
    assert not any("secret" in str(span.to_json()) for span in found.values())


def test_a_trace_continues_that_of_the_client(http: httpx.Client, exporter: InMemorySpanExporter) -> None:
    http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    found = spans(exporter)
    root = found[f"text_completion {MODEL}"]
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert f"{root.parent.span_id:016x}" == PARENT


def test_a_trace_that_is_not_sampled_has_no_spans(http: httpx.Client, exporter: InMemorySpanExporter) -> None:
    http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": "not a trace"})
    assert {f"{span.context.trace_id:032x}" for span in spans(exporter).values()} != {TRACE}
    assert len(exporter.get_finished_spans()) == 4


def test_a_request_that_is_dropped_is_an_error(
    server: ScriptedServer, http: httpx.Client, exporter: InMemorySpanExporter
) -> None:
    server.script.step_s = 0.02
    try:
        assert http.post(CHAT, json=BODY | {"max_tokens": 200}, headers={DEADLINE_HEADER: "150"}).status_code == 504
    finally:
        server.script.step_s = 0.0
    root = spans(exporter)[f"chat {MODEL}"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "deadline"


def test_choices_count(http: httpx.Client, exporter: InMemorySpanExporter) -> None:
    http.post(CHAT, json=BODY | {"n": 3})
    attributes = spans(exporter)[f"chat {MODEL}"].attributes
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 18


class Collector(HTTPServer):
    """OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    collector = Collector()
    tracer = otlp_tracer(f"http://127.0.0.1:{collector.server_port}")
    server = ScriptedServer(observers=[tracer]).start()
    assert httpx.post(server.url + CHAT, json=BODY).status_code == 200
    server.close()
    tracer.close(20)
    collector.shutdown()
    ((path, request),) = collector.got
    (resource,) = request.resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert path == "/v1/traces"
    assert (names["service.name"], names["deployment.environment.name"]) == ("llmsched", "test")
    found = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(found) == sorted(["queue", "prefill", "decode", f"chat {MODEL}"])


def test_a_collector_that_does_not_answer_delays_nothing() -> None:
    tracer = otlp_tracer("http://127.0.0.1:9/v1/traces")
    server = ScriptedServer(observers=[tracer]).start()
    assert httpx.post(server.url + CHAT, json=BODY).status_code == 200
    server.close()
    begun = time.monotonic()
    tracer.close(0.1)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_wrong_endpoints(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as"):
        otlp_tracer(url)


def test_without_the_packages_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmsched\[otel\]'"):
        otlp_tracer("http://localhost:4318")


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    code = (
        "import sys, llmsched.cli.serve.app, llmsched.cli.serve.tracing;"
        "sys.exit([n for n in sys.modules if n.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
