"""All replicas as one: questions that each of them answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import Request
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from llmsched.cli.cluster import routed_call
from llmsched.cli.cluster.forwarded_answer import WholeAnswer
from llmsched.cli.cluster.forwarded_request import ForwardedRequest
from llmsched.cli.cluster.merged_answers import Bodies
from llmsched.cli.cluster.replica_metrics import merge_metrics
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.api_errors import ApiError, json_response
from llmsched.engine.routing.rules import RoutedPrompt

_NO_PROMPT = RoutedPrompt(0, (), 1)
_NO_REPLICA = ApiError(503, "no replica answers now; try again later", code="engine_unavailable")


class ReplicaGroup:
    """All replicas. They are asked one after the other: Ray Serve confuses calls that a request makes at once."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def answers(self, request: Request, query: bytes = b"") -> AsyncIterator[WholeAnswer]:
        """Yield the answer of each replica to a request. A replica that has just gone is left out."""
        forwarded = ForwardedRequest.of(request, query=query)
        names: list[str | None] = [*sorted(routed_call.known_replicas)]
        for name in names or [None]:
            try:
                answer = await WholeAnswer.to(self._replicas, RoutedCall(_NO_PROMPT, only=name), forwarded)
            except RayError:
                continue
            yield answer

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas, each with the label `replica`."""
        texts = [(answer.replica, answer.body.decode()) async for answer in self.answers(request)]
        return Response(merge_metrics(texts), media_type="text/plain")

    async def merged(
        self, request: Request, merge: Callable[[Bodies], Mapping[str, Any]], query: bytes = b""
    ) -> Response:
        """Return the merged JSON bodies of all replicas, or the answer of one that refuses the request."""
        bodies = {}
        async for answer in self.answers(request, query=query):
            if answer.status != 200:
                return answer.response()
            bodies[answer.replica] = json.loads(answer.body)
        return json_response(merge(bodies)) if bodies else _NO_REPLICA.response()

    async def first_to_know(self, request: Request) -> Response:
        """Return the answer of the first replica that does not answer 404."""
        last: WholeAnswer | None = None
        async for last in self.answers(request):
            if last.status != 404:
                break
        return _NO_REPLICA.response() if last is None else last.response()

    async def told(self, request: Request) -> Response:
        """Tell all replicas. Return the answer of one that refuses the request, else that of the first."""
        answers = [answer async for answer in self.answers(request)]
        answers.sort(key=lambda answer: answer.status < 400)
        return answers[0].response() if answers else _NO_REPLICA.response()
