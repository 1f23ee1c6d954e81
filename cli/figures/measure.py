"""Computation of a run's figures from its records. The code reads no clock and does no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmsched.cli.figures.client_lag import ClientLag, client_lag, judge_lag
from llmsched.cli.figures.kv_memory import MemoryUsage, TargetState, memory_usage
from llmsched.cli.figures.latency_distributions import Latencies, ReadingPauses, latencies_of, reading_pauses
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.figures.throughput import Rates, rates_of
from llmsched.cli.figures.token_times import CHUNKS, RETOKENISED, CountTokens, ServedRequest, served, worst_source
from llmsched.cli.load.load import Load
from llmsched.engine.goodput import Goodput, Slo, goodput
from llmsched.engine.percentiles import statistic
from llmsched.engine.request_latency import RequestLatency

#: A prefix hit rate this far above what the load allows is reported. Shares of texts are in bytes, hit rates in tokens.
_EXCESS = 0.05

#: Number of samples that must lie beyond a percentile to make the percentile reliable.
_SAMPLES_BEYOND = 10


@dataclass(frozen=True, slots=True)
class RequestCounts:
    completed: int
    failed: int
    failures: dict[str, int]  # number by reason
    failure_examples: dict[str, str]  # one message per reason
    preemptions: int | None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of the completed requests."""

    input: int | None
    output: int
    source: str | None  # how output tokens were counted
    prefix_hit_rate: float | None  # share of prompt tokens served from the target's cache
    request_p99: float | None = None  # P99 of the tokens of a request, prompt and output together


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of a run. Times are in seconds, rates per second. A figure is None if unknown."""

    requests: RequestCounts
    tokens: TokenCounts
    duration: float  # from the start of the schedule to the end of the last request
    rates: Rates
    latency: Latencies
    client: ClientLag
    goodput: Goodput | None
    reading: ReadingPauses | None
    valid: bool  # False if nothing was served or the client itself was too late
    warnings: tuple[str, ...]
    run: RunRecord
    served: tuple[ServedRequest, ...]

    @property
    def latencies(self) -> list[RequestLatency]:
        return [one.latency for one in self.served]

    @property
    def samples(self) -> list[TargetState]:
        """States of the target, with times in seconds after the start of the run."""
        return [sample._replace(time=sample.time - self.run.start) for sample in self.run.samples]

    @property
    def memory(self) -> MemoryUsage | None:
        return memory_usage(self.run.samples, self.run.memory, self.run.meter)


def measure(run: RunRecord, workload: Load, slo: Slo, count_tokens: CountTokens | None = None) -> Measurement:
    """Compute the figures of a run. `count_tokens` counts a text's tokens if the target does not report them."""
    done = tuple(one for record in run.records if (one := served(record, count_tokens)))
    failed = len(run.records) - len(done)
    duration = run.end - run.start
    connect = [seconds for record in run.records if (seconds := record.connect_time) is not None]
    latency = latencies_of(done, connect, run.start)
    lag = client_lag(run, done)
    # In the target's process, loop lag is part of the target's latency and does not make the run invalid.
    late, doubt = judge_lag(lag if run.own_process else ClientLag(lag.send), latency.ttft, latency.itl, done)
    prompts = [one.record.usage.prompt_tokens for one in done]
    known = [count for count in prompts if count is not None]
    source = worst_source(done)
    warnings = [*([] if doubt is None else [doubt]), *_cache_warnings(run), *_warnings(done, source, latency.itl.count)]
    if run.interrupted:
        told = "requests still running are not counted, and the slowest are among them"
        warnings.insert(0, f"interrupted after {len(run.records)} requests: {told}")
    return Measurement(
        requests=RequestCounts(
            completed=len(done),
            failed=failed,
            failures=dict(Counter(record.failure.reason for record in run.records if record.failure).most_common()),
            failure_examples={r.failure.reason: r.failure.detail for r in reversed(run.records) if r.failure},
            preemptions=run.counts.preemptions,
        ),
        tokens=TokenCounts(
            input=sum(known) if known and len(known) == len(prompts) else None,
            output=sum(arrival.tokens for one in done for arrival in one.arrivals),
            source=source,
            prefix_hit_rate=_hit_rate([one.record for one in done]),
            request_p99=_request_p99(done),
        ),
        duration=duration,
        rates=rates_of(run, done, workload),
        latency=latency,
        client=lag,
        goodput=goodput(slo, [one.latency for one in done], failed=failed, duration=duration),
        reading=reading_pauses(done, failed, slo.reader_speed),
        valid=not late and bool(done),
        warnings=tuple(warnings),
        run=run,
        served=done,
    )


def _request_p99(done: Sequence[ServedRequest]) -> float | None:
    sizes = [
        prompt + sum(arrival.tokens for arrival in one.arrivals)
        for one in done
        if (prompt := one.record.usage.prompt_tokens) is not None
    ]
    return statistic(sizes, "p99")


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    stated = [record.usage for record in records if record.usage.prompt_tokens]
    if all(usage.cached_tokens is None for usage in stated):
        return None
    return sum(usage.cached_tokens or 0 for usage in stated) / sum(usage.prompt_tokens or 0 for usage in stated)


def _cache_warnings(run: RunRecord) -> Iterator[str]:
    """Yield a warning if the target's prefix cache served a larger share of prompt tokens than the load repeats."""
    records = [record for record in run.records if record.usage.prompt_tokens]
    hit_rate = _hit_rate(records) if records and run.repeated_share is not None else None
    if hit_rate is None or run.repeated_share is None:
        return
    prompts = [record.usage.prompt_tokens or 0 for record in records]
    added = max(0, min(tokens - record.prompt_len for tokens, record in zip(prompts, records, strict=True)))
    allowed = run.repeated_share + added * len(prompts) / sum(prompts)
    if hit_rate > allowed + _EXCESS:
        yield (
            f"the target served {hit_rate:.1%} of prompt tokens from its prefix cache, but the load itself repeats at "
            f"most {allowed:.1%}: it held these prompts from earlier requests, so the latencies are not those of new "
            "prompts; empty its cache, or leave out --prompt-seed"
        )


def _warnings(done: Sequence[ServedRequest], source: str | None, gaps: int) -> Iterator[str]:
    if source in (RETOKENISED, CHUNKS):
        yield f"the target reported no token usage; output tokens are estimated ({source})"
    asked = [(one.record.asked_tokens, sum(arrival.tokens for arrival in one.arrivals)) for one in done]
    if short := sum(count is not None and got < count for count, got in asked):
        yield f"{short} of {len(done)} answers are shorter than requested: the load is not as planned"
    for name, count in (("TTFT, TPOT and E2E", len(done)), ("ITL", gaps)):
        beyond = max(1, (count - 1) - math.floor(0.99 * (count - 1)))
        if count and beyond < _SAMPLES_BEYOND:
            yield f"P99 of {name} rests on {beyond} of {count} samples; use 1,000 or more for a reliable P99"
