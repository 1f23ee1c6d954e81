"""Grafana dashboard and alert rules: every metric and label that they name is in the /metrics of a server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql import Expression
from scripted import ScriptedServer

from llmsched.engine.memory.plan import MemoryParts

#: Values of each label of each metric.
Labels = dict[str, dict[str, set[str]]]

FOLDER = files("llmsched.profiles") / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GROUPS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
#: Metrics that Prometheus itself writes, and labels that it adds to every sample.
OF_PROMETHEUS: Labels = {"up": {"job": {"llmsched"}, "instance": {"host:8000"}}}
ADDED = {"job", "instance"}


@pytest.fixture(scope="module")
def labels() -> Iterator[Labels]:
    """Yield the labels of each metric in the /metrics of a server that has answered a request."""
    server = ScriptedServer().start()
    parts = MemoryParts(weights=1, activations=1, other=1, kv=1)
    server.engine.metrics.add_memory(parts, server.engine.scheduler.kv_usage())
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello"}).raise_for_status()
    found = dict(OF_PROMETHEUS)
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            of_metric = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_metric.setdefault(label, set()).add(value)
    yield found
    server.close()


def check(expression: str, labels: Labels) -> set[str]:
    """Check an expression's syntax, its names, and the values of its labels. Return the labels of its result."""
    parsed = Expression(expression)
    assert parsed.selectors
    known = {label for selector in parsed.selectors for label in labels.get(selector.metric, ())} | ADDED
    for selector in parsed.selectors:
        assert selector.metric in labels, f"{selector.metric} is not in /metrics"
        assert selector.labels.keys() <= labels[selector.metric].keys() | ADDED, f"{selector} has unknown labels"
        for label, text in selector.labels.items():
            known_values = labels[selector.metric].get(label, set())
            assert text == "$model" or set(text.split("|")) <= known_values, f"{selector}: values are {known_values}"
    assert parsed.labels <= known, f"{expression} groups by unknown labels"
    return known


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_panels_show_metrics_that_exist(panel: dict[str, Any], labels: Labels) -> None:
    assert panel["targets"]
    assert panel["description"]
    for target in panel["targets"]:
        known = check(target["expr"], labels)
        shown = target["legendFormat"]
        assert "{{" not in shown or shown.strip("{}") in known


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_variables_are_taken_from_metrics(labels: Labels) -> None:
    (query,) = (each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query")
    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    assert label in labels[metric]


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alerts_are_about_metrics_that_exist(rule: dict[str, Any], labels: Labels) -> None:
    check(rule["expr"], labels)
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


def test_a_wrong_expression_does_not_pass(labels: Labels) -> None:
    wrong = [
        "sum(rate(llmsched:prompt_tokens_total))",  # a vector instead of a range
        "sum(llmsched:num_requests_running[5m])",
        "rate(llmsched:num_requests_running[5m]",
        "histogram_quantile(0.9, sum by (model_name) (rate(llmsched:inter_token_latency_seconds_bucket[5m])))",
        "histogram_quantile(0.9, sum by (le) (rate(llmsched:inter_token_latency_seconds_sum[5m])))",
        "llmsched:num_requests_running{model_name=demo}",
        "llmsched:num_requests_running > > 1",
    ]
    for expression in wrong:
        with pytest.raises(ValueError, match=r"\S"):
            Expression(expression)
    for unknown in (
        "llmsched:no_such_metric",
        'llmsched:num_requests_running{kind="x"}',
        "sum by (kind) (up)",
        'up{job="other"}',
    ):
        with pytest.raises(AssertionError):
            check(unknown, labels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH; the tests above need none")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(FOLDER / "alerts.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
