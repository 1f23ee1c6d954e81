"""Prometheus metrics of one engine, with the names that vLLM's dashboards use.

All times are in seconds. A request arrives when it is submitted to the engine. Any thread may call any method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.request import FinishReason
from llmsched.engine.scheduler.ledger import WAITS

M = TypeVar("M", Counter, Gauge, Histogram)

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
_TOKENS = tuple(1 << i for i in range(16))

#: Help text and buckets by name.
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "iteration_tokens_total": ("Tokens computed in one step.", _TOKENS),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Output tokens per request.", _TOKENS),
    "time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Gap between one token and the next.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Per request: (end to end - first token) / (output tokens - 1).",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Arrival to last token.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("Arrival to first scheduled.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("First scheduled to first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("First token to last token.", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("First scheduled to last token.", _REQUEST_SECONDS),
    "request_params_n": ("Choices (n) that a request asks for.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("max_tokens of a request.", _TOKENS),
    "grammar_mask_seconds": ("Time per step to find the tokens that grammars allow.", _TOKEN_SECONDS),
    "grammar_compile_seconds": ("Time to compile a grammar for structured output.", _TOKEN_SECONDS),
}

#: Help text by name; /metrics appends _total to the name.
_COUNTERS: Mapping[str, str] = {
    "num_preemptions": "Preemptions of running requests, whose blocks went to other requests.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "num_swapped_out": "Preempted requests whose KV was copied to host memory.",
    "num_swapped_in": "Preempted requests whose KV was copied back from host memory.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "headroom_changes": "Changes of the headroom or the concurrency limit.",
    "spec_decode_num_drafts": "Drafts of speculative decoding, each checked in one step.",
    "spec_decode_num_draft_tokens": "Tokens of drafts.",
    "spec_decode_num_accepted_tokens": "Tokens of drafts that became output.",
    "late_compilations": "Kernels compiled while requests waited, which the warm-up should have compiled.",
    "prompt_tokens": "Prompt tokens of finished requests.",
    "prompt_tokens_cached": "Prompt tokens of finished requests that came from the prefix cache.",
    "generation_tokens": "Output tokens, counted as they are generated.",
}

#: Help text by name.
_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Requests that hold blocks and are being computed.",
    "num_requests_waiting": "Requests that wait for admission.",
    "kv_cache_usage_perc": "Share of KV blocks held by requests; 1 is all.",
    "swap_space_usage_perc": "Share of swap_space that preempted requests take; 1 is all.",
    "kv_headroom_perc": "Share of KV blocks that admission keeps free; 1 is all.",
    "max_running_requests": "Concurrency limit; preemptions lower it.",
    "step_token_budget": "Token limit of the latest step; it is lowered to keep ITL short (see target_itl).",
    "kv_blocks_pinned": "KV blocks that pinned prefixes hold.",
    "prefix_cache_changing_prompts": (
        "Share of the latest requests whose prompts differ at one early token and are alike after it, which the prefix "
        "cache cannot use; the log and /v1/cache say where."
    ),
    "kv_blocks_cached": "KV blocks that no request holds and that a prefix hit can reuse.",
}

#: Help text by name, of counters with the label key_name.
_KEY_COUNTERS: Mapping[str, str] = {
    "requests": "Requests to the model, by the name of their API key.",
    "rate_limited": "Requests refused because a budget of their API key was used up.",
    "prompt_tokens": "Prompt tokens of accepted requests, by the name of their API key.",
    "generation_tokens": "Output tokens of ended requests, by the name of their API key.",
}

#: Other names of metrics, which dashboards made for vLLM use -> their names here.
_OTHER_NAMES: Mapping[str, str] = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "request_max_num_generation_tokens": "request_generation_tokens",  # of each choice here
}

#: Reasons of refusals that are reported from the start, as 0. They are codes of the API's errors.
_REFUSALS = ("queue_full", "deadline_too_early", "rate_limit_exceeded", "invalid_api_key", "invalid_request")
#: Labels of all metrics. This server has one engine, whose number vLLM's dashboards expect.
_LABELS, _ENGINE = ("model_name", "engine"), "0"


class _OtherNames(Collector):
    """Collector that reports metrics under their other names too."""

    def __init__(self, metrics: Mapping[str, Counter | Gauge | Histogram]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for other, metric in self._metrics.items():
            for family in metric.collect():
                copy = Metric(other, f"{family.documentation} Same as {family.name}.", family.type)
                copy.samples = [
                    sample._replace(name=other + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield copy


class EngineMetrics:
    """Metrics of one engine, in their own registry. Raises ConfigError if `prefix` cannot begin a metric name.

    `counter`, `gauge` and `histogram` are metric names without the prefix: keys of _COUNTERS, _GAUGES and _HISTOGRAMS.
    """

    def __init__(self, model_name: str, block_size: int, num_blocks: int, prefix: str = "llmsched") -> None:
        check_prefix(prefix)
        self._prefix = prefix
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._kv_bytes: dict[str, Gauge] = {}
        self._bytes_per_token = 0.0
        ProcessCollector(registry=self._registry)
        self._histograms = {
            name: self._labelled(Histogram, name, help_text, buckets=buckets)
            for name, (help_text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {name: self._labelled(Counter, name, help_text) for name, help_text in _COUNTERS.items()}
        self._gauges = {name: self._labelled(Gauge, name, help_text) for name, help_text in _GAUGES.items()}
        misses = self._metric(
            Counter,
            "prefix_cache_misses",
            "Requests by the reason why the rest of their prompt was not found in the prefix cache.",
            "kind",
        )
        self._misses = {kind: self._child(misses, kind.name.lower()) for kind in MissKind if kind is not MissKind.HIT}
        finished = self._metric(
            Counter,
            "request_success",
            "Requests that ended, by reason; abort counts requests whose client disconnected.",
            "finished_reason",
        )
        self._finished = {reason: self._child(finished, reason.value) for reason in FinishReason}
        refused = self._metric(Counter, "requests_refused", "Requests that were not accepted, by reason.", "reason")
        self._refused = refused
        for reason in _REFUSALS:
            self._child(refused, reason)
        self._key_counters = {
            name: self._metric(Counter, f"api_key_{name}", help_text, "key_name")
            for name, help_text in _KEY_COUNTERS.items()
        }
        waits = self._metric(
            Counter,
            "request_wait_seconds",
            "Seconds from arrival to first scheduled, summed over requests, by what the first waiting request lacked: "
            "a slot (max_num_seqs), memory, token budget of a step, or a prefix that another request computed.",
            "reason",
        )
        self._waits = {reason: self._child(waits, reason) for reason in WAITS}
        self._accepted = self._metric(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that became output, by their position in the draft.",
            "position",
        )
        info = self._metric(Gauge, "cache_config_info", "Size of the KV cache.", "block_size", "num_gpu_blocks")
        self._child(info, str(block_size), str(num_blocks)).set(1)
        others = {f"{prefix}:{other}": self._families[name] for other, name in _OTHER_NAMES.items()}
        self._registry.register(_OtherNames(others))

    def observe(self, histogram: str, value: float) -> None:
        self._histograms[histogram].observe(value)

    def add(self, counter: str, count: int = 1) -> None:
        self._counters[counter].inc(count)

    def set(self, gauge: str, value: float) -> None:
        self._gauges[gauge].set(value)

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()

    def refused(self, reason: str) -> None:
        """Count a refused request. Each `reason` becomes a time series, so there must be few."""
        self._child(self._refused, reason).inc()

    def key_use(self, counter: str, key_name: str, count: int = 1) -> None:
        """Increase a counter in _KEY_COUNTERS of the API key with this name."""
        self._child(self._key_counters[counter], key_name).inc(count)

    def prefix_miss(self, kind: MissKind, count: int) -> None:
        """Count `count` requests whose prompt was not fully cached for the reason `kind`. Ignore MissKind.HIT."""
        if kind is not MissKind.HIT:
            self._misses[kind].inc(count)

    def accepted(self, position: int, count: int) -> None:
        """Count tokens at this position of a draft (0: the first) that became output."""
        self._child(self._accepted, str(position)).inc(count)

    def waited(self, reason: str, seconds: float) -> None:
        self._waits[reason].inc(seconds)

    def add_memory(self, parts: MemoryParts, usage: KVUsage) -> None:
        """Add the gauges of memory in bytes. Call this once, after the engine has reserved its memory."""
        for name, size, help_text in (
            ("memory_weights_bytes", parts.weights, "Memory of the weights."),
            ("memory_activations_bytes", parts.activations, "Memory planned for the activations of the largest step."),
            (
                "memory_other_bytes",
                parts.other,
                "Memory planned for CUDA's context and graphs, and recurrent state.",
            ),
            ("kv_cache_bytes", parts.kv, "Memory of all KV blocks."),
        ):
            self._labelled(Gauge, name, help_text).set(size)
        self._kv_bytes = {
            field: self._labelled(Gauge, name, help_text)
            for field, name, help_text in (
                ("held", "kv_cache_used_bytes", "KV memory in blocks that requests or pins hold."),
                ("empty", "kv_cache_empty_bytes", "Part of kv_cache_used_bytes that holds no KV yet."),
                ("cached", "kv_cache_cached_bytes", "KV memory in blocks that only the prefix cache keeps."),
            )
        }
        self._bytes_per_token = parts.kv / max(1, usage.total)
        self.kv_usage(usage)

    def kv_usage(self, usage: KVUsage) -> None:
        """Set the gauges of KV memory in bytes. Do nothing if `add_memory(...)` has not been called."""
        for field, gauge in self._kv_bytes.items():
            gauge.set(getattr(usage, field) * self._bytes_per_token)

    def buckets(self, histogram: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound."""
        name = f"{self._prefix}:{histogram}"
        families = self._registry.restricted_registry([f"{name}_bucket"]).collect()
        samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_bucket"]
        return {float(sample.labels["le"]): sample.value for sample in samples}

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, for /metrics."""
        return generate_latest(self._registry)

    def _labelled(self, kind: type[M], name: str, help_text: str, **more: Any) -> M:
        return self._child(self._metric(kind, name, help_text, **more))

    def _metric(self, kind: type[M], name: str, help_text: str, *labels: str, **more: Any) -> M:
        family = kind(f"{self._prefix}:{name}", help_text, [*_LABELS, *labels], registry=self._registry, **more)
        self._families[name] = family
        return family

    def _child(self, family: M, *values: str) -> M:
        return family.labels(self._model_name, _ENGINE, *values)


def check_prefix(prefix: str) -> None:
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise ConfigError("metrics_prefix", f"{prefix!r} is not a metric prefix; letters, digits and _ are allowed")
