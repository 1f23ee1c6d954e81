from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.figures.token_times import ServedRequest
from llmsched.cli.load.load import Load
from llmsched.engine.request_latency import Arrival, steady_rate

#: A steady-state rate is computed only if the steady state lasts at least this share of the run.
STEADY_SHARE = 0.1

#: Parts of a run from which the interval of a rate is computed, and the 97.5 % quantile of Student's t for them.
_BATCHES = 10
_T95 = 2.262

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, None if unknown. Steady-state rates exclude ramp-up and ramp-down."""

    output_tokens: float | None
    output_tokens_steady: float | None
    requests: float | None
    requests_steady: float | None
    steady_window: Window | None  # seconds after the start of the run
    asked: float | None  # mean request rate that the load asks for
    scheduled: float | None  # rate at which requests were due; None for a closed loop
    output_tokens_ci95: Window | None  # 95 % confidence interval of output_tokens_steady, else of output_tokens
    achieved: float | None  # rate at which requests were sent; None if all were sent at once


def rates_of(run: RunRecord, done: Sequence[ServedRequest], workload: Load) -> Rates:
    tokens = [arrival for one in done for arrival in one.arrivals]
    completions = [Arrival(one.record.end, 1) for one in done if one.record.end is not None]
    sent = [Arrival(record.sent, 1) for record in run.records if record.sent is not None]
    whole, duration = (run.start, run.end), run.end - run.start
    window = steady_window(run.records, done)
    paced = workload.asked_rate is not None or workload.max_concurrency is not None
    return Rates(
        output_tokens=sum(arrival.tokens for arrival in tokens) / duration if duration > 0 else None,
        output_tokens_steady=_rate_within(tokens, window, whole),
        requests=len(done) / duration if duration > 0 else None,
        requests_steady=_rate_within(completions, window, whole),
        output_tokens_ci95=rate_interval(tokens, window or whole),
        steady_window=None if window is None else (window[0] - run.start, window[1] - run.start),
        asked=workload.asked_rate,
        scheduled=None if workload.closed else steady_rate([Arrival(one.scheduled, 1) for one in run.records]),
        achieved=steady_rate(sent) if paced else None,
    )


def steady_window(records: Sequence[RequestRecord], done: Sequence[ServedRequest]) -> Window | None:
    """Return the start and end of the steady state, on the clock of the records; None if the state is too short.

    The steady state starts one median E2E after the start of the run, when about as many requests end as are sent. It
    ends with the first request that ends after all requests were sent.
    """
    sent = [at for record in records if (at := record.connecting if record.sent is None else record.sent) is not None]
    ends = [record.end for record in records if record.end is not None]
    if not done or not sent:
        return None
    last_sent = max(sent)
    start = min(record.scheduled for record in records)
    level = start + median(one.latency.e2e for one in done)
    drain = min((end for end in ends if end > last_sent), default=max(ends))
    return (level, drain) if drain - level >= STEADY_SHARE * (max(ends) - start) else None


def rate_interval(arrivals: Sequence[Arrival], window: Window) -> Window | None:
    """Return the 95 % confidence interval of the arrivals per second in `window`; None if the window is empty.

    The window is cut into _BATCHES equal parts, whose rates are taken as independent (batch means; Law, Simulation
    Modeling and Analysis, section 9.5.3).
    """
    low, high = window
    width = (high - low) / _BATCHES
    if width <= 0:
        return None
    counts = [0.0] * _BATCHES
    for arrival in arrivals:
        if low <= arrival.time <= high:
            counts[min(_BATCHES - 1, int((arrival.time - low) / width))] += arrival.tokens
    rates = [count / width for count in counts]
    half = _T95 * stdev(rates) / _BATCHES**0.5
    return max(0.0, fmean(rates) - half), fmean(rates) + half


def _rate_within(arrivals: Sequence[Arrival], window: Window | None, whole: Window) -> float | None:
    """Return the arrivals per second in `window` or, if `window` is None or too short, in `whole`."""
    for low, high in (whole,) if window is None else (window, whole):
        # 1e-9 allows for rounding of times that were summed in another order.
        inside = [arrival for arrival in arrivals if low - 1e-9 <= arrival.time <= high + 1e-9]
        if inside and high - min(inside).time >= STEADY_SHARE * (whole[1] - whole[0]):
            return steady_rate(inside, high)
    return None
