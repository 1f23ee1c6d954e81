"""Start of replicas: the arguments of the application, and a config file for `serve deploy`."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from llmsched.cli import render
from llmsched.cli.cluster.cluster_flags import ClusterFlags
from llmsched.cli.cluster.replica_spec import APP_NAME, ReplicaSpec
from llmsched.cli.serve.access import are_loopback
from llmsched.cli.serve.lifecycle import listen
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.model.source import locate

#: Import path of the function that builds the application.
BUILDER = "llmsched.cli.cluster.application:build"


def start_replicas(spec: ReplicaSpec, flags: ClusterFlags, host: str, port: int) -> None:
    """Serve until a signal, or print a config file for `serve deploy` if `flags.emit` is set.

    Raises LlmschedError if Ray is missing or does not start.
    """
    if port == 0 and (flags.emit is not None or flags.ray_address is not None):
        raise ConfigError(
            "port", "must be above 0 with --emit and --ray-address: replicas on other machines listen on it"
        )
    if flags.emit is not None:
        render.say(serve_config(spec, flags, host, port), wrap=False)
        return
    if flags.ray_address is None:
        listeners = listen(host, port)
        port = listeners[0].getsockname()[1]
        spec = replace(spec, loopback=are_loopback(listeners))
        for listener in listeners:
            listener.close()
        with render.progress_bar() as progress:
            locate(spec.config.model, progress)  # fails now if the model is missing
    else:
        spec = replace(spec, loopback=False)
    try:
        from llmsched.cli.cluster.run import serve_replicas
    except ImportError as missing:
        raise LlmschedError(f"--replicas needs Ray: pip install 'llmsched[cluster]' ({missing})") from missing
    serve_replicas(spec, flags, host, port, application_arguments(spec, flags))


def application_arguments(spec: ReplicaSpec, flags: ClusterFlags) -> dict[str, Any]:
    """Return the builder's arguments as JSON values. A replica gets a GPU, or a share of this machine's cores."""
    assert flags.replicas is not None
    share = (os.cpu_count() or 1) / flags.replicas.most
    cores = {"num_cpus": int(share) if share >= 1 else math.floor(1000 * share) / 1000}
    return {
        **spec.as_arguments(),
        "replicas": str(flags.replicas),
        "scale_ttft": flags.scale_ttft,
        "resources": {"num_gpus": 1} if _uses_gpu(spec) else cores,
    }


def serve_config(spec: ReplicaSpec, flags: ClusterFlags, host: str, port: int) -> str:
    """Return the YAML of a config file for `serve deploy`, or for serveConfigV2 of a RayService."""
    import yaml

    application = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": application_arguments(replace(spec, loopback=False), flags),
    }
    document = {"http_options": {"host": host, "port": port}, "applications": [application]}
    return str(yaml.safe_dump(document, sort_keys=False)).rstrip()


def _uses_gpu(spec: ReplicaSpec) -> bool:
    if spec.config.device in ("cpu", "cuda"):
        return spec.config.device == "cuda"
    import torch

    return torch.cuda.is_available()
