"""Runs of one setting, reduced to what the search needs: small enough to be saved after each run."""

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

#: Most samples of a figure that a run keeps; of more it keeps evenly spaced order statistics.
MAX_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class ThinnedSamples:
    """Distribution of one figure in seconds: sorted values, each of which stands for `each` samples.

    `total` and `most` are the exact sum and maximum of all samples.
    """

    values: tuple[float, ...] = ()
    each: int = 1
    total: float = 0.0
    most: float = 0.0


def thinned(samples: Iterable[float]) -> ThinnedSamples:
    """Keep all samples, or every k-th in order of size if there are more than MAX_SAMPLES."""
    ordered = sorted(samples)
    if not ordered:
        return ThinnedSamples()
    each = -(-len(ordered) // MAX_SAMPLES)
    kept = ordered[each // 2 :: each]
    return ThinnedSamples(tuple(round(value, 7) for value in kept), each, sum(ordered), ordered[-1])


def pooled(parts: Sequence[ThinnedSamples]) -> Summary:
    """Summarise the samples of several runs together."""
    summary = summarise(_expanded(parts))
    if not summary.count:
        return summary
    mean, most = sum(part.total for part in parts) / summary.count, max(part.most for part in parts)
    return replace(summary, mean=mean, max=most)


def pooled_statistic(parts: Sequence[ThinnedSamples], name: str) -> float | None:
    """Return one statistic (see `latency.statistic`) of several runs together; None without a sample."""
    if name in ("mean", "max"):
        found: float | None = getattr(pooled(parts), name)
        return found
    return statistic(_expanded(parts), name)


def _expanded(parts: Sequence[ThinnedSamples]) -> list[float]:
    return [value for part in parts for value in part.values for _ in range(part.each)]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One run of a setting: the first `requests` of the load in round `round_index`, which took `seconds`.

    `tokens_per_s` is the rate of output tokens, ramp-up excluded. `met` counts the requests that met each SLO, and
    "all" of them; it is empty without an SLO. `problem` says why the setting does not work; None if it does.
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
        """Output tokens per second; None if the setting does not work."""
        return None if self.problem else self.tokens_per_s

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that met every SLO, ramp-up excluded; None without an SLO or a rate."""
        if "all" not in self.met or self.tokens_per_s is None or not self.output_tokens:
            return None
        return self.tokens_per_s * self.met["all"] / self.output_tokens


def run_of(
    setting: Setting,
    round_index: int,
    requests: int,
    measured: Measurement,
    peak_running: int = 0,
    seconds: float = 0.0,
) -> TrialRun:
    """Reduce a measurement of the first `requests` of a load to a run.

    A load with a duration may have sent fewer. `peak_running` is the largest number of requests in one step.
    """
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
        demand=_peak_demand(measured, peak_running),
        problem=_problem(measured, total),
    )


def _samples(latencies: Sequence[RequestLatency], name: str) -> list[float]:
    if name == "itl":
        return [gap for latency in latencies for gap in latency.itl]
    return [value for latency in latencies if (value := getattr(latency, name)) is not None]


def _peak_demand(measured: Measurement, peak_running: int) -> PeakDemand | None:
    """Return the peak demand; None if the target does not report its KV memory."""
    if (memory := measured.memory) is None:
        return None
    return PeakDemand(peak_running, memory.peak_kv_share, bool(measured.run.preemptions))


def _problem(measured: Measurement, total: int) -> str | None:
    requests = measured.requests
    if requests.failed:
        reason = next(iter(requests.failures), "no token came")
        detail = requests.failure_examples.get(reason, "")
        return f"{requests.failed} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}"
    return None if measured.tokens.output else "no request had any output"


def failed_run(setting: Setting, round_index: int, requests: int, problem: Exception) -> TrialRun:
    """Make the run of a setting that raised an exception."""
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())
    return TrialRun(setting, round_index, requests, problem=reason)


def refused_run(setting: Setting, problem: Exception) -> TrialRun:
    """Make the run of a setting for which no engine could be built."""
    return TrialRun(setting, 0, 0, problem=f"does not fit: {' '.join(str(problem).split())}")


def to_json(run: TrialRun) -> dict[str, Any]:
    """Convert a run to what JSON can hold."""
    return asdict(run)


def from_json(content: Mapping[str, Any]) -> TrialRun:
    """Restore a run from `to_json`. Raises ValueError if the content is not a run."""
    return _run_type().validate_python(content)


@cache
def _run_type() -> TypeAdapter[TrialRun]:
    from pydantic import TypeAdapter

    return TypeAdapter(TrialRun)
