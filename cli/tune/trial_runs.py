"""Runs of settings, reduced to the figures that a search needs, so that a journal can store them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from llmsched.cli.figures.measure import Measurement
from llmsched.cli.tune.knobs import PeakDemand, Setting
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.engine.percentiles import statistic

#: Rate that a search maximises: requests per second that met every SLO, or output tokens per second.
Goal = Literal["goodput", "throughput"]

FIGURES = ("ttft", "itl", "tpot", "e2e")

#: A run keeps at most this many samples of a latency. From more samples it keeps evenly spaced order statistics.
MAX_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class ThinnedSamples:
    """Distribution of one kind of latency, such as TTFT, in seconds."""

    values: tuple[float, ...] = ()  # sorted; each stands for `each` samples
    each: int = 1
    total: float = 0.0  # exact sum of all samples
    most: float = 0.0  # exact maximum of all samples


def thinned(samples: Iterable[float]) -> ThinnedSamples:
    """Return the sorted samples or, if there are too many, every k-th sample, so that at most MAX_SAMPLES are left."""
    ordered = sorted(samples)
    if not ordered:
        return ThinnedSamples()
    each = -(-len(ordered) // MAX_SAMPLES)
    kept = ordered[each // 2 :: each]
    return ThinnedSamples(tuple(round(value, 7) for value in kept), each, sum(ordered), ordered[-1])


def pooled(parts: Sequence[ThinnedSamples], name: str) -> float | None:
    """Return a statistic, such as "p99" or "mean", of the samples of several runs together; None without samples."""
    values = [value for part in parts for value in part.values for _ in range(part.each)]
    if values and name == "max":
        return max(part.most for part in parts)
    if values and name == "mean":
        return sum(part.total for part in parts) / len(values)
    return statistic(values, name)


@dataclass(frozen=True, slots=True)
class TrialRun:
    """Run of one setting: the first `requests` requests of the load in round `round_index`."""

    setting: Setting
    round_index: int
    requests: int
    seconds: float = 0.0  # duration of the run
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None  # output tokens, without the ramp-up
    met: Mapping[str, int] = field(default_factory=dict)  # requests that met each SLO, by its name, and "all"
    samples: Mapping[str, ThinnedSamples] = field(default_factory=dict)  # by name in FIGURES
    demand: PeakDemand | None = None
    problem: str | None = None  # why the setting does not work
    others_cpu: float = 0.0  # share of this machine's CPU time that other processes used

    @property
    def requests_per_s(self) -> float | None:
        if self.tokens_per_s is None or not self.output_tokens:
            return None
        return self.tokens_per_s * self.completed / self.output_tokens

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that met every SLO; None if there is no SLO or no known rate."""
        if "all" not in self.met or self.tokens_per_s is None or not self.output_tokens:
            return None
        return self.tokens_per_s * self.met["all"] / self.output_tokens

    def rate(self, goal: Goal) -> float | None:
        """Return the rate that `goal` names; None if it is unknown or the setting does not work."""
        return None if self.problem else self.goodput_rps if goal == "goodput" else self.tokens_per_s


#: Runs that a cost model predicts, by setting.
Predictions = Mapping[Setting, TrialRun]


class TrialRunner(Protocol):
    """Runner that serves a load with a given setting. `rate` is in requests per second (None: the load's own rate)."""

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        """Serve the first `requests` requests of a round. Raises OutOfTimeError if the time limit ends the run.

        Any other exception means that the setting does not work.
        """
        ...

    def predict(self, settings: Sequence[Setting], requests: int, rate: float | None = None) -> Predictions:
        """Return the runs that a cost model predicts for the settings; empty if there is no model."""
        return {}


def run_of(
    setting: Setting,
    round_index: int,
    requests: int,
    measured: Measurement,
    peak_running: int = 0,
    seconds: float = 0.0,
) -> TrialRun:
    """Return the run of a setting, with the figures of a measurement of at most `requests` requests."""
    counts, memory, steady = measured.requests, measured.memory, measured.rates.output_tokens_steady
    total = counts.completed + counts.failed
    attainment = measured.goodput.attainment if measured.goodput else {}
    problem = None if measured.tokens.output else "no request had any output"
    if counts.failed:
        reason = next(iter(counts.failures), "no token came")
        detail = counts.failure_examples.get(reason, "")
        problem = f"{counts.failed} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}"
    demand = None
    if memory is not None:
        demand = PeakDemand(peak_running, memory.peak_kv_share, bool(measured.run.counts.preemptions))
    samples = {name: [getattr(latency, name) for latency in measured.latencies] for name in FIGURES}
    samples["itl"] = [gap for gaps in samples["itl"] for gap in gaps]
    samples["tpot"] = [value for value in samples["tpot"] if value is not None]
    return TrialRun(
        setting,
        round_index,
        requests,
        seconds=seconds,
        completed=counts.completed,
        failed=counts.failed,
        output_tokens=measured.tokens.output,
        tokens_per_s=measured.rates.output_tokens if steady is None else steady,
        met={name: round(share * total) for name, share in attainment.items()},
        samples={name: thinned(values) for name, values in samples.items()},
        demand=demand,
        problem=problem,
    )


def failed_run(setting: Setting, round_index: int, requests: int, problem: Exception) -> TrialRun:
    reason = " ".join(f"{type(problem).__name__}: {problem}".split())
    return TrialRun(setting, round_index, requests, problem=reason)


async def attempt(
    runner: TrialRunner, setting: Setting, requests: int, round_index: int, rate: float | None = None
) -> TrialRun:
    """Run a setting. If the runner raises an exception other than OutOfTimeError, return a failed run instead."""
    try:
        return await runner.run(setting, requests, round_index, rate)
    except OutOfTimeError:
        raise
    except Exception as problem:
        return failed_run(setting, round_index, requests, problem)
