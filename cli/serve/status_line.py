from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise

from llmsched.engine.service import AsyncEngine
from llmsched.engine.stats import EngineStats
from llmsched.engine.units import human_seconds

logger = logging.getLogger(__name__)

#: Histograms whose P99 the line shows, by its label.
_LATENCIES = {"TTFT": "time_to_first_token_seconds", "ITL": "inter_token_latency_seconds"}

Buckets = dict[float, float]


async def log_status(engine: AsyncEngine, interval_s: float) -> None:
    """Log a line every `interval_s` seconds if the engine computed something in that time."""
    meter = StatusMeter(engine)
    while True:
        await asyncio.sleep(interval_s)
        if line := meter.line():
            logger.info("%s", line)


class StatusMeter:
    """Meter of an engine's speed, cache hits and latency between two calls of `line()`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._last = self._look()

    def _look(self) -> tuple[float, EngineStats, dict[str, Buckets]]:
        metrics = self._engine.core.metrics
        buckets = {label: metrics.buckets(name) for label, name in _LATENCIES.items()}
        return time.monotonic(), self._engine.stats(), buckets

    def line(self) -> str:
        """Return the status since the last call as text, or "" if the engine has computed nothing since then."""
        before, self._last = self._last, self._look()
        (then, old, old_buckets), (now, new, buckets) = before, self._last
        if new.steps == old.steps:
            return ""
        tokens = (new.generation_tokens - old.generation_tokens) / max(1e-9, now - then)
        parts = [
            f"{new.num_running} running, {new.num_waiting} waiting",
            f"{tokens:.3g} tokens/s",
            f"KV {new.blocks_used / new.blocks_total:.0%}",
        ]
        if queried := new.prefix_queried_tokens - old.prefix_queried_tokens:
            parts.append(f"prefix hits {(new.prefix_hit_tokens - old.prefix_hit_tokens) / queried:.0%}")
        if preempted := new.num_preemptions - old.num_preemptions:
            parts.append(f"{preempted} preemptions")
        for label in _LATENCIES:
            p99 = quantile({le: count - old_buckets[label][le] for le, count in buckets[label].items()}, 0.99)
            if p99 is not None:
                parts.append(f"P99 {label} {human_seconds(p99)}")
        return " | ".join(parts)


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
