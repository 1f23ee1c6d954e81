"""What a server's /metrics tell of its state: those of llmsched and vLLM, and of SGLang by other names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

from llmsched.cli.bench.target.sampling import Sample

#: Names without the prefix that is the server's, first match counts.
_RUNNING = ("num_requests_running", "num_running_reqs")
_WAITING = ("num_requests_waiting", "num_queue_reqs")
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage")
_PREEMPTIONS = ("num_preemptions_total", "num_preemptions")


class ServerMetrics:
    """Values by name, summed over their labels; names without what stands before the colon."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    @classmethod
    def of(cls, text: str) -> Self | None:
        """The metrics in a Prometheus exposition; None if it is none."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if not math.isfinite(sample.value):
                        continue
                    name = sample.name.rpartition(":")[2]
                    values[name] = values.get(name, 0.0) + sample.value
        except (ValueError, IndexError):
            return None
        return cls(values)

    def preemptions(self) -> int | None:
        value = self._first(_PREEMPTIONS)
        return None if value is None else int(value)

    def sample(self, time: float) -> Sample | None:
        """The state at `time`; None if not even who runs and waits is told."""
        running, waiting = self._first(_RUNNING), self._first(_WAITING)
        if running is None or waiting is None:
            return None
        return Sample(time, int(running), int(waiting), kv_held=self._first(_KV_USAGE))

    def _first(self, names: tuple[str, ...]) -> float | None:
        return next((self._values[name] for name in names if name in self._values), None)
