"""Prometheus metrics of one engine, under the names that people already have dashboards for.

Times are in seconds, counted from the arrival of a request at the engine. All methods may be called from any thread.
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts
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
        self._kv_bytes: dict[str, Gauge] = {}
        self._bytes_per_token = 0.0
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
        prompt_tokens: int | None,
        output_tokens: int,
    ) -> None:
        """A sequence ended. Times it never came to (no first token, a single token) are None and not counted.

        `prompt_tokens` is None for all choices of a request but one, so that its prompt counts once.
        """
        self._finished[reason].inc()
        if prompt_tokens is not None:
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

    def swapped(self, out: int, back: int) -> None:
        """`out` of the preempted requests had their KV copied to host memory, `back` got it from there."""
        self._swapped_out.inc(out)
        self._swapped_in.inc(back)

    def swap_usage(self, share: float) -> None:
        """Share of the swap space that preempted requests take at present."""
        self._swap_usage.set(share)

    def prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """A prompt was looked up in the prefix cache (recomputation after preemption is not)."""
        self._prefix_queries.inc(queried_tokens)
        self._prefix_hits.inc(hit_tokens)

    def prefix_miss(self, kind: MissKind, count: int) -> None:
        """`count` requests were admitted whose prefix hit ended for this reason; a whole hit is no miss."""
        if kind is not MissKind.HIT:
            self._misses[kind].inc(count)

    def admission(self, headroom: float, max_running: int) -> None:
        """How careful admission is at present."""
        self._headroom.set(headroom)
        self._max_running.set(max_running)

    def step_budget(self, tokens: int) -> None:
        """Tokens that the last step might take."""
        self._step_budget.set(tokens)

    def headroom_changed(self, count: int) -> None:
        """Headroom or concurrency cap changed `count` times."""
        self._headroom_changes.inc(count)

    def changing_prompts(self, count: int, window: int) -> None:
        """Of the last `window` requests, `count` differ at one early token and go on alike."""
        self._changing_prompts.set(count / window)

    def pinned(self, blocks: int) -> None:
        """Blocks that pinned prefixes hold at present."""
        self._pinned_blocks.set(blocks)

    def gauges(self, running: int, waiting: int, used_blocks: int, cached_blocks: int) -> None:
        """The present state."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(used_blocks / self._num_blocks)
        self._cached_blocks.set(cached_blocks)

    def divided(self, parts: MemoryParts, use: KVUsage) -> None:
        """What the engine's memory is divided into, once it has reserved it, and how that for KV is used."""
        for name, size, help_text in (
            ("memory_weights_bytes", parts.weights, "Memory of the weights."),
            ("memory_activations_bytes", parts.activations, "Memory planned for the activations of the largest step."),
            ("memory_other_bytes", parts.other, "Memory planned for the CUDA context and recurrent state."),
            ("kv_cache_bytes", parts.kv, "Memory of all KV blocks."),
        ):
            self._gauge(name, help_text).set(size)
        self._kv_bytes = {
            "held": self._gauge("kv_cache_used_bytes", "KV memory in blocks that requests or pins hold."),
            "empty": self._gauge("kv_cache_empty_bytes", "The part of kv_cache_used_bytes that has no KV in it."),
            "cached": self._gauge("kv_cache_cached_bytes", "KV memory in blocks that only the prefix cache keeps."),
        }
        self._bytes_per_token = parts.kv / max(1, use.total)
        self.kv_use(use)

    def kv_use(self, use: KVUsage) -> None:
        """How KV memory is used at present; no metric before it is told what memory is divided into."""
        for name, gauge in self._kv_bytes.items():
            gauge.set(getattr(use, name) * self._bytes_per_token)

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
        self._swapped_out = counter("num_swapped_out", "Preempted requests whose KV was copied to host memory.")
        self._swapped_in = counter("num_swapped_in", "Preempted requests that got their KV back from host memory.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._headroom_changes = counter("headroom_changes", "Changes of the headroom or the concurrency cap.")
        misses = Counter(
            self._name("prefix_cache_misses"),
            "Requests by the reason why not more of their prompt was found in the prefix cache.",
            ["model_name", "kind"],
            registry=self._registry,
        )
        self._misses = {
            kind: misses.labels(self._model_name, kind.name.lower()) for kind in MissKind if kind is not MissKind.HIT
        }
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("generation_tokens", "Output tokens, counted as they are generated.")
        finished = Counter(
            self._name("request_success"),
            "Requests that ended, by reason; the reason abort counts clients that left.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(self._model_name, reason.value) for reason in FinishReason}

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(self._name(name), help_text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _add_gauges(self, block_size: int) -> None:
        gauge = self._gauge
        self._running = gauge("num_requests_running", "Requests that hold blocks and are being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for admission.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks held by requests; 1 is all.")
        self._swap_usage = gauge("swap_space_usage_perc", "Share of swap_space that preempted requests take; 1 is all.")
        self._headroom = gauge("kv_headroom_perc", "Share of KV blocks that admission keeps free; 1 is all.")
        self._max_running = gauge("max_running_requests", "The concurrency cap: preemptions shrink it.")
        self._step_budget = gauge("step_token_budget", "Tokens that a step may take: fewer where target_itl wants it.")
        self._pinned_blocks = gauge("kv_blocks_pinned", "KV blocks that pinned prefixes hold.")
        self._changing_prompts = gauge(
            "prefix_cache_changing_prompts",
            "Share of the latest requests whose prompts differ at one early token and go on alike, out of the cache's "
            "reach; the log and /v1/cache say where.",
        )
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
