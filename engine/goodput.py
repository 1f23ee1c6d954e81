"""Service level objectives, and the goodput of requests that meet them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmsched.engine.errors import check_range
from llmsched.engine.percentiles import statistic
from llmsched.engine.request_latency import READER_SPEED, RequestLatency


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective: latency targets of a request in seconds. None means no target.

    Raises LlmschedError for an unknown `itl_statistic`, or for a `reader_speed` that is not above 0 and finite.
    """

    ttft: float | None = None
    itl: float | None = None  # target for `itl_statistic` of the request's ITL samples
    tpot: float | None = None
    e2e: float | None = None
    itl_statistic: str = "p99"  # mean, max or a percentile
    reader_speed: float = READER_SPEED  # tokens per second at which a user is assumed to read

    def __post_init__(self) -> None:
        statistic((), self.itl_statistic)
        valid = 0 < self.reader_speed < math.inf
        check_range("reader_speed", self.reader_speed, valid, "above 0 tokens per second, and finite")

    def given(self) -> dict[str, float]:
        """Return the targets that are not None, by name."""
        names = ("ttft", "itl", "tpot", "e2e")
        return {name: limit for name in names if (limit := getattr(self, name)) is not None}

    def met_by(self, request: RequestLatency) -> dict[str, bool]:
        """Return whether the request met each target, by name. A latency that is None meets every target."""
        itl = None if self.itl is None else statistic(request.itl, self.itl_statistic)
        figures = {"ttft": request.ttft, "itl": itl, "tpot": request.tpot, "e2e": request.e2e}
        return {name: (figure := figures[name]) is None or figure <= limit for name, limit in self.given().items()}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput and SLO attainment of a run."""

    requests_per_s: float  # requests that finished and met every target
    attainment: dict[str, float]  # share of requests that met each target, and under "all" every target
    missed: dict[str, int] = field(default_factory=dict)  # finished requests that missed each target
    missed_alone: dict[str, int] = field(default_factory=dict)  # finished requests that missed only this target


def goodput(slo: Slo, requests: Sequence[RequestLatency], *, failed: int, duration: float) -> Goodput | None:
    """Return the goodput of a run that took `duration` seconds.

    `requests` are the finished requests. The `failed` requests count as requests that missed every target. Returns None
    if `slo` has no targets, if there are no requests, or if a request met every target and `duration` is 0.
    """
    total = len(requests) + failed
    if not slo.given() or not total:
        return None
    misses = [[name for name, met in slo.met_by(request).items() if not met] for request in requests]
    good = sum(not missed for missed in misses)
    if good and duration <= 0:
        return None
    missed = {name: sum(name in one for one in misses) for name in slo.given()}
    attainment = {name: (len(requests) - count) / total for name, count in missed.items()}
    alone = {name: sum(one == [name] for one in misses) for name in slo.given()}
    return Goodput(good / duration if good else 0.0, {**attainment, "all": good / total}, missed, alone)
