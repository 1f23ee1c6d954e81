"""Replica: an engine in a process of its own, behind the same HTTP application as `llmsched serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from ray import serve
from starlette.types import Message

from llmsched.cli.cluster.autoscaling import WAIT
from llmsched.cli.cluster.forwarded_request import ForwardedRequest, call_app
from llmsched.cli.cluster.replica_spec import ReplicaSpec
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.app import build_app
from llmsched.cli.serve.lifecycle import favour_latency
from llmsched.cli.serve.middleware import RequestIds
from llmsched.cli.serve.request_context import IngressFacts
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.build import build_engine
from llmsched.engine.progress import silent
from llmsched.engine.routing.replica_state import StateReporter
from llmsched.engine.text.parsers.notation import find_notation

#: Header of each answer with the name of the replica that gave it.
REPLICA_HEADER = b"x-llmsched-replica"


class EngineReplica:
    """Deployment of Ray Serve that runs an engine."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        spec = ReplicaSpec.from_arguments(arguments)
        engine = await asyncio.to_thread(build_engine, spec.config, silent, spec.metrics_prefix, spec.model_name)
        self._reporter = StateReporter(engine.scheduler)
        self._service = AsyncEngine(engine, step_timeout_s=spec.step_timeout)
        self._service.start()
        notation = find_notation(engine.tokenizer, spec.tool_call_parser, spec.reasoning_parser)
        name = spec.model_name or engine.model.name
        self._app = RequestIds(build_app(self._service, name, spec.access(), spec.limits, notation, ui=spec.ui))
        self._wait = 0.0
        self._name = serve.get_replica_context().replica_id.unique_id
        favour_latency()

    async def answer(self, call: RoutedCall, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the answer. The router reads `call`.

        Raises LookupError if another replica, which has gone, was to answer.
        """
        if call.only not in (None, self._name):
            raise LookupError(f"replica {call.only} has gone")
        async for messages in call_app(self._app, request, self._facts(call, request)):
            for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (REPLICA_HEADER, self._name.encode())]
            yield messages

    def _facts(self, call: RoutedCall, request: ForwardedRequest) -> IngressFacts:
        if call.routing is None:
            return IngressFacts(request.prompts())
        routing = dict(call.routing)
        if routing["replica"] != self._name:
            routing |= {"replica": self._name, "reason": f"{routing['replica']} did not respond"}
        return IngressFacts(request.prompts(), routing["age_ms"] / 1e3, routing)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the state for the router. Ray Serve calls this in intervals."""
        self._service.recent.sample()
        state = await self._service.call(lambda core: self._reporter.report(time.time()))
        self._wait = max(state.backlog_seconds, state.seconds_to_admission(state.num_waiting))
        return {**asdict(state), "prefixes": b"".join(state.prefixes)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the expected wait for a first token, in seconds."""
        return {WAIT: self._wait}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot serve. Ray Serve then replaces the replica."""
        if (problem := self._service.diagnose()) is not None:
            raise RuntimeError(problem)
