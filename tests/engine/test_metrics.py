"""Metrics: names as in vLLM's dashboards, and what each one counts."""

from __future__ import annotations

import pytest
from engines import tokenizer
from exposition import samples

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.output import OutputStream
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.sampling_params import SamplingParams

HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_params_n",
    "request_params_max_tokens",
    "time_per_output_token_seconds",
    "request_max_num_generation_tokens",
    "iteration_tokens_total",
)
GAUGES = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "num_requests_running", "num_requests_waiting")
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
)


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("demo", block_size=16, num_blocks=100)


def stream(index: int = 0) -> OutputStream:
    """Return the output of a choice that arrived at 1 s, was scheduled at 1.5 s and has 11 tokens, its prompt 7."""
    request = Request("r", [5] * 18, 7, SamplingParams(), 0, frozenset(), arrival_time=1.0, first_scheduled_time=1.5)
    return OutputStream(request, "r", index, tokenizer())


def finish(metrics: EngineMetrics, reason: FinishReason, index: int = 0) -> None:
    stream(index).record_end(metrics, reason, now=3.0)


@pytest.mark.parametrize("prefix", ["llmsched", "vllm"])
def test_names_of_dashboards(prefix: str) -> None:
    found = samples(EngineMetrics("demo", 16, 100, prefix=prefix))
    assert all(f"{prefix}:{name}_count" in found for name in HISTOGRAMS)
    assert all(f"{prefix}:{name}" in found for name in (*GAUGES, *COUNTERS))
    assert all(f"{prefix}:request_success_total{{finished_reason={r.value}}}" in found for r in FinishReason)
    assert found["process_resident_memory_bytes"] > 0


def test_every_sample_names_the_model(metrics: EngineMetrics) -> None:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("llmsched:")]
    assert lines
    assert all('model_name="demo"' in line and 'engine="0"' in line for line in lines)


def test_other_names_report_the_same_values(metrics: EngineMetrics) -> None:
    metrics.set("kv_cache_usage_perc", 0.25)
    for gap in (0.002, 0.02, 7.0):
        metrics.observe("inter_token_latency_seconds", gap)
    found = samples(metrics)
    assert found["llmsched:gpu_cache_usage_perc"] == 0.25
    present = {name: value for name, value in found.items() if "inter_token_latency_seconds" in name}
    assert len(present) > 20
    for name, value in present.items():
        assert found[name.replace("inter_token_latency", "time_per_output_token")] == value


def test_refusals_count_by_reason(metrics: EngineMetrics) -> None:
    assert samples(metrics)["llmsched:requests_refused_total{reason=queue_full}"] == 0
    metrics.refused("queue_full")
    metrics.refused("context_length_exceeded")
    found = samples(metrics)
    assert found["llmsched:requests_refused_total{reason=queue_full}"] == 1
    assert found["llmsched:requests_refused_total{reason=context_length_exceeded}"] == 1


def test_info_has_the_size_of_the_cache(metrics: EngineMetrics) -> None:
    assert samples(metrics)["llmsched:cache_config_info{block_size=16,num_gpu_blocks=100}"] == 1


def test_tokens_are_counted_as_they_come(metrics: EngineMetrics) -> None:
    one = stream()
    for time in (1.25, 1.27, 1.3, 1.33):
        one.record(metrics, time, 1)
    found = samples(metrics)
    assert found["llmsched:generation_tokens_total"] == 4
    assert found["llmsched:inter_token_latency_seconds_count"] == 3
    assert found["llmsched:inter_token_latency_seconds_sum"] == pytest.approx(0.08)
    assert found["llmsched:time_to_first_token_seconds_bucket{le=0.25}"] == 1
    assert found["llmsched:time_to_first_token_seconds_bucket{le=0.15}"] == 0


def test_finished_requests_count_by_reason(metrics: EngineMetrics) -> None:  # the aborted counter
    finish(metrics, FinishReason.STOP)
    finish(metrics, FinishReason.ABORT)
    finish(metrics, FinishReason.ABORT)
    found = samples(metrics)
    assert found["llmsched:request_success_total{finished_reason=stop}"] == 1
    assert found["llmsched:request_success_total{finished_reason=abort}"] == 2
    assert found["llmsched:prompt_tokens_total"] == 21
    assert found["llmsched:e2e_request_latency_seconds_sum"] == 6
    assert found["llmsched:request_generation_tokens_sum"] == 33
    assert found["llmsched:request_params_n_sum"] == 3
    assert found["llmsched:request_params_max_tokens_sum"] == 48


def test_undefined_times_are_not_observed(metrics: EngineMetrics) -> None:
    stream().record_end(metrics, FinishReason.ABORT, now=2.0)
    single = stream()
    single.request.token_ids = [5] * 8
    single.record(metrics, 2.0, 1)
    single.record_end(metrics, FinishReason.STOP, now=2.0)
    found = samples(metrics)
    assert found["llmsched:request_time_per_output_token_seconds_count"] == 0
    assert found["llmsched:request_prefill_time_seconds_count"] == 1
    assert found["llmsched:e2e_request_latency_seconds_count"] == 2


def test_memory_gauges_exist_after_add_memory() -> None:
    metrics = EngineMetrics("demo", 16, 100)
    metrics.kv_usage(KVUsage(held=160, empty=16, cached=320, total=1600))
    assert not any("bytes" in name and name.startswith("llmsched:") for name in samples(metrics))
    metrics.add_memory(MemoryParts(weights=5000, activations=700, other=30, kv=3200), KVUsage(0, 0, 0, 1600))
    assert samples(metrics)["llmsched:kv_cache_used_bytes"] == 0
    metrics.kv_usage(KVUsage(held=160, empty=16, cached=320, total=1600))
    found = samples(metrics)
    assert [found[f"llmsched:memory_{name}_bytes"] for name in ("weights", "activations", "other")] == [5000, 700, 30]
    kv = [found[f"llmsched:kv_cache_{name}bytes"] for name in ("", "used_", "empty_", "cached_")]
    assert kv == [3200, 320, 32, 640]


def test_two_engines_do_not_share_a_registry(metrics: EngineMetrics) -> None:
    other = EngineMetrics("other", 16, 100)
    finish(other, FinishReason.STOP)
    assert samples(metrics)["llmsched:request_success_total{finished_reason=stop}"] == 0


@pytest.mark.parametrize("prefix", ["", "1x", "a b", "a-b", "a:b"])
def test_wrong_prefix(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        EngineMetrics("demo", 16, 100, prefix=prefix)
