"""Flags of `llmsched serve` for replicas. Nothing here imports Ray."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from llmsched.cli.cluster.replica_spec import ReplicaRange, parse_replicas
from llmsched.cli.options.flags import duration_option, flag, typed
from llmsched.engine.errors import LlmschedError

#: Flags that have no effect on replicas, and why.
_REFUSED = {
    "--api-keys": "each replica would count the budgets for itself",
    "--pin-prefix": "POST to /v1/prefixes would reach one replica only",
    "--otlp-endpoint": "replicas send no traces",
    "--log-requests": "replicas log no requests; Ray's dashboard shows their logs",
    "--show-prompt-text": "replicas log no prompts",
    "--status-interval": "replicas log no status; /metrics has the figures of each",
}


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Flags that start replicas on Ray Serve. Times are in seconds."""

    replicas: Annotated[
        ReplicaRange | None,
        typer.Option(
            parser=typed(parse_replicas),
            metavar="N|MIN..MAX",
            show_default=False,
            help="Run N replicas of the server on Ray Serve, each with a GPU of its own, behind a router that knows "
            "what each has cached; with MIN..MAX the number follows the load. Needs pip install 'llmsched[cluster]'.",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            show_default="a Ray on this machine, started here",
            help="With --replicas: the Ray cluster to join, such as auto or ray://HOST:10001.",
        ),
    ] = None
    scale_ttft: Annotated[
        float,
        duration_option(
            "With --replicas MIN..MAX: a replica is added if the expected wait for a first token exceeds half of this.",
        ),
    ] = 1.0
    emit: Annotated[
        Literal["serve-config"] | None,
        typer.Option(
            show_default=False,
            help="With --replicas: print a config file for `serve deploy` and KubeRay instead of serving.",
        ),
    ] = None

    def check(self, typed_options: Collection[str]) -> None:
        """Raise LlmschedError if the options given on the command line do not go together."""
        if self.replicas is None:
            needing = [flag(name) for name in ("ray_address", "scale_ttft", "emit") if flag(name) in typed_options]
            if needing:
                raise LlmschedError(
                    f"{', '.join(needing)}: applies only to --replicas; leave it out, or add --replicas"
                )
            return
        for name in typed_options:
            if name in _REFUSED:
                raise LlmschedError(f"{name} does not go with --replicas: {_REFUSED[name]}; leave it out")
