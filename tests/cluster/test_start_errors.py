"""A start of replicas that cannot succeed ends with one line that says why."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray
from command_line import CommandLine
from tiny_models import save_tiny_model

from llmsched.cli.cluster import run
from llmsched.cli.cluster.replica_spec import ReplicaRange
from llmsched.engine.errors import LlmschedError

TRACEBACK = """The deployment failed to start 2 times in a row. See controller logs for details. Error:
ray::ServeReplica:llmsched:replica.initialize_and_get_metadata() (pid=12, ip=192.0.2.2, actor_id=ab)
  File "/x/replica.py", line 3, in __init__
ValueError: the first
During handling of the above exception, another exception occurred:
llmsched.engine.errors.ModelError: model ./m: its weights are damaged
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_a_missing_model_is_found_before_ray_starts(command: CommandLine, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    assert "there is no such file" in command.refused("serve", missing, "--replicas", "2", "--port", "0")


def test_a_port_in_use_is_found_before_ray_starts(command: CommandLine, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in command.refused("serve", str(model), "--replicas", "2", "--port", port)


@pytest.mark.parametrize("flags", [("--emit", "serve-config"), ("--ray-address", "auto")])
def test_a_port_for_other_machines_must_be_named(command: CommandLine, model: Path, flags: tuple[str, str]) -> None:
    assert "--port" in command.refused("serve", str(model), "--replicas", "2", "--port", "0", *flags)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1:no", "auto"])
def test_an_address_without_ray_is_named(command: CommandLine, model: Path, address: str) -> None:
    error = command.refused("serve", str(model), "--replicas", "2", "--ray-address", address)
    assert f"--ray-address: no Ray at {address}" in error


def test_too_few_gpus_are_an_error_here_and_a_warning_in_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    run._check_resources(ReplicaRange(1, 2), {"num_gpus": 1}, is_ours=True)
    run._check_resources(ReplicaRange(4, 4), {"num_cpus": 2}, is_ours=True)
    with pytest.raises(LlmschedError, match=r"--replicas 1\.\.4 needs 4 GPUs.* finds 2"):
        run._check_resources(ReplicaRange(1, 4), {"num_gpus": 1}, is_ours=True)
    assert not capsys.readouterr().err
    run._check_resources(ReplicaRange(1, 4), {"num_gpus": 1}, is_ours=False)
    assert "needs 4 GPUs" in capsys.readouterr().err


def test_the_reason_is_the_last_exception_of_a_traceback() -> None:
    assert run.reason_of(TRACEBACK) == "model ./m: its weights are damaged"
    assert run.reason_of("Could not find Ray.\nMore advice.") == "Could not find Ray."
    assert run.reason_of("") == ""
