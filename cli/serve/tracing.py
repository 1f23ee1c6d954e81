"""OpenTelemetry traces: a span per request to the model, with its queueing, prefill and decoding as children.

Names follow OpenTelemetry's semantic conventions for generative AI; attributes beyond them begin with "llmsched.".
Prompts and answers are not traced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmsched.cli.serve.request_log import EndedRequest
from llmsched.engine.errors import ConfigError
from llmsched.engine.request import FinishReason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_OPERATIONS = {"/v1/completions": "text_completion"}  # the others are chats
#: Most seconds that the process waits at its end for the last spans to be exported.
EXPORT_S = 0.3
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class RequestTracer:
    """Observer that makes the spans of a request once it has ended. `clock` is the engine's clock.

    The span continues the trace in the request's traceparent header, and is not recorded if that header says so.
    """

    def __init__(self, provider: TracerProvider, clock: Callable[[], float] = time.monotonic) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("llmsched", version("llmsched"))
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    def __call__(self, request: EndedRequest) -> None:
        from opentelemetry import trace

        epoch_ns = time.time_ns() - int(1e9 * self._clock())

        def at(seconds: float) -> int:
            return epoch_ns + int(1e9 * seconds)

        attributes = _attributes(request)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {request.model}",
            self._propagator.extract(dict(request.headers)),
            trace.SpanKind.SERVER,
            attributes,
            start_time=at(request.arrival_time),
        )
        if failed := next((each for each in request.choices if each.finish_reason in _FAILURES), None):
            span.set_attribute("error.type", str(failed.finish_reason))
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        begin = request.arrival_time
        ends = (request.first_scheduled_time, request.first_token_time, request.end_time)
        for name, end in zip(("queue", "prefill", "decode"), ends, strict=True):
            until = request.end_time if end is None else end
            self._tracer.start_span(name, inside, start_time=at(begin)).end(at(until))
            if end is None:
                break
            begin = end
        span.end(at(request.end_time))

    def close(self, timeout_s: float) -> None:
        """Export the spans that are left, for at most `timeout_s` seconds."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(timeout_s)


def _attributes(request: EndedRequest) -> dict[str, Any]:
    tokens, times, sampling = request.tokens(), request.times(), request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(request.path, "chat"),
        "gen_ai.provider.name": "llmsched",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": request.streamed,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.answer_id,
        "gen_ai.response.finish_reasons": [str(choice.finish_reason) for choice in request.choices],
        "gen_ai.usage.input_tokens": tokens["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": tokens["cached_tokens"],
        "gen_ai.usage.output_tokens": tokens["output_tokens"],
        "llmsched.request_id": request.request_id,
        "llmsched.preemptions": sum(choice.num_preemptions for choice in request.choices),
    }
    if sampling.n > 1:
        attributes["gen_ai.request.choice.count"] = sampling.n
    if request.key_name is not None:
        attributes["llmsched.api_key_name"] = request.key_name
    for name, attribute in (("ttft", "gen_ai.response.time_to_first_chunk"), ("itl_p99", "llmsched.itl_p99")):
        if (seconds := times[name]) is not None:
            attributes[attribute] = seconds
    return attributes


def otlp_tracer(endpoint: str) -> RequestTracer:
    """Return a tracer that exports spans to an OTLP collector over HTTP.

    `endpoint` is the URL of the collector; without a path, spans go to /v1/traces there. Raises ConfigError for an
    endpoint that is not such a URL, and if OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("otlp_endpoint", f"{endpoint!r} is not a URL such as http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint", "OpenTelemetry is not installed; pip install 'llmsched[otel]'") from error
    named = Resource.create({SERVICE_NAME: "llmsched", SERVICE_VERSION: version("llmsched")})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return RequestTracer(provider)
