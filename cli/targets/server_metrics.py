"""Reader of a server's state from its /metrics, for llmsched, vLLM, SGLang, llama.cpp and TGI."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Self

from llmsched.cli.figures.engine_counts import DRAFT_COUNTS, EngineCounts
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.engine.memory.plan import MemoryParts

#: Metric names without the server's prefix. The first name that the server reports is used.
_RUNNING = ("num_requests_running", "num_running_reqs", "requests_processing", "tgi_batch_current_size")
_WAITING = ("num_requests_waiting", "num_queue_reqs", "requests_deferred", "tgi_queue_size")
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage", "kv_cache_usage_ratio")
_PREEMPTIONS = ("num_preemptions_total", "num_preemptions")

#: Reported by llmsched only: the parts of its memory and the use of its KV memory in bytes, and what it counts.
_PARTS = ("memory_weights_bytes", "memory_activations_bytes", "memory_other_bytes", "kv_cache_bytes")
_KV_USE = ("kv_cache_used_bytes", "kv_cache_empty_bytes", "kv_cache_cached_bytes")
_DRAFTS = {key: f"spec_decode_num_{key}_total" for key in DRAFT_COUNTS}
_LATE, _WAITED, _MISSES = "late_compilations_total", "request_wait_seconds_total", "prefix_cache_misses_total"

_FINISHED = "request_success_total"

_COUNTS = (*_PREEMPTIONS, _LATE, _WAITED, _MISSES, _FINISHED, *_DRAFTS.values())
_NAMES = "|".join((*_RUNNING, *_WAITING, *_KV_USAGE, *_PARTS, *_KV_USE, *_COUNTS))
_LINE = re.compile(rf"(?:\w+:)?(?:{_NAMES})[{{ ].*", re.ASCII)
#: Ends of the names of metrics that only grow while the server runs.
_GROWING = ("_total", "_bucket", "_count", "_sum")


class LabelledValue(NamedTuple):
    labels: Mapping[str, str]
    value: float


class ServerMetrics:
    """Metrics of a server by name, without a prefix such as `vllm:`. A metric has one value per set of labels."""

    def __init__(self, values: Mapping[str, Sequence[LabelledValue]]) -> None:
        self._values = values

    @classmethod
    def of(cls, text: str, *, every: bool = False) -> Self | None:
        """Parse the body of /metrics. Return None if it is not in Prometheus's text format.

        Unless `every` is set, skip the metrics that the bench does not need: parsing all of them would block the
        client's streams for some 10 ms.
        """
        from prometheus_client.parser import text_string_to_metric_families

        known = text if every else "\n".join(line for line in text.split("\n") if _LINE.match(line))
        values: defaultdict[str, list[LabelledValue]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(known):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        values[sample.name.rpartition(":")[2]].append(LabelledValue(sample.labels, sample.value))
        except (ValueError, IndexError):
            return None
        return cls(values)

    def since(self, before: ServerMetrics) -> ServerMetrics:
        """Return the metrics with the growth of counters and histograms since `before`."""
        grown: dict[str, Sequence[LabelledValue]] = {}
        for name, values in self._values.items():
            if name.endswith(_GROWING):
                old = {tuple(sorted(one.labels.items())): one.value for one in before._values.get(name, ())}
                grown[name] = [
                    one._replace(value=max(0.0, one.value - old.get(tuple(sorted(one.labels.items())), 0.0)))
                    for one in values
                ]
            else:
                grown[name] = values
        return ServerMetrics(grown)

    def counts(self) -> EngineCounts:
        preemptions, late = self.total(*_PREEMPTIONS), self.total(_LATE)
        misses = self.by_label(_MISSES, "kind")
        drafts = {key: self.total(name) for key, name in _DRAFTS.items()}
        finished = self.by_label(_FINISHED, "replica") or {}
        return EngineCounts(
            None if preemptions is None else int(preemptions),
            None if late is None else int(late),
            self.by_label(_WAITED, "reason"),
            None if misses is None else {kind: int(count) for kind, count in misses.items()},
            drafts=None if None in drafts.values() else {key: int(count or 0) for key, count in drafts.items()},
            replicas={name: int(count) for name, count in finished.items() if name} or None,
        )

    def memory(self) -> MemoryParts | None:
        parts = [self.total(name) for name in _PARTS]
        known = [int(size) for size in parts if size is not None]
        return MemoryParts(*known) if len(known) == len(parts) else None

    def sample(self, time: float) -> TargetState | None:
        """Return the server's state at `time`, or None if the server does not report running and waiting requests."""
        running, waiting = self.total(*_RUNNING), self.total(*_WAITING)
        if running is None or waiting is None:
            return None
        total, used = self.total("kv_cache_bytes"), [self.total(name) for name in _KV_USE]
        if total:
            shares = [None if size is None else size / total for size in used]
            return TargetState(time, int(running), int(waiting), *shares)
        # The pools of one server are of equal size, so the mean over all labels is the server's share.
        names = (name for name in _KV_USAGE if name in self._values)
        held = next((fmean(one.value for one in self._values[name]) for name in names), None)
        return TargetState(time, int(running), int(waiting), kv_held=held)

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels of the first of these metrics that the server reports."""
        found = next((self._values[name] for name in names if name in self._values), None)
        total = None if found is None else sum(one.value for one in found)
        return None if total is None or not math.isfinite(total) else total

    def by_label(self, name: str, label: str) -> dict[str, float] | None:
        """Return the sums of a metric by the value of one of its labels; None if the server does not report it."""
        if name not in self._values:
            return None
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, value in self._values[name]:
            sums[labels.get(label, "")] += value
        return dict(sums)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of each value of a metric."""
        return [one.labels for one in self._values.get(name, ())]

    def by_replica(self) -> dict[str, ServerMetrics]:
        """Return the metrics of each replica behind an ingress; {} if the server has no replicas."""
        found: defaultdict[str, defaultdict[str, list[LabelledValue]]] = defaultdict(lambda: defaultdict(list))
        for name, values in self._values.items():
            for one in values:
                if replica := one.labels.get("replica"):
                    found[replica][name].append(one)
        return {replica: ServerMetrics(values) for replica, values in found.items()}

    def buckets(self, *names: str) -> dict[float, float] | None:
        """Return the cumulative counts by upper bound of the first of these histograms that has samples."""
        for name in names:
            if counts := self.by_label(f"{name}_bucket", "le"):
                bounds = {float(bound): count for bound, count in counts.items() if bound}
                return dict(sorted(bounds.items())) if any(bounds.values()) else None
        return None
