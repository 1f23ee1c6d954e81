"""Settings of replicas travel as JSON, and numbers of replicas are checked."""

from __future__ import annotations

import json

import pytest
import yaml

from llmsched.cli.cluster.autoscaling import desired_replicas
from llmsched.cli.cluster.cluster_flags import ClusterFlags
from llmsched.cli.cluster.replica_metrics import merge_metrics
from llmsched.cli.cluster.replica_spec import ReplicaRange, ReplicaSpec, parse_replicas
from llmsched.cli.cluster.start import application_arguments, serve_config
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, LlmschedError

SPEC = ReplicaSpec(
    EngineConfig(model="demo", device="cpu", max_model_len=512),
    "tiny",
    HttpLimits(max_body_size=1 << 20),
    api_key="secret",
    allowed_hosts=("chat.example",),
)


def test_a_spec_travels_as_json() -> None:
    assert ReplicaSpec.from_arguments(json.loads(json.dumps(SPEC.as_arguments()))) == SPEC


def test_a_replica_on_the_cpu_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    shares = {n: application_arguments(SPEC, ClusterFlags(ReplicaRange(1, n)))["resources"] for n in (1, 3, 16)}
    assert shares == {1: {"num_cpus": 8}, 3: {"num_cpus": 2}, 16: {"num_cpus": 0.5}}


def test_the_config_file_builds_the_same_application() -> None:
    document = yaml.safe_load(serve_config(SPEC, ClusterFlags(ReplicaRange(2, 4)), "0.0.0.0", 8000))
    (application,) = document["applications"]
    arguments = application["args"]
    assert (arguments.pop("replicas"), arguments.pop("resources"), arguments.pop("scale_ttft")) != (None, None, None)
    assert ReplicaSpec.from_arguments(arguments).config == SPEC.config
    assert document["http_options"] == {"host": "0.0.0.0", "port": 8000}


@pytest.mark.parametrize(("text", "least", "most"), [("4", 4, 4), ("1..8", 1, 8), ("2..2", 2, 2)])
def test_numbers_and_ranges_are_read(text: str, least: int, most: int) -> None:
    assert parse_replicas(text) == ReplicaRange(least, most)


@pytest.mark.parametrize("text", ["0", "-1", "a", "8..1", "1..", "..4", "1...3", "5000"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        parse_replicas(text)


@pytest.mark.parametrize("option", ["--ray-address", "--scale-ttft", "--emit"])
def test_flags_of_replicas_need_replicas(option: str) -> None:
    with pytest.raises(LlmschedError, match=option):
        ClusterFlags().check([option])


@pytest.mark.parametrize("option", ["--api-keys", "--pin-prefix", "--otlp-endpoint"])
def test_flags_that_replicas_do_not_support_are_refused(option: str) -> None:
    with pytest.raises(LlmschedError, match=option):
        ClusterFlags(ReplicaRange(2, 2)).check([option])


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [([0.0], 1), ([0.4], 1), ([0.6], 2), ([3.0, 3.0], 12), ([0.3, 0.3], 2), ([0.01, 0.01], 1), ([0.0, 0.2, 0.0], 3)],
)
def test_the_wanted_number_follows_the_waits(waits: list[float], wanted: int) -> None:
    assert desired_replicas(waits, 1.0) == wanted


def test_metrics_of_replicas_are_merged_by_name() -> None:
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total{model="m"} %d\n# HELP b B.\n# TYPE b gauge\nb 1\n'
    merged = merge_metrics([("one", text % 3), ("two", text % 4)]).decode()
    assert merged.count("# TYPE a_total counter") == 1
    assert 'a_total{model="m",replica="one"} 3.0' in merged
    assert 'a_total{model="m",replica="two"} 4.0' in merged
    assert 'b{replica="two"} 1.0' in merged
