"""Run of replicas on a local or an existing Ray: start them, wait for a signal, drain them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from llmsched.cli import render
from llmsched.cli.cluster.application import build
from llmsched.cli.cluster.cluster_flags import ClusterFlags
from llmsched.cli.cluster.replica_spec import APP_NAME, ReplicaSpec
from llmsched.engine.errors import LlmschedError


def serve_replicas(spec: ReplicaSpec, flags: ClusterFlags, host: str, port: int, arguments: dict[str, Any]) -> None:
    """Serve until SIGINT or SIGTERM, then drain every replica. A second signal ends the process at once.

    Raises LlmschedError if Ray cannot be reached, or if the replicas do not start.
    """
    is_ours = flags.ray_address is None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = LoggingConfig(log_level="WARNING")
    try:
        context = ray.init(address=flags.ray_address or "local", logging_level=logging.WARNING)
        serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=quiet)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        raise LlmschedError(f"Ray at {flags.ray_address or 'this machine'} does not start: {problem}") from problem
    stopping = _stop_at_signals()
    try:
        render.note(f"starting {flags.replicas} replicas; Ray's logs are in {context['session_dir']}")
        serve.run(build(arguments), name=APP_NAME, route_prefix="/", logging_config=quiet)
        _show_start(host, port, context.dashboard_url)
        while not stopping.wait(0.5):
            pass
        render.note(f"draining: requests have {render.human_seconds(spec.grace_period)} to finish")
    except RuntimeError as problem:
        raise LlmschedError(f"the replicas do not start: {problem}") from problem
    finally:
        serve.delete(APP_NAME)
        if is_ours:
            serve.shutdown()
            ray.shutdown()


def _show_start(host: str, port: int, dashboard_url: str | None) -> None:
    url = f"http://{host}:{port}"
    states = serve.status().applications[APP_NAME].deployments["replica"].replica_states
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    render.say(f"ready: {url}/v1 (replicas: {counts}, health: {url}/health, metrics: {url}/metrics)")
    if dashboard_url:
        render.say(f"Ray's dashboard: http://{dashboard_url}")


def _stop_at_signals() -> threading.Event:
    """Return an event that the first SIGINT or SIGTERM sets. A second signal ends the process."""
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping
