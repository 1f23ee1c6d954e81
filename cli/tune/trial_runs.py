"""What is kept of a run of one setting, small enough to be written down after each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from llmsched.cli.figures.measure import Measurement
from llmsched.cli.tune.knobs import PeakDemand, Setting
from llmsched.engine.latency import RequestLatency, Summary, statistic, summarise

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FIGURES = ("ttft", "itl", "tpot", "e2e")

#: ThinnedSamples of a figure that a run keeps: of more, evenly spaced order statistics.
MAX_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class ThinnedSamples:
    """The distribution of one figure in seconds: sorted values, each of which stands for `each` samples."""

    values: tuple[float, ...] = ()
    each: int = 1
    total: float = 0.0
    most: float = 0.0


def thinned(samples: Iterable[float]) -> ThinnedSamples:
    """ThinnedSamples to keep: all, or every k-th of them in order of size."""
    ordered = sorted(samples)
    if not ordered:
        return ThinnedSamples()
    each = -(-len(ordered) // MAX_SAMPLES)
    kept = ordered[each // 2 :: each]
    return ThinnedSamples(tuple(round(value, 7) for value in kept), each, sum(ordered), ordered[-1])


def pooled(parts: Sequence[ThinnedSamples]) -> Summary:
    """The distribution of all runs together."""
    summary = summarise(_all(parts))
    if not summary.count:
        return summary
    mean, most = sum(part.total for part in parts) / summary.count, max(part.most for part in parts)
    return replace(summary, mean=mean, max=most)


def percentile(parts: Sequence[ThinnedSamples], name: str) -> float | None:
    """One statistic (see `latency.statistic`) of all runs together; None without a sample."""
    if name == "max":
        return pooled(parts).max
    return pooled(parts).mean if name == "mean" else statistic(_all(parts), name)


def _all(parts: Sequence[ThinnedSamples]) -> list[float]:
    return [value for part in parts for value in part.values for _ in range(part.each)]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of a setting: `requests` of the load in round `round_index`, which took `seconds`.

    `tokens_per_s` is the rate of output tokens without the ramp. `met` counts the requests that met each SLO, and
    "all" of them; it is empty where there is none. `problem` says why the setting does not work, if it does not.
    """

    setting: Setting
    round_index: int
    requests: int
    seconds: float = 0.0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None
    met: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, ThinnedSamples] = field(default_factory=dict)
    demand: PeakDemand | None = None
    problem: str | None = None

    @property
    def throughput(self) -> float | None:
        """Output tokens per second of a run that worked."""
        return None if self.problem else self.tokens_per_s

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that met every SLO, at the rate without the ramp; None without an SLO or a rate."""
        if "all" not in self.met or self.tokens_per_s is None or not self.output_tokens:
            return None
        return self.tokens_per_s * self.met["all"] / self.output_tokens


def run_of(
    setting: Setting,
    round_index: int,
    requests: int,
    measured: Measurement,
    *,
    demand: PeakDemand | None = None,
    seconds: float = 0.0,
) -> TrialRun:
    """What is kept of a measurement of `requests` of the load (of a load that a duration ends, fewer were sent)."""
    total = measured.requests.completed + measured.requests.failed
    attainment = measured.goodput.attainment if measured.goodput else {}
    steady = measured.rates.output_tokens_steady
    return TrialRun(
        setting,
        round_index,
        requests,
        seconds=seconds,
        completed=measured.requests.completed,
        failed=measured.requests.failed,
        output_tokens=measured.tokens.output,
        tokens_per_s=measured.rates.output_tokens if steady is None else steady,
        met={name: round(share * total) for name, share in attainment.items()},
        samples={name: thinned(_samples(measured.latencies, name)) for name in FIGURES},
        demand=demand,
        problem=_problem(measured, total),
    )


def failed_run(setting: Setting, round_index: int, requests: int, problem: Exception) -> TrialRun:
    """A run that gave no figures."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())
    return TrialRun(setting, round_index, requests, problem=reason)


def refused_run(setting: Setting, problem: Exception) -> TrialRun:
    """A setting that was never run, since no engine can be built for it."""
    return TrialRun(setting, 0, 0, problem=f"does not fit: {' '.join(str(problem).split())}")


def to_json(run: TrialRun) -> dict[str, Any]:
    """A run as JSON can hold it."""
    return asdict(run)


def from_json(content: Mapping[str, Any]) -> TrialRun:
    """The run of `to_json`. Raises ValueError for what is none."""
    return _run_type().validate_python(content)


@cache
def _run_type() -> TypeAdapter[TrialRun]:
    from pydantic import TypeAdapter

    return TypeAdapter(TrialRun)


def _samples(latencies: Sequence[RequestLatency], name: str) -> list[float]:
    if name == "itl":
        return [gap for latency in latencies for gap in latency.itl]
    return [value for latency in latencies if (value := getattr(latency, name)) is not None]


def _problem(measured: Measurement, total: int) -> str | None:
    if measured.requests.failed:
        reason = next(iter(measured.requests.failures), "no token came")
        detail = measured.requests.failure_examples.get(reason, "")
        return f"{measured.requests.failed} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}"
    return None if measured.tokens.output else "no request had any output"
