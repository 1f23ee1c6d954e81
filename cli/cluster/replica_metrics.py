"""Metrics of several replicas as one exposition."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def merge_metrics(texts: Iterable[tuple[str, str]]) -> bytes:
    """Merge the metrics of replicas, given as pairs of name and text. The name becomes the label `replica`.

    Metrics of one name are joined under one HELP and TYPE.
    """
    found = [(name, family) for name, text in texts for family in text_string_to_metric_families(text)]
    found.sort(key=lambda pair: pair[1].name)
    merged = []
    for _, group in groupby(found, key=lambda pair: pair[1].name):
        pairs = list(group)
        first = pairs[0][1]
        metric = Metric(first.name, first.documentation, first.type)
        metric.samples = [
            sample._replace(labels={**sample.labels, "replica": name})
            for name, family in pairs
            for sample in family.samples
        ]
        merged.append(metric)
    registry = CollectorRegistry()
    registry.register(_Merged(merged))
    return generate_latest(registry)
