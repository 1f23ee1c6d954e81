"""Prometheus metrics of one engine, under the names that people already have dashboards for.

Times are in seconds, counted from the arrival of a request at the engine. All methods may be called from any thread.
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from llmsched.engine.errors import ConfigError
from llmsched.engine.request import FinishReason

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
_TOKENS = tuple(1 << i for i in range(16))


class EngineMetrics:
    """What one engine has done and is doing. Each instance has its own registry, so several live side by side.

    Raises ConfigError when `prefix` is no legal beginning of a metric name.
    """

    def __init__(self, model_name: str, block_size: int, num_blocks: int, prefix: str = "llmsched") -> None:
        check_prefix(prefix)
        self._num_blocks = num_blocks
        self._prefix = prefix
        self._model_name = model_name
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._add_histograms()
        self._add_counters()
        self._add_gauges(block_size)

    def step(self, num_tokens: int) -> None:
        """One step that computed `num_tokens` tokens."""
        self._step_tokens.observe(num_tokens)

    def scheduled(self, queue_s: float) -> None:
        """A request left the queue for the first time."""
        self._queue_time.observe(queue_s)

    def first_token(self, ttft_s: float) -> None:
        """The first token of an output."""
        self._generation_tokens.inc()
        self._ttft.observe(ttft_s)

    def token_gap(self, seconds: float, count: int = 1) -> None:
        """`count` further tokens, each `seconds` after the one before."""
        self._generation_tokens.inc(count)
        for _ in range(count):
            self._itl.observe(seconds)

    def finished(
        self,
        reason: FinishReason,
        *,
        e2e_s: float,
        prefill_s: float | None,
        decode_s: float | None,
        tpot_s: float | None,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """A request ended. Times it never came to (no first token, a single token) are None and not counted."""
        self._finished[reason].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(output_tokens)
        self._e2e.observe(e2e_s)
        for histogram, seconds in (
            (self._prefill_time, prefill_s),
            (self._decode_time, decode_s),
            (self._tpot, tpot_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def preempted(self, requests: int, recomputed_tokens: int) -> None:
        """`requests` requests lost their blocks; `recomputed_tokens` were scheduled once more because of it."""
        self._preemptions.inc(requests)
        self._recomputed_tokens.inc(recomputed_tokens)

    def prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """A prompt was looked up in the prefix cache (recomputation after preemption is not)."""
        self._prefix_queries.inc(queried_tokens)
        self._prefix_hits.inc(hit_tokens)

    def gauges(self, running: int, waiting: int, used_blocks: int, cached_blocks: int) -> None:
        """The present state."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(used_blocks / self._num_blocks)
        self._cached_blocks.set(cached_blocks)

    def render(self) -> bytes:
        """The exposition text for /metrics."""
        return generate_latest(self._registry)

    def _add_histograms(self) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(self._name(name), help_text, ["model_name"], registry=self._registry, buckets=buckets)
            return metric.labels(self._model_name)

        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in one step.", _TOKENS)
        self._request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._request_generation_tokens = histogram("request_generation_tokens", "Output tokens per request.", _TOKENS)
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Gap between one token and the next.", _TOKEN_SECONDS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Per request: (end to end - first token) / (output tokens - 1).",
            _TOKEN_SECONDS,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_SECONDS)
        self._queue_time = histogram("request_queue_time_seconds", "Arrival to first scheduled.", _REQUEST_SECONDS)
        self._prefill_time = histogram(
            "request_prefill_time_seconds", "First scheduled to first token.", _REQUEST_SECONDS
        )
        self._decode_time = histogram("request_decode_time_seconds", "First token to last token.", _REQUEST_SECONDS)

    def _add_counters(self) -> None:
        def counter(name: str, help_text: str) -> Counter:
            return Counter(self._name(name), help_text, ["model_name"], registry=self._registry).labels(
                self._model_name
            )

        self._preemptions = counter("num_preemptions", "Requests that lost their blocks to others.")
        self._recomputed_tokens = counter("recomputed_tokens", "Tokens to compute again after preemption.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("generation_tokens", "Output tokens, counted as they are generated.")
        finished = Counter(
            self._name("request_success"),
            "Requests that ended, by reason; the reason abort counts clients that left.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(self._model_name, reason.value) for reason in FinishReason}

    def _add_gauges(self, block_size: int) -> None:
        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(self._name(name), help_text, ["model_name"], registry=self._registry).labels(self._model_name)

        self._running = gauge("num_requests_running", "Requests that hold blocks and are being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for admission.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks held by requests; 1 is all.")
        self._cached_blocks = gauge("kv_blocks_cached", "KV blocks that no request holds and a prefix may hit.")
        Gauge(
            self._name("cache_config_info"),
            "Size of the KV cache.",
            ["model_name", "block_size", "num_gpu_blocks"],
            registry=self._registry,
        ).labels(self._model_name, str(block_size), str(self._num_blocks)).set(1)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def check_prefix(prefix: str) -> None:
    """Raise ConfigError unless metric names may begin with `prefix`."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise ConfigError("metrics_prefix", f"{prefix!r} is not a metric prefix; letters, digits and _ are allowed")
