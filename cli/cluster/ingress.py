"""Ingress: reads each HTTP request, and forwards it to the replica that the router chooses."""

# Ray Serve copies the methods of Ingress, and the globals that they use, when the class is created. So this module has
# no postponed annotations, and globals that change later are read as attributes of their modules.

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from llmsched.cli.cluster import routed_call
from llmsched.cli.cluster.forwarded_answer import ForwardedAnswer, whole_answer
from llmsched.cli.cluster.forwarded_request import ForwardedRequest
from llmsched.cli.cluster.prompt_hashing import PromptHasher
from llmsched.cli.cluster.replica_metrics import merge_metrics
from llmsched.cli.cluster.replica_spec import ReplicaSpec
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_body import read_body
from llmsched.engine.config import adapter_directories
from llmsched.engine.model.loader import load_tokenizer
from llmsched.engine.model.source import locate

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.ingress(app)
class Ingress:
    """Deployment of Ray Serve that receives all HTTP requests."""

    def __init__(self, arguments: dict[str, Any], replicas: DeploymentHandle) -> None:
        spec = ReplicaSpec.from_arguments(arguments)
        self._max_body_size = spec.limits.max_body_size
        adapters = list(adapter_directories(spec.config.lora))
        self._hasher = PromptHasher(load_tokenizer(locate(spec.config.model)), spec.config.block_size, adapters)
        self._replicas = replicas.options(stream=True)

    @app.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas, each with the label `replica`."""
        forwarded, nothing = ForwardedRequest.of(request, b""), self._hasher.routed("", b"")
        texts = []
        names: list[str | None] = [*sorted(routed_call.known_replicas)]
        # One after the other, because Ray Serve cannot tell apart the calls that one request makes at the same time.
        for name in names or [None]:
            with suppress(RayError):  # the replica has just died
                texts.append(await whole_answer(self._replicas, RoutedCall(nothing, only=name), forwarded))
        return Response(merge_metrics(texts), media_type="text/plain")

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def forward(self, request: Request, path: str) -> Response:
        """Forward a request, and return the answer of a replica."""
        try:
            body = await read_body(request, self._max_body_size)
        except ApiError as error:
            return error.response()
        prompt = await asyncio.to_thread(self._hasher.routed, request.url.path, body)
        return ForwardedAnswer(self._replicas, prompt, ForwardedRequest.of(request, body))
