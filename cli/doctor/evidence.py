"""Figures that `doctor` judges, from a running server or from a saved run of `bench`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from llmsched.cli.figures.engine_counts import EngineCounts, changing_token
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.cli.targets.server_metrics import ServerMetrics
from llmsched.engine.errors import LlmschedError
from llmsched.engine.recent_stats import quantile

if TYPE_CHECKING:
    import httpx

#: Failure reasons in saved runs that mean that the target refused the request.
_REFUSALS = ("refused", "http 400", "http 413", "http 429")
#: Reasons for which a server refuses requests that would be refused under any load and setting.
_INVALID = ("invalid_request", "invalid_api_key")
#: Reasons of a server for the end of requests that did not end well.
_BADLY = ("abort", "error", "deadline")
#: Metrics whose values are those of one engine: the number of KV blocks and their size, the limit on running requests.
_POOL, _LIMIT = "cache_config_info", "max_running_requests"
#: Number of samples of a server's state, and the seconds between two.
_SAMPLES, _INTERVAL_S = 5, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Figures of one server or run. Times are in seconds. A figure is None if unknown."""

    source: str
    measured: bool = True
    finished: int  # requests that ended well
    failures: Mapping[str, int] = field(default_factory=dict)  # other requests, by reason
    examples: Mapping[str, str] = field(default_factory=dict)  # messages, by reason
    counts: EngineCounts = EngineCounts()
    ttft_mean: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    kv_share: float | None = None  # mean share of KV memory that requests hold
    kv_waste: float | None = None  # share of this memory that holds no KV yet
    kv_tokens: int | None = None  # tokens for which there is KV memory; this and the next two are those of a replica
    running: float | None = None  # mean number of running requests
    max_running: int | None = None  # limit on running requests
    max_model_len: int | None = None
    request_tokens_p99: float | None = None  # prompt and output together
    hit_rate: float | None = None  # share of prompt tokens found in the prefix cache
    changing_share: float | None = None  # of the latest requests, whose prompts change at a token that is not known
    client_lag_p99: float | None = None
    client_was_late: bool | None = None  # the client distorted the latencies

    @property
    def total(self) -> int:
        return self.finished + sum(self.failures.values())

    def mean_wait(self, reason: str) -> float | None:
        """Return the mean seconds that a request waited for `reason` (a key of WAITS) before it was admitted."""
        return self.counts.waited.get(reason, 0.0) / self.finished if self.counts.waited and self.finished else None

    @property
    def preemption_rate(self) -> float | None:
        return (
            self.counts.preemptions / self.finished if self.counts.preemptions is not None and self.finished else None
        )

    @property
    def evicted_share(self) -> float | None:
        """Share of requests whose prompt was cached once, but has been evicted."""
        misses = self.counts.prefix_misses
        return misses.get("evicted", 0) / looked_up if misses and (looked_up := sum(misses.values())) else None

    def share_of(self, *reasons: str) -> float:
        """Return the share of all requests that failed for these reasons."""
        return sum(self.failures.get(reason, 0) for reason in reasons) / self.total if self.total else 0.0


def saved_evidence(report: Mapping[str, Any], source: str) -> Evidence:
    """Return the figures of a saved run. `report` is its JSON report. Raises LlmschedError if the report is damaged."""
    try:
        return _of_report(report, source)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise LlmschedError(
            f"{source}: the report is damaged or of another version of llmsched ({problem!r})"
        ) from None


def _of_report(report: Mapping[str, Any], source: str) -> Evidence:
    def seconds(figure: str, statistic: str) -> float | None:
        value = report[figure][statistic]
        return None if value is None else value / 1e3

    counted, memory = report["engine_counts"], report["memory"] or {}
    engine, scheduler = report["engine"], report["scheduler"] or {}
    failures = dict(report["failures"])
    refused = {reason: failures.pop(reason) for reason in _REFUSALS if reason in failures}
    examples = dict(report["failure_examples"])
    if refused:
        failures["refused"] = sum(refused.values())
        examples["refused"] = examples[next(iter(refused))]
    return Evidence(
        source=source,
        measured=report["measured"],
        finished=report["completed"],
        failures=failures,
        examples=examples,
        counts=EngineCounts(
            report["preemptions"],
            counted["late_compilations"],
            counted["waited"],
            counted["prefix_misses"],
            changing_token(counted),
        ),
        ttft_mean=seconds("ttft_ms", "mean"),
        ttft_p99=seconds("ttft_ms", "p99"),
        itl_p50=seconds("itl_ms", "p50"),
        itl_p99=seconds("itl_ms", "p99"),
        kv_share=memory.get("mean_kv_share"),
        kv_waste=report["kv_waste"],
        kv_tokens=memory.get("kv_tokens"),
        running=scheduler.get("running", {}).get("mean"),
        max_running=engine.get("max_num_seqs"),
        max_model_len=engine.get("max_model_len"),
        request_tokens_p99=report["request_tokens_p99"],
        hit_rate=report["prefix_hit_rate"],
        client_lag_p99=max(seconds(name, "p99") or 0.0 for name in ("client_lag_ms", "loop_lag_ms") if report[name]),
        client_was_late=not report["valid"] and report["completed"] > 0,
    )


def live_evidence(client: httpx.Client, watch: float | None) -> tuple[Evidence, list[Evidence]]:
    """Read the figures of a running server, since its start or, with `watch`, of the next `watch` seconds.

    Return those of the whole server, and those of each replica if it has replicas. Raises LlmschedError if the server
    has no metrics that `doctor` knows.
    """
    looks = [_metrics(client)]
    end = time.monotonic() + (watch or 0.0)
    while len(looks) < _SAMPLES or time.monotonic() < end:
        time.sleep(_INTERVAL_S)
        looks.append(_metrics(client))
    body = _json(client, "/v1/cache")
    cards = (_json(client, "/v1/models") or {}).get("data") or [{}]

    def seen(looks: Sequence[ServerMetrics], source: str, cache: Any) -> Evidence:
        metrics = looks[-1].since(looks[0]) if watch else looks[-1]
        states = [state for look in looks if (state := look.sample(0.0)) is not None]
        return of_metrics(metrics, states, source, cache, cards[0])

    by_replica = [look.by_replica() for look in looks]
    replicas = [
        seen([look[name] for look in by_replica if name in look], f"replica {name}", None) for name in by_replica[-1]
    ]
    return seen(looks, str(client.base_url), body), replicas


def of_metrics(
    metrics: ServerMetrics, states: Sequence[TargetState], source: str, cache: Any = None, card: Any = None
) -> Evidence:
    """Return the figures that a server's metrics contain.

    `cache` is the body of /v1/cache and `card` the entry of the model in /v1/models, if the server has these routes.
    """
    ended = metrics.by_label("request_success_total", "finished_reason") or {}
    failures = {reason: int(ended[reason]) for reason in _BADLY if ended.get(reason)}
    refusals = metrics.by_label("requests_refused_total", "reason") or {}
    refused = {reason: count for reason, count in refusals.items() if count and reason not in _INVALID}
    if refused:
        failures["refused"] = int(sum(refused.values()))
    ttft, lengths = "time_to_first_token_seconds", ("request_prompt_tokens", "request_generation_tokens")
    p99s = [p99 for name in lengths if (p99 := _quantile(metrics, 0.99, name)) is not None]
    itl = ("inter_token_latency_seconds", "time_per_output_token_seconds")
    sum_of, count_of = metrics.total(f"{ttft}_sum"), metrics.total(f"{ttft}_count")
    queried, hits = metrics.total("prefix_cache_queries_total"), metrics.total("prefix_cache_hits_total")
    busy = [state for state in states if state.running]
    held = [state.kv_held for state in busy if state.kv_held is not None]
    waste = [state.kv_empty / state.kv_held for state in busy if state.kv_held and state.kv_empty is not None]
    pools = [[labels.get(name) for name in ("block_size", "num_gpu_blocks")] for labels in metrics.labels(_POOL)]
    sizes = [int(size) * int(blocks) for size, blocks in pools if size and blocks]
    longest, limit = (card or {}).get("max_model_len"), metrics.total(_LIMIT)
    num_engines = len(metrics.labels(_LIMIT)) or 1
    return Evidence(
        source=source,
        finished=int(sum(count for reason, count in ended.items() if reason not in _BADLY)),
        failures=failures,
        examples={"refused": ", ".join(f"{reason} {count:g}" for reason, count in refused.items())} if refused else {},
        counts=replace(metrics.counts(), prompt_change=changing_token(cache)),
        ttft_mean=sum_of / count_of if sum_of is not None and count_of else None,
        ttft_p99=_quantile(metrics, 0.99, ttft),
        itl_p50=_quantile(metrics, 0.5, *itl),
        itl_p99=_quantile(metrics, 0.99, *itl),
        kv_share=fmean(held) if held else None,
        kv_waste=fmean(waste) if waste else None,
        kv_tokens=round(fmean(sizes)) if sizes else None,
        running=fmean(state.running for state in busy) / num_engines if busy else None,
        max_running=None if limit is None else int(limit / num_engines),
        max_model_len=longest if isinstance(longest, int) else None,
        request_tokens_p99=sum(p99s)
        if len(p99s) == len(lengths)
        else None,  # an upper bound: the longest prompt rarely has the longest output
        hit_rate=hits / queried if hits is not None and queried else None,
        changing_share=metrics.total("prefix_cache_changing_prompts") if cache is None else None,
    )


def _quantile(metrics: ServerMetrics, share: float, *names: str) -> float | None:
    buckets = metrics.buckets(*names)
    return None if buckets is None else quantile(buckets, share)


def _metrics(client: httpx.Client) -> ServerMetrics:
    response = client.get("/metrics")
    metrics = ServerMetrics.of(response.text, every=True) if response.status_code == 200 else None
    if metrics is None or metrics.sample(0.0) is None:
        reason = f"status {response.status_code}" if response.status_code != 200 else "no metrics of a model server"
        raise LlmschedError(f"{client.base_url}metrics: {reason}; doctor needs a server's Prometheus metrics")
    return metrics


def _json(client: httpx.Client, path: str) -> Any:
    """Return the body of a route, or None if the server lacks it or refuses it to this client."""
    response = client.get(path)
    return response.json() if response.status_code == 200 else None
