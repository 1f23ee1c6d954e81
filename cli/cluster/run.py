"""Run of replicas on a local or an existing Ray: start them, wait for a signal, drain them."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
import typer
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from llmsched.cli import render
from llmsched.cli.cluster.application import build
from llmsched.cli.cluster.cluster_flags import ClusterFlags
from llmsched.cli.cluster.replica_spec import APP_NAME, ReplicaRange, ReplicaSpec
from llmsched.engine.errors import LlmschedError

#: Seconds between two looks at the application while it starts, and afterwards.
_START_LOOK_S, _LOOK_S = 0.2, 2.0
#: Looks in a row that fail before the application counts as lost.
_MAX_FAILURES = 5
#: Seconds within which the Ray to join must accept a connection.
_CONNECT_S = 10.0
#: Last line of a traceback: the class and the message of the exception.
_EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception): (.+)$", re.MULTILINE)
#: What Ray and Ray Serve raise if they cannot be reached, or refuse an application.
_FAILURES = (ConnectionError, RuntimeError, ValueError, RayError, RayServeException)
_QUIET = LoggingConfig(log_level="WARNING")


def serve_replicas(spec: ReplicaSpec, flags: ClusterFlags, host: str, port: int, arguments: dict[str, Any]) -> None:
    """Serve until SIGINT or SIGTERM, then drain every replica. A second signal ends the process at once.

    Raises LlmschedError if Ray cannot be reached, or if the replicas do not start. Exits with 1 if they fail later.
    """
    assert flags.replicas is not None
    stopping = _Stop()
    with _ray(flags.ray_address, host, port) as context:
        stopping.listen()  # again, because Ray has handlers of its own
        stopping.check()
        _check_resources(flags.replicas, arguments["resources"], is_ours=flags.ray_address is None)
        try:
            render.note(f"starting {flags.replicas} replicas; Ray's logs are in {context['session_dir']}")
            target = serve.RunTarget(build(arguments), APP_NAME, "/", _QUIET)
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_running(stopping)
            _show_start(host, port, context.dashboard_url)
            _watch(stopping)
            render.note(f"draining: requests have {render.human_seconds(spec.grace_period)} to finish")
        except typer.Exit:  # is a RuntimeError too
            raise
        except _FAILURES as problem:
            raise LlmschedError(f"the replicas do not start: {reason_of(str(problem))}") from problem
        finally:
            with suppress(*_FAILURES):
                serve.delete(APP_NAME)


@contextmanager
def _ray(address: str | None, host: str, port: int) -> Iterator[Any]:
    """Start Ray on this machine, or connect to the one at `address`, and start Ray Serve. Stop what was started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = address or "this machine"
    if address is not None:
        _check_address(address)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        context = ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False)
    except _FAILURES as problem:
        failed = "Ray does not start on this machine" if address is None else f"--ray-address: no Ray at {address}"
        raise LlmschedError(f"{failed}: {reason_of(str(problem))}") from problem
    try:
        try:
            serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=_QUIET)
        except _FAILURES as problem:
            raise LlmschedError(f"Ray Serve at {where} does not start: {reason_of(str(problem))}") from problem
        if APP_NAME in serve.status().applications:
            raise LlmschedError(
                f"Ray Serve at {where} has an application {APP_NAME} already; update it with `serve deploy` and the "
                "file that --emit serve-config prints, or delete all applications there with `serve shutdown`"
            )
        yield context
    finally:
        ray.shutdown()  # ends all processes of a Ray that was started here


def _check_address(address: str) -> None:
    """Raise LlmschedError if nothing listens at HOST:PORT or ray://HOST:PORT. Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # a word for Ray, such as auto
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as problem:
        raise LlmschedError(f"--ray-address: no Ray at {address}: {problem}") from problem


def _check_resources(replicas: ReplicaRange, each: Mapping[str, float], *, is_ours: bool) -> None:
    """Raise LlmschedError if this machine lacks the GPUs for all replicas. Warn if a cluster lacks them now."""
    wanted = replicas.most * each.get("num_gpus", 0)
    found = ray.cluster_resources().get("GPU", 0)
    if wanted <= found:
        return
    told = f"--replicas {replicas} needs {wanted:g} GPUs, one for each replica, but Ray finds {found:g}"
    if is_ours:
        raise LlmschedError(f"{told} on this machine; lower --replicas, or join a cluster with --ray-address")
    render.warn(f"{told} in the cluster now; the other replicas start when it has grown")


class _Stop(threading.Event):
    """Event that the first SIGINT or SIGTERM sets. A second signal ends the process."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.listen()

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self.is_set():
            os._exit(128 + number)
        self.number = number
        self.set()

    def check(self) -> None:
        """Exit if a signal has come, with the exit code of a process that the signal has ended."""
        if self.is_set():
            raise typer.Exit(128 + self.number)


def _wait_until_running(stopping: _Stop) -> None:
    """Wait until all replicas run. Raises LlmschedError if they fail, and exits if a signal comes before."""
    num_running = 0
    while True:
        found = serve.status().applications[APP_NAME]
        if found.status is ApplicationStatus.RUNNING:
            return
        if found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise LlmschedError(f"the replicas do not start: {_problem(found)}")
        if num_running < (num_running := _num_running(found)):
            render.note(f"replicas that run: {num_running}")
        stopping.wait(_START_LOOK_S)
        stopping.check()


def _watch(stopping: _Stop) -> None:
    """Wait for a signal, and note when replicas start or stop. Exits with 1 if Ray fails."""
    num_running, failures = -1, 0
    while not stopping.wait(_LOOK_S):
        try:
            found = serve.status().applications[APP_NAME]
        except (*_FAILURES, KeyError) as problem:
            failures += 1
            if failures < _MAX_FAILURES:
                continue
            render.error(f"Ray Serve has lost the application: {reason_of(str(problem))}")
            raise typer.Exit(1) from problem
        failures = 0
        if num_running not in (-1, _num_running(found)):
            why = f": {_problem(found)}" if found.status is ApplicationStatus.UNHEALTHY else ""
            render.note(f"replicas that run: {_num_running(found)}{why}")
        num_running = _num_running(found)


def _num_running(found: ApplicationStatusOverview) -> int:
    replicas = found.deployments.get("replica")
    return 0 if replicas is None else replicas.replica_states.get("RUNNING", 0)


def _problem(found: ApplicationStatusOverview) -> str:
    messages = [deployment.message for deployment in found.deployments.values()]
    return next((reason for message in (*messages, found.message) if (reason := reason_of(message))), "no reason known")


def reason_of(message: str) -> str:
    """Return the reason in a message of Ray: the message of the last exception in a traceback, else the first line."""
    if found := _EXCEPTION.findall(message):
        return str(found[-1])
    return message.strip().split("\n")[0]


def _show_start(host: str, port: int, dashboard_url: str | None) -> None:
    url = f"http://{host}:{port}"
    render.say(f"ready: {url}/v1 (page: {url}, health: {url}/health, metrics: {url}/metrics)")
    deployments = _get_global_client().get_serve_details()["applications"][APP_NAME]["deployments"]
    for each in deployments["replica"]["replicas"]:
        where = f"process {each['pid']} on {each['node_ip']}, log in logs{each['log_file_path']}"
        render.say(f"replica {each['replica_id']}: {where}", wrap=False)
    if dashboard_url:
        render.say(f"Ray's dashboard: http://{dashboard_url}")
