"""From the records of a run to its figures. Pure arithmetic: the clocks were read elsewhere."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypedDict

from llmsched.cli.figures.interval import p99_interval
from llmsched.cli.figures.kv_memory import KVMeter, MemoryUsage, TargetState, memory_usage
from llmsched.cli.figures.lag import Lag
from llmsched.cli.figures.lateness import lateness, tokens_per_chunk
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.steady import steady, steady_window
from llmsched.cli.figures.token_times import CHUNKS, RETOKENISED, CountTokens, Served, served, worst_source
from llmsched.cli.load.load import Load
from llmsched.engine.latency import (
    Arrival,
    Goodput,
    RequestLatency,
    Slo,
    Stall,
    Summary,
    goodput,
    reading_waits,
    steady_rate,
    summarise,
    worst_stall,
)
from llmsched.engine.memory.plan import MemoryParts

#: Stalls that are kept, the longest ones, one per request.
WORST_STALLS = 5

#: Samples that must lie beyond a percentile for it to be more than an anecdote.
_SAMPLES_BEYOND = 10


class RequestStall(NamedTuple):
    """The worst stall of a request (its index); its `at` is in seconds after the start of the run."""

    request: int
    stall: Stall


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader at `tokens_per_s` had to wait for (seconds), a sample per late token.

    `late_tokens` is the share of the tokens of served requests that were late, `interrupted` the share of all requests
    in which one was, or that failed.
    """

    tokens_per_s: float
    late_tokens: float
    interrupted: float
    waits: Summary


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of a run. Times are in seconds, rates per second; None is what the run cannot tell.

    Token counts and `latencies` are of completed requests. `duration` runs from the start of the schedule to the last
    end. Rates with `_steady` leave out ramp and drain: they are taken within `steady_window` (seconds after the start)
    or, where that is None, from the first token (completed request) to the end. `asked_rate` is the mean of the shape
    that was asked for, `scheduled_rate` that of the schedule drawn from it (a closed loop has none), `achieved_rate`
    that at which requests left (None where all left at once). `p99_intervals` has the 95 % bootstrap interval of the
    P99 of ttft, itl, tpot and e2e. `loop_lag` is how late the client's event loop came round to what was due,
    `machine_lag` the part of it in which the machine let the client wait; None if nobody looked.

    What the figures were taken from follows: all `records`, with times of a clock that stood at `start` when the run
    began, the `served` ones with their tokens placed, and the target's state over time.
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
    scheduled_rate: float | None
    achieved_rate: float | None
    client_lag: Summary
    valid: bool
    goodput: Goodput | None
    token_counts: str | None
    warnings: tuple[str, ...]
    latencies: tuple[RequestLatency, ...]
    p99_intervals: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    stalls: tuple[RequestStall, ...] = ()
    reading: Reading | None = None
    steady_window: tuple[float, float] | None = None
    loop_lag: Summary | None = None
    machine_lag: Summary | None = None
    start: float = 0.0
    records: tuple[RequestRecord, ...] = ()
    served: tuple[Served, ...] = ()
    samples: tuple[TargetState, ...] = ()
    memory: MemoryParts | None = None
    interrupted: bool = False
    meter: KVMeter | None = None

    @property
    def memory_usage(self) -> MemoryUsage | None:
        """What the work took of the target's memory; None where it does not tell."""
        return memory_usage(self.samples, self.memory, self.meter)


def measure(
    records: Sequence[RequestRecord],
    workload: Load,
    slo: Slo,
    *,
    preemptions: int | None = None,
    count_tokens: CountTokens | None = None,
    loop_lags: Sequence[Lag] | None = None,
    own_process: bool = True,
    samples: Sequence[TargetState] = (),
    memory: MemoryParts | None = None,
    interrupted: bool = False,
    meter: KVMeter | None = None,
) -> Measurement:
    """Work out the figures. `count_tokens` counts the tokens of a text where the target stated no usage.

    `loop_lags` tell how late the client's event loop was. They make a run invalid if the client has a process of its
    own; in the target's they are part of what the target takes. `samples` have times of the records' clock.
    `interrupted`: the user has ended the load, and requests that were under way have no record.
    """
    done = tuple(one for record in records if (one := served(record, count_tokens)))
    failed = len(records) - len(done)
    start = min((record.scheduled for record in records), default=0.0)
    ends = [record.end for record in records if record.end is not None]
    duration = max(ends) - start if ends else 0.0
    latencies = _latencies(done, start)
    lags = lateness([lag for record in records if (lag := record.client_lag) is not None], loop_lags, done)
    judged = lags if own_process else lags.of_sending()
    client = judged.find(latencies["ttft"], latencies["itl"], tokens_per_chunk(done))
    counted_by = worst_source(done)
    paced = workload.asked_rate is not None or workload.max_concurrency is not None
    return Measurement(
        completed=len(done),
        failed=failed,
        **_failures(records),
        **_rates(records, done, start, duration),
        achieved_rate=_sent_rate(records) if paced else None,
        **latencies,
        connect=summarise([time for record in records if (time := record.connect_time) is not None]),
        prefix_hit_rate=_hit_rate(done),
        preemptions=preemptions,
        asked_rate=workload.asked_rate,
        scheduled_rate=None if workload.closed else steady_rate([Arrival(one.scheduled, 1) for one in records]),
        client_lag=lags.sent,
        valid=not client.late and bool(done),
        goodput=goodput(slo, latencies["latencies"], failed=failed, duration=duration),
        token_counts=counted_by,
        warnings=(
            *_interruption(records, interrupted),
            *client.warnings,
            *_warnings(done, counted_by, latencies["itl"].count),
        ),
        reading=_reading(done, failed, slo.reader_speed),
        loop_lag=lags.loop,
        machine_lag=lags.machine,
        start=start,
        records=tuple(records),
        served=done,
        samples=tuple(sample._replace(time=sample.time - start) for sample in samples),
        memory=memory,
        interrupted=interrupted,
        meter=meter,
    )


class _Failures(TypedDict):
    failures: dict[str, int]
    failure_examples: dict[str, str]


def _failures(records: Sequence[RequestRecord]) -> _Failures:
    counts = Counter(record.failure.reason for record in records if record.failure)
    examples = {r.failure.reason: r.failure.detail for r in reversed(records) if r.failure}
    return _Failures(failures=dict(counts.most_common()), failure_examples=examples)


class _Rates(TypedDict):
    duration: float
    input_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float | None
    output_tokens_per_s_steady: float | None
    requests_per_s: float | None
    requests_per_s_steady: float | None
    steady_window: tuple[float, float] | None


def _rates(records: Sequence[RequestRecord], done: Sequence[Served], start: float, duration: float) -> _Rates:
    tokens = [arrival for one in done for arrival in one.arrivals]
    completions = [Arrival(one.record.end, 1) for one in done if one.record.end is not None]
    output_tokens = sum(arrival.tokens for arrival in tokens)
    window, run = steady_window(records, done), (start, start + duration)
    return _Rates(
        duration=duration,
        input_tokens=_total([one.record.usage.prompt_tokens for one in done]),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration if duration > 0 else None,
        output_tokens_per_s_steady=steady(tokens, window, run),
        requests_per_s=len(done) / duration if duration > 0 else None,
        requests_per_s_steady=steady(completions, window, run),
        steady_window=None if window is None else (window[0] - start, window[1] - start),
    )


def _sent_rate(records: Sequence[RequestRecord]) -> float | None:
    return steady_rate([Arrival(record.sent, 1) for record in records if record.sent is not None])


class _Latencies(TypedDict):
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    p99_intervals: dict[str, tuple[float, float] | None]
    worst_stall: float | None
    stalls: tuple[RequestStall, ...]
    latencies: tuple[RequestLatency, ...]


def _latencies(done: Sequence[Served], start: float) -> _Latencies:
    latencies = tuple(one.latency for one in done)
    # Per figure, the samples of each request that has it.
    ttft = [(latency.ttft,) for latency in latencies]
    itl = [latency.itl for latency in latencies if latency.itl]
    tpot = [(latency.tpot,) for latency in latencies if latency.tpot is not None]
    e2e = [(latency.e2e,) for latency in latencies]
    return _Latencies(
        ttft=summarise([*chain.from_iterable(ttft)]),
        itl=summarise([*chain.from_iterable(itl)]),
        tpot=summarise([*chain.from_iterable(tpot)]),
        e2e=summarise([*chain.from_iterable(e2e)]),
        p99_intervals={
            "ttft": p99_interval(ttft),
            "itl": p99_interval(itl),
            "tpot": p99_interval(tpot),
            "e2e": p99_interval(e2e),
        },
        worst_stall=max((one.worst_stall for one in latencies if one.worst_stall is not None), default=None),
        stalls=_worst_stalls(done, start),
        latencies=latencies,
    )


def _worst_stalls(done: Sequence[Served], start: float) -> tuple[RequestStall, ...]:
    worst = heapq.nlargest(WORST_STALLS, done, key=lambda one: one.latency.worst_stall or 0.0)
    found = ((one.record.index, worst_stall(one.arrivals)) for one in worst)
    return tuple(RequestStall(index, stall._replace(at=stall.at - start)) for index, stall in found if stall)


def _reading(done: Sequence[Served], failed: int, tokens_per_s: float) -> Reading | None:
    tokens = sum(arrival.tokens for one in done for arrival in one.arrivals)
    if not tokens:
        return None
    waits = [reading_waits(one.arrivals, tokens_per_s) for one in done]
    return Reading(
        tokens_per_s=tokens_per_s,
        late_tokens=sum(len(one) for one in waits) / tokens,
        interrupted=(sum(bool(one) for one in waits) + failed) / (len(done) + failed),
        waits=summarise([wait for one in waits for wait in one]),
    )


def _hit_rate(done: Sequence[Served]) -> float | None:
    """Prompt tokens served from cache / prompt tokens; None where the target tells neither of any request.

    Of a request that missed, vLLM says nothing where others have their cached tokens: that is none.
    """
    told = [one.record.usage for one in done if one.record.usage.prompt_tokens]
    if all(usage.cached_tokens is None for usage in told):
        return None
    return sum(usage.cached_tokens or 0 for usage in told) / sum(usage.prompt_tokens or 0 for usage in told)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _interruption(records: Sequence[RequestRecord], interrupted: bool) -> list[str]:
    said = "those under way or to come are in no figure, and among those under way are the slowest"
    return [f"interrupted after {len(records)} requests: {said}"] if interrupted else []


def _is_short(one: Served) -> bool:
    asked = one.record.asked_tokens
    return asked is not None and sum(arrival.tokens for arrival in one.arrivals) < asked


def _warnings(done: Sequence[Served], counted_by: str | None, gaps: int) -> list[str]:
    found = []
    if counted_by in (RETOKENISED, CHUNKS):
        found.append(f"the target stated no usage; output tokens are a guess ({counted_by})")
    if short := sum(_is_short(one) for one in done):
        found.append(
            f"{short} of {len(done)} answers have fewer tokens than were asked for: the load is not as planned"
        )
    for name, count in (("TTFT, TPOT and E2E", len(done)), ("ITL", gaps)):
        beyond = max(1, (count - 1) - math.floor(0.99 * (count - 1)))
        if count and beyond < _SAMPLES_BEYOND:
            found.append(f"P99 of {name} rests on {beyond} of {count} samples; from 1,000 on it can be relied upon")
    return found
