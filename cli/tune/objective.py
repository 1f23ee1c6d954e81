"""Which setting is best: the most throughput among those that meet the SLOs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from llmsched.cli.bench.measure import Measurement
from llmsched.engine.latency import Slo, Summary, summarise

#: Throughputs closer than this share are equal; how far repeats of one setting lie apart may raise it to the second.
NOISE_FLOOR = 0.03
NOISE_CEILING = 0.10


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the search."""

    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting gave, all its rounds together. Times are in seconds, None without a sample.

    `output_tokens_per_s` is the mean over rounds of the rate from the first token to the last, `spread` how far the
    rounds lie from it, as a share. `reason` says why the setting is not feasible.
    """

    setting: Setting
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    output_tokens_per_s: float | None
    spread: float
    completed: int
    failed: int
    rounds: int
    reason: str | None

    @property
    def feasible(self) -> bool:
        return self.reason is None


def failed_trial(setting: Setting, reason: str) -> Trial:
    """A setting that gave no figures."""
    nothing = summarise([])
    return Trial(setting, nothing, nothing, nothing, nothing, None, 0.0, 0, 0, 0, reason)


def judge(setting: Setting, rounds: Sequence[Measurement], slo: Slo) -> Trial:
    """One trial from the rounds of a setting. Errors, empty outputs and a missed SLO make it infeasible."""
    latencies = [latency for measured in rounds for latency in measured.latencies]
    rates = [rate for measured in rounds if (rate := _throughput(measured)) is not None]
    mean = sum(rates) / len(rates) if rates else None
    trial = Trial(
        setting=setting,
        ttft=summarise([latency.ttft for latency in latencies]),
        itl=summarise([gap for latency in latencies for gap in latency.itl]),
        tpot=summarise([latency.tpot for latency in latencies if latency.tpot is not None]),
        e2e=summarise([latency.e2e for latency in latencies]),
        output_tokens_per_s=mean,
        spread=(max(rates) - min(rates)) / 2 / mean if mean else 0.0,
        completed=sum(measured.completed for measured in rounds),
        failed=sum(measured.failed for measured in rounds),
        rounds=len(rounds),
        reason=None,
    )
    reason = _failures(rounds) or _missed(trial, slo)
    return trial if reason is None else _with_reason(trial, reason)


def noise_of(trials: Sequence[Trial]) -> float:
    """The share by which two throughputs must differ to be told apart: the median spread, within bounds."""
    spreads = sorted(trial.spread for trial in trials if trial.output_tokens_per_s)
    typical = spreads[len(spreads) // 2] if spreads else 0.0
    return min(max(typical, NOISE_FLOOR), NOISE_CEILING)


def choose(trials: Sequence[Trial]) -> Trial | None:
    """The feasible trial with the most throughput; of those equal within noise the first. None if none is feasible."""
    good = [trial for trial in trials if trial.feasible]
    if not good:
        return None
    enough = (1 - noise_of(good)) * max(trial.output_tokens_per_s or 0.0 for trial in good)
    return next(trial for trial in good if (trial.output_tokens_per_s or 0.0) >= enough)


def explain(trials: Sequence[Trial], slo: Slo) -> str:
    """The choice in a sentence."""
    best = choose(trials)
    if best is None:
        return f"none of the {len(trials)} values tried is feasible; relax the SLOs or lower the load"
    good = [trial for trial in trials if trial.feasible]
    met = "meet the SLOs" if slo.given() else "work (no SLO was given)"
    fastest = max(good, key=lambda trial: trial.output_tokens_per_s or 0.0)
    chosen = f"max_num_batched_tokens {best.setting.max_num_batched_tokens}: {_rate(best)}"
    among = f"the {len(good)} of {len(trials)} values that {met}"
    if fastest is best:
        return f"{chosen} is the most of {among}"
    return (
        f"{chosen} is the smallest value within the noise ({noise_of(good):.0%}) of the most of {among}, "
        f"{_rate(fastest)} with {fastest.setting.max_num_batched_tokens}"
    )


def _rate(trial: Trial) -> str:
    return f"{trial.output_tokens_per_s or 0.0:.1f} tokens/s"


def _throughput(measured: Measurement) -> float | None:
    steady = measured.output_tokens_per_s_steady
    return measured.output_tokens_per_s if steady is None else steady


def _failures(rounds: Sequence[Measurement]) -> str | None:
    failed, total = sum(m.failed for m in rounds), sum(m.failed + m.completed for m in rounds)
    if failed:
        measured = next(m for m in rounds if m.failures)
        reason = next(iter(measured.failures))
        detail = measured.failure_examples.get(reason, "")
        return f"{failed} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}"
    if not any(m.output_tokens for m in rounds):
        return "no request had any output"
    return None


def _missed(trial: Trial, slo: Slo) -> str | None:
    missed = [
        f"P99 {name.upper()} {figure * 1e3:.0f} ms is above {limit * 1e3:g} ms"
        for name, limit in slo.given().items()
        if (figure := getattr(trial, name).p99) is not None and figure > limit
    ]
    return ", ".join(missed) or None


def _with_reason(trial: Trial, reason: str) -> Trial:
    return Trial(**{f.name: getattr(trial, f.name) for f in fields(trial)} | {"reason": reason})
