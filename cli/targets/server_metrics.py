"""Reader of a server's state from its /metrics, for llmsched, vLLM, SGLang, llama.cpp and TGI."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Self

from llmsched.cli.figures.kv_memory import TargetState
from llmsched.engine.memory.plan import MemoryParts

#: Metric names without the server's prefix. The first name that the server reports is used.
_RUNNING = ("num_requests_running", "num_running_reqs", "requests_processing", "tgi_batch_current_size")
_WAITING = ("num_requests_waiting", "num_queue_reqs", "requests_deferred", "tgi_queue_size")
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage", "kv_cache_usage_ratio")
_PREEMPTIONS = ("num_preemptions_total", "num_preemptions")

#: Reported by llmsched only, in bytes: the parts of its memory, and the use of its KV memory.
_PARTS = ("memory_weights_bytes", "memory_activations_bytes", "memory_other_bytes", "kv_cache_bytes")
_KV_USE = ("kv_cache_used_bytes", "kv_cache_empty_bytes", "kv_cache_cached_bytes")

_NAMES = "|".join((*_RUNNING, *_WAITING, *_KV_USAGE, *_PREEMPTIONS, *_PARTS, *_KV_USE))
_LINE = re.compile(rf"(?:\w+:)?(?:{_NAMES})[{{ ].*", re.ASCII)


class ServerMetrics:
    """Metrics of a server by name, without a prefix such as `vllm:`. A metric has one value per set of labels."""

    def __init__(self, values: Mapping[str, Sequence[float]]) -> None:
        self._values = values

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Parse the body of /metrics. Return None if it is not in Prometheus's text format."""
        from prometheus_client.parser import text_string_to_metric_families

        # Parsing the whole text would block the client's streams for some 10 ms.
        known = "\n".join(line for line in text.split("\n") if _LINE.match(line))
        values: defaultdict[str, list[float]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(known):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        values[sample.name.rpartition(":")[2]].append(sample.value)
        except (ValueError, IndexError):
            return None
        return cls(values)

    def preemptions(self) -> int | None:
        value = self._first(_PREEMPTIONS)
        return None if value is None else int(value)

    def memory(self) -> MemoryParts | None:
        parts = [self._first((name,)) for name in _PARTS]
        known = [int(size) for size in parts if size is not None]
        return MemoryParts(*known) if len(known) == len(parts) else None

    def sample(self, time: float) -> TargetState | None:
        """Return the server's state at `time`, or None if the server does not report running and waiting requests."""
        running, waiting = self._first(_RUNNING), self._first(_WAITING)
        if running is None or waiting is None:
            return None
        total, used = self._first(("kv_cache_bytes",)), [self._first((name,)) for name in _KV_USE]
        if total:
            shares = [None if size is None else size / total for size in used]
            return TargetState(time, int(running), int(waiting), *shares)
        # The pools of one server are of equal size, so the mean over all labels is the server's share.
        held = next((fmean(self._values[name]) for name in _KV_USAGE if name in self._values), None)
        return TargetState(time, int(running), int(waiting), kv_held=held)

    def _first(self, names: Sequence[str]) -> float | None:
        total = next((sum(self._values[name]) for name in names if name in self._values), None)
        return None if total is None or not math.isfinite(total) else total
