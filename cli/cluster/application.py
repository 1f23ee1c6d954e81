"""Application of Ray Serve: the ingress and the replicas. `build` is the import path of a Serve config file."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from llmsched.cli.cluster.autoscaling import WaitPolicy
from llmsched.cli.cluster.ingress import Ingress
from llmsched.cli.cluster.replica import EngineReplica
from llmsched.cli.cluster.replica_spec import ReplicaRange, ReplicaSpec, parse_replicas
from llmsched.engine.routing.replica_state import PUBLISH_SECONDS

#: Import path of the router.
ROUTER = "llmsched.cli.cluster.request_router.PrefixRequestRouter"
#: Requests that Ray Serve hands to one replica at a time. The replica's own max_queue_size refuses the rest.
_MAX_ONGOING = 100_000
#: Attempts to start a replica before the application counts as failed.
_STARTS = 2


def build(arguments: dict[str, Any]) -> Application:
    """Return the application.

    `arguments` has the fields of ReplicaSpec, and `replicas`, `scale_ttft` and `resources`.
    """
    rest = dict(arguments)
    replicas = parse_replicas(str(rest.pop("replicas", "1")))
    scale_ttft, resources = float(rest.pop("scale_ttft", 1.0)), rest.pop("resources", {})
    spec = ReplicaSpec.from_arguments(rest)
    engines = serve.deployment(EngineReplica).options(
        name="replica",
        max_ongoing_requests=_MAX_ONGOING,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=spec.grace_period,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        ray_actor_options=dict(resources),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_routing_stats_period_s=PUBLISH_SECONDS,
            request_routing_stats_timeout_s=5 * PUBLISH_SECONDS,
        ),
        **_number(replicas, scale_ttft),
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=spec.grace_period,
        ray_actor_options={"num_cpus": 0},  # replicas may take all cores
        max_constructor_retry_count=_STARTS,
        max_surge_percent=100,  # in an update, the new ingress starts before the old one stops
    )
    settings = spec.as_arguments()
    return ingress.bind(settings, engines.bind(settings))


def _number(replicas: ReplicaRange, scale_ttft: float) -> dict[str, Any]:
    if replicas.is_fixed:
        return {"num_replicas": replicas.most}
    policy = AutoscalingPolicy(policy_function=WaitPolicy, policy_kwargs={"allowed_s": scale_ttft})
    scaling = AutoscalingConfig(
        min_replicas=replicas.least,
        max_replicas=replicas.most,
        initial_replicas=replicas.least,
        upscale_delay_s=5.0,
        downscale_delay_s=120.0,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
