from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmsched.cli.workload.request_sample import RequestSample
from llmsched.cli.workload.shared_prefixes import SharedPrefixes, shared_prefixes
from llmsched.engine.config import EngineConfig

#: Length in seconds of the windows among which the busiest is found.
PEAK_WINDOW_S = 10.0

#: The recommended max_model_len is a multiple of this many tokens.
_ROUND = 256

#: Lowest hit rate for which prefix caching is recommended.
_WORTH = 0.01

#: Numbers of running requests for which the headroom is computed. The middle one is recommended.
RUNNING = (16, 64, 256)

#: The 99th percentile of the standard normal distribution.
_Z99 = 2.326


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """Statistics of lengths in tokens."""

    mean: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: int
    tail: float  # P99 divided by the mean


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    duration_s: float
    rate: float | None  # requests per second; None if all arrive at the same time
    gap_cv: float | None  # coefficient of variation of the gaps; 1 for Poisson arrivals
    peak_over_mean: float | None  # rate in the busiest 10 s, divided by the mean rate


@dataclass(frozen=True, slots=True)
class Advice:
    max_model_len: int  # fits every request
    refused_by_half: float  # share of requests that half of max_model_len would refuse
    headroom_by_running: dict[int, float] | None  # share of blocks to keep free, by number of running requests
    prefix_caching: bool | None  # None if the prompts are unknown


@dataclass(frozen=True, slots=True)
class LoadAnalysis:
    """Analysis of a load. A figure is None if the load lacks the data for it."""

    sample: RequestSample
    block_size: int
    input: LengthFigures | None
    output: LengthFigures | None
    total: LengthFigures | None
    arrivals: ArrivalFigures | None
    prefixes: SharedPrefixes | None
    advice: Advice


def analyse(sample: RequestSample, block_size: int) -> LoadAnalysis:
    """Analyse a load. The hit rate assumes a prefix cache with blocks of `block_size` tokens."""
    pairs = list(zip(sample.inputs, sample.outputs, strict=True))
    prefixes = shared_prefixes(sample, block_size)
    return LoadAnalysis(
        sample=sample,
        block_size=block_size,
        input=length_figures(sample.inputs),
        output=length_figures([answer for _, answer in pairs if answer is not None]),
        total=length_figures([prompt + answer for prompt, answer in pairs if answer is not None]),
        arrivals=None if sample.offsets is None else arrival_figures(sample.offsets),
        prefixes=prefixes,
        advice=advise(sample, prefixes),
    )


def length_figures(lengths: Sequence[int]) -> LengthFigures | None:
    if not any(lengths):
        return None
    values = np.asarray(lengths)
    p50, p75, p90, p95, p99 = np.percentile(values, (50, 75, 90, 95, 99)).tolist()
    mean = float(values.mean())
    return LengthFigures(mean, p50, p75, p90, p95, p99, int(values.max()), p99 / mean)


def arrival_figures(offsets: Sequence[float]) -> ArrivalFigures:
    """Return the statistics of arrivals at the times `offsets`, in seconds and ascending."""
    times = np.asarray(offsets, dtype=np.float64)
    span = float(times[-1] - times[0])
    if span <= 0:
        return ArrivalFigures(0.0, None, None, None)
    gaps, rate = np.diff(times), (len(times) - 1) / span
    peak = None
    if span >= PEAK_WINDOW_S:
        ends = np.searchsorted(times, times + PEAK_WINDOW_S, side="left")
        peak = float((ends - np.arange(len(times))).max()) / (rate * PEAK_WINDOW_S)
    return ArrivalFigures(span, rate, float(gaps.std() / gaps.mean()), peak)


def advise(sample: RequestSample, prefixes: SharedPrefixes | None) -> Advice:
    """Return recommended settings for a load. If a request's answer length is unknown, only its prompt counts."""
    pairs = list(zip(sample.inputs, sample.outputs, strict=True))
    totals = [prompt + (answer or 0) for prompt, answer in pairs]
    longest = max(1, math.ceil(max(totals) / _ROUND)) * _ROUND
    known = [(prompt, answer) for prompt, answer in pairs if answer]
    return Advice(
        max_model_len=longest,
        refused_by_half=sum(total > longest // 2 for total in totals) / len(totals),
        headroom_by_running={running: headroom(known, running) for running in RUNNING} if known else None,
        prefix_caching=None if prefixes is None else prefixes.hit_rate >= _WORTH,
    )


def serve_knobs(found: LoadAnalysis) -> dict[str, Any]:
    """Return the recommended engine settings that differ from their defaults."""
    advice, defaults = found.advice, asdict(EngineConfig())
    knobs: dict[str, Any] = {} if found.sample.in_words else {"max_model_len": advice.max_model_len}
    if advice.headroom_by_running is not None:
        most = EngineConfig.knob_rule("headroom")["high"]
        knobs["headroom"] = min(most, round(advice.headroom_by_running[RUNNING[1]], 3))
        knobs["max_headroom"] = max(knobs["headroom"], defaults["max_headroom"])
    knobs |= {"block_size": found.block_size, "enable_prefix_caching": advice.prefix_caching is not False}
    return {name: value for name, value in knobs.items() if value != defaults[name]}


def headroom(lengths: Sequence[tuple[int, int]], running: int) -> float:
    """Return the share of KV blocks to keep free so that `running` requests can grow, given (prompt, output) lengths.

    The scheduler admits requests as if their outputs had mean length. In 1 % of cases, the outputs of n = `running`
    requests exceed n times this mean by z sigma sqrt(n) tokens or more (normal approximation; z = 2.326, sigma is the
    standard deviation of output lengths). The result is this excess divided by the sum of the excess and the tokens
    that the requests hold. tests/bench/bench_headroom.py compares the formula with simulated runs.
    """
    outputs = np.asarray(lengths, dtype=np.float64).T[1]
    excess = _Z99 * float(outputs.std()) / (math.sqrt(running) * held(lengths))
    return excess / (1 + excess)


def held(lengths: Sequence[tuple[int, int]]) -> float:
    """Return the mean number of tokens that a running request holds, given (prompt, output) lengths.

    A request with p prompt and o output tokens holds p + o / 2 tokens on average and runs for o steps, so it counts o
    times in the mean.
    """
    prompts, outputs = np.asarray(lengths, dtype=np.float64).T
    return float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
