from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np

from llmsched.cli.figures.token_times import ServedRequest
from llmsched.engine.percentiles import Summary, summarise
from llmsched.engine.request_latency import RequestLatency, Stall, reading_waits, worst_stall

#: Number of stalls kept: the longest stalls, at most one per request.
WORST_STALLS = 5

_RESAMPLES = 500
_Z95 = 1.96
_SEED = 0
_SHARE = 0.01

#: The P99 of a resample is first searched in the largest samples (this share of all), then, if needed, in all samples.
_TOP = 0.05


@dataclass(frozen=True, slots=True)
class LatencySummary(Summary):
    """Distribution of one latency in seconds."""

    p99_ci95: tuple[float, float] | None = None  # 95 % confidence interval of the P99
    mean_ci95: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latency distributions of the completed requests, in seconds."""

    ttft: LatencySummary
    itl: LatencySummary
    tpot: LatencySummary
    e2e: LatencySummary
    connect: Summary
    worst_stall: float | None
    stalls: tuple[tuple[int, Stall], ...]  # longest stalls, each with the index of its request


@dataclass(frozen=True, slots=True)
class ReadingPauses:
    """Pauses noticed by a reader who reads `tokens_per_s` tokens per second."""

    tokens_per_s: float
    late_tokens: float  # share of tokens for which the reader has to wait
    interrupted: float  # share of requests that had a late token or failed
    waits: Summary  # seconds of each wait


def latencies_of(done: Sequence[ServedRequest], connect: Sequence[float], start: float) -> Latencies:
    """Summarise latencies. `connect` has the seconds to open each connection, `start` is the start of the run."""
    latencies = [one.latency for one in done]
    worst = heapq.nlargest(WORST_STALLS, done, key=lambda one: one.latency.worst_stall or 0.0)
    stalls = ((one.record.index, worst_stall(one.arrivals)) for one in worst)
    summaries = {
        name: LatencySummary(
            **asdict(summarise([*chain.from_iterable(requests)])),
            p99_ci95=p99_interval(requests),
            mean_ci95=mean_interval(requests),
        )
        for name, requests in latency_samples(latencies).items()
    }
    return Latencies(
        **summaries,
        connect=summarise(connect),
        worst_stall=max((one.worst_stall for one in latencies if one.worst_stall is not None), default=None),
        stalls=tuple((index, stall._replace(at=stall.at - start)) for index, stall in stalls if stall),
    )


def latency_samples(latencies: Sequence[RequestLatency]) -> dict[str, list[tuple[float, ...]]]:
    """Return the samples of "ttft", "itl", "tpot" and "e2e" in seconds: for each name, one tuple per request."""
    return {
        "ttft": [(one.ttft,) for one in latencies],
        "itl": [one.itl for one in latencies if one.itl],
        "tpot": [(one.tpot,) for one in latencies if one.tpot is not None],
        "e2e": [(one.e2e,) for one in latencies],
    }


def reading_pauses(done: Sequence[ServedRequest], failed: int, tokens_per_s: float) -> ReadingPauses | None:
    """Compute the pauses that a reader notices. `failed` counts failed requests. Return None if no token arrived."""
    tokens = sum(arrival.tokens for one in done for arrival in one.arrivals)
    if not tokens:
        return None
    waits = [reading_waits(one.arrivals, tokens_per_s) for one in done]
    return ReadingPauses(
        tokens_per_s=tokens_per_s,
        late_tokens=sum(len(one) for one in waits) / tokens,
        interrupted=(sum(bool(one) for one in waits) + failed) / (len(done) + failed),
        waits=summarise([wait for one in waits for wait in one]),
    )


def mean_interval(requests: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, from the samples of each request.

    Requests are the sampling units, as in `p99_interval`; the variance of the ratio of sums is linearised (Cochran,
    Sampling Techniques, section 6.3). Return None for fewer than two requests.
    """
    sums = np.array([sum(samples) for samples in requests if len(samples)])
    sizes = np.array([len(samples) for samples in requests if len(samples)])
    if len(sizes) < 2:
        return None
    mean = sums.sum() / sizes.sum()
    variance = len(sizes) / (len(sizes) - 1) * float(((sums - mean * sizes) ** 2).sum()) / float(sizes.sum()) ** 2
    half = _Z95 * variance**0.5
    return float(mean - half), float(mean + half)


def p99_interval(requests: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap confidence interval of the P99, from the samples of each request.

    Whole requests are resampled, because the gaps within a request are not independent (Davison and Hinkley, Bootstrap
    Methods and their Application, section 3.8). Return None for fewer than two requests. With few requests, the upper
    end is too low.
    """
    sizes = np.array([len(samples) for samples in requests if len(samples)])
    if len(sizes) < 2:
        return None
    values = np.concatenate([np.asarray(samples, dtype=np.float64) for samples in requests if len(samples)])
    order = np.argsort(values)[::-1]
    values, owners = values[order], np.repeat(np.arange(len(sizes)), sizes)[order]
    top = max(1, int(_TOP * len(values)))
    generator = np.random.default_rng(_SEED)
    found = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        drawn = np.bincount(generator.integers(0, len(sizes), len(sizes)), minlength=len(sizes))
        beyond = _SHARE * float(drawn @ sizes)
        reached = np.cumsum(drawn[owners[:top]])
        if reached[-1] <= beyond:
            reached = np.cumsum(drawn[owners])
        found[index] = values[np.searchsorted(reached, beyond, side="right")]
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)
