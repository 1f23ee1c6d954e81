"""From the records of a run to its figures. Pure arithmetic: the clocks were read elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmsched.cli.bench.load import Workload
from llmsched.cli.bench.record import RequestRecord
from llmsched.engine.latency import (
    Arrival,
    Goodput,
    RequestLatency,
    Slo,
    Summary,
    goodput,
    request_latency,
    steady_rate,
    summarise,
)

CountTokens = Callable[[str], int]

#: Where the number of output tokens of a request came from, best first.
EXACT = "exact per chunk"
USAGE = "usage, spread evenly over chunks"
RETOKENISED = "re-tokenised text"
CHUNKS = "one token per chunk assumed"

#: The client is late when the P99 of its lag exceeds both of these.
LAG_LIMIT_S = 0.02
LAG_LIMIT_SHARE = 0.1

#: A steady rate is given if what it is taken from spans at least this share of the run.
STEADY_SHARE = 0.1

#: Samples that must lie beyond a percentile for it to be more than an anecdote.
_SAMPLES_BEYOND = 10


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of a run. Times are in seconds, rates per second; None is what the run cannot tell.

    Token counts and `latencies` are of completed requests. `duration` runs from the start of the schedule to the last
    end. Rates with `_steady` leave out the ramp: they count from the first token (the first completed request) to the
    last, without the first itself.
    """

    completed: int
    failed: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    duration: float
    input_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float | None
    output_tokens_per_s_steady: float | None
    requests_per_s: float | None
    requests_per_s_steady: float | None
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    connect: Summary
    worst_stall: float | None
    prefix_hit_rate: float | None
    preemptions: int | None
    asked_rate: float | None
    achieved_rate: float | None
    client_lag: Summary
    valid: bool
    goodput: Goodput | None
    token_counts: str | None
    warnings: tuple[str, ...]
    latencies: tuple[RequestLatency, ...]


@dataclass(frozen=True, slots=True)
class _Served:
    """A completed request, its tokens placed in time."""

    record: RequestRecord
    arrivals: Sequence[Arrival]
    latency: RequestLatency
    counted_by: str


def measure(
    records: Sequence[RequestRecord],
    workload: Workload,
    slo: Slo,
    *,
    preemptions: int | None = None,
    count_tokens: CountTokens | None = None,
) -> Measurement:
    """Work out the figures. `count_tokens` counts the tokens of a text where the target stated no usage."""
    served = [place for record in records if record.completed and (place := _served(record, count_tokens))]
    failed = len(records) - len(served)
    ends = [record.end for record in records if record.end is not None]
    duration = max(ends) - min(record.scheduled for record in records) if ends else 0.0
    latencies = [one.latency for one in served]
    tokens = [arrival for one in served for arrival in one.arrivals]
    completions = [Arrival(one.record.end, 1) for one in served if one.record.end is not None]
    output_tokens = sum(arrival.tokens for arrival in tokens)
    itl = summarise([gap for latency in latencies for gap in latency.itl])
    ttft = summarise([latency.ttft for latency in latencies])
    lag = summarise([r.sent - r.ready for r in records if r.sent is not None and r.ready is not None])
    sent = [record.sent for record in records if record.sent is not None]
    late = _is_late(lag, ttft)
    failures = Counter(record.failure.reason for record in records if record.failure)
    counted_by = _worst_source(served)
    return Measurement(
        completed=len(served),
        failed=failed,
        failures=dict(failures.most_common()),
        failure_examples={r.failure.reason: r.failure.detail for r in reversed(records) if r.failure},
        duration=duration,
        input_tokens=_total([one.record.usage.prompt_tokens for one in served]),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration if duration > 0 else None,
        output_tokens_per_s_steady=_steady(tokens, duration),
        requests_per_s=len(served) / duration if duration > 0 else None,
        requests_per_s_steady=_steady(completions, duration),
        ttft=ttft,
        itl=itl,
        tpot=summarise([latency.tpot for latency in latencies if latency.tpot is not None]),
        e2e=summarise([latency.e2e for latency in latencies]),
        connect=summarise([r.connected - r.sent for r in records if r.connected is not None and r.sent is not None]),
        worst_stall=max((x.worst_stall for x in latencies if x.worst_stall is not None), default=None),
        prefix_hit_rate=_hit_rate(served),
        preemptions=preemptions,
        asked_rate=workload.request_rate if workload.request_rate and math.isfinite(workload.request_rate) else None,
        achieved_rate=steady_rate([Arrival(time, 1) for time in sent]),
        client_lag=lag,
        valid=not late and bool(served),
        goodput=goodput(slo, latencies, failed=failed, duration=duration),
        token_counts=counted_by,
        warnings=tuple(_warnings(late, lag, counted_by, ttft.count, itl.count)),
        latencies=tuple(latencies),
    )


def arrivals(record: RequestRecord, count_tokens: CountTokens | None) -> tuple[list[Arrival], str]:
    """When the tokens of a request came, and where their number is known from."""
    chunks = record.chunks
    told = sum(chunk.tokens or 0 for chunk in chunks)
    if told and all(chunk.tokens is not None for chunk in chunks if chunk.text):
        return [Arrival(chunk.time, chunk.tokens or 0) for chunk in chunks], EXACT
    times = [chunk.time for chunk in chunks if chunk.text]
    if record.usage.output_tokens:
        return _spread(record.usage.output_tokens, times), USAGE
    if count_tokens is not None:
        return _spread(max(1, count_tokens("".join(chunk.text for chunk in chunks))), times), RETOKENISED
    return _spread(len(times), times), CHUNKS


def _spread(tokens: int, times: Sequence[float]) -> list[Arrival]:
    """Share tokens out over chunks as evenly as whole numbers allow; the first chunk has at least one."""
    if not times:
        return []
    ends = [-(-tokens * (index + 1) // len(times)) for index in range(len(times))]
    return [Arrival(time, after - before) for time, (before, after) in zip(times, pairwise([0, *ends]), strict=True)]


def _served(record: RequestRecord, count_tokens: CountTokens | None) -> _Served | None:
    placed, counted_by = arrivals(record, count_tokens)
    latency = request_latency(record.scheduled, placed)
    return _Served(record, placed, latency, counted_by) if latency else None


def _worst_source(served: Sequence[_Served]) -> str | None:
    used = {one.counted_by for one in served}
    return next((source for source in (CHUNKS, RETOKENISED, USAGE, EXACT) if source in used), None)


def _steady(arrivals: Sequence[Arrival], duration: float) -> float | None:
    """The rate without the ramp, unless all came so close together that it says nothing of the run."""
    times = [arrival.time for arrival in arrivals]
    if not times or max(times) - min(times) < STEADY_SHARE * duration:
        return None
    return steady_rate(arrivals)


def _hit_rate(served: Sequence[_Served]) -> float | None:
    """Prompt tokens served from cache / prompt tokens, over the requests whose target told both."""
    usages = [one.record.usage for one in served]
    told = [(u.cached_tokens, u.prompt_tokens) for u in usages if u.cached_tokens is not None and u.prompt_tokens]
    return sum(cached for cached, _ in told) / sum(prompt for _, prompt in told) if told else None


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _is_late(lag: Summary, ttft: Summary) -> bool:
    return lag.p99 is not None and lag.p99 > max(LAG_LIMIT_S, LAG_LIMIT_SHARE * (ttft.p50 or 0.0))


def _warnings(late: bool, lag: Summary, counted_by: str | None, requests: int, gaps: int) -> list[str]:
    found = []
    if late and lag.p99 is not None:
        found.append(f"the client itself was late (P99 {lag.p99 * 1e3:.1f} ms): these figures are not the target's")
    if counted_by in (RETOKENISED, CHUNKS):
        found.append(f"the target stated no usage; output tokens are a guess ({counted_by})")
    for name, count in (("TTFT, TPOT and E2E", requests), ("ITL", gaps)):
        beyond = (count - 1) - math.floor(0.99 * (count - 1))
        if count and beyond < _SAMPLES_BEYOND:
            found.append(f"P99 of {name} rests on {beyond} of {count} samples; from 1,000 on it can be relied upon")
    return found
