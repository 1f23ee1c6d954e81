"""Figures of an engine's latest minute, from snapshots of its totals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.stats import EngineStats

#: Seconds that the figures cover, and seconds between two snapshots.
WINDOW_S, INTERVAL_S = 60.0, 5.0

#: Cumulative counts of a histogram by upper bound.
Buckets = Mapping[float, float]

#: Name in figures of each histogram that snapshots hold.
LATENCIES = {"ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State and totals of an engine at `time`, in seconds of the clock."""

    time: float
    stats: EngineStats
    buckets: Mapping[str, Buckets]  # by name in LATENCIES

    def samples(self, name: str, since: Snapshot) -> dict[float, float]:
        """Return the cumulative counts, by upper bound in seconds, of the samples added since an earlier snapshot.

        `name` is a key of LATENCIES.
        """
        before = since.buckets[name]
        return {bound: count - before[bound] for bound, count in self.buckets[name].items()}


class RecentStats:
    """Keeper of an engine's snapshots. Call `sample()` often: it takes a snapshot when INTERVAL_S seconds have passed.

    `stats` returns the engine's state.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats, self._metrics, self._clock = stats, metrics, clock
        self._kept = deque([self.look()])
        self.start = self._kept[0].time

    def look(self) -> Snapshot:
        """Return a snapshot of the present state."""
        buckets = {name: self._metrics.buckets(histogram) for name, histogram in LATENCIES.items()}
        return Snapshot(self._clock(), self._stats(), buckets)

    def sample(self) -> None:
        now = self._clock()
        if now - self._kept[-1].time < INTERVAL_S:
            return
        self._kept.append(self.look())
        while self._kept[1].time <= now - WINDOW_S:
            self._kept.popleft()

    def window(self) -> tuple[Snapshot, Snapshot]:
        """Return a snapshot that is about WINDOW_S seconds old, or the first one, and one of the present state."""
        return self._kept[0], self.look()


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return a quantile of a Prometheus histogram, interpolated linearly in its bucket, as histogram_quantile does.

    `buckets` has the number of samples up to each bound, in ascending order; the last bound is infinite. Samples above
    the largest finite bound count as this bound. Returns None without samples.
    """
    *_, total = buckets.values()
    if total == 0:
        return None
    rank, bounds = share * total, [(0.0, 0.0), *buckets.items()]
    for (low, below), (high, up_to) in pairwise(bounds):
        if up_to >= rank:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (up_to - below)
    raise AssertionError("the last bucket has all samples")
