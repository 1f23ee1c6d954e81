"""Parser of the text of /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from llmsched.engine.metrics import EngineMetrics


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Return the value of each sample by `name{label=value,...}`, without the labels of all metrics."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
