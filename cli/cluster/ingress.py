"""Ingress: reads each HTTP request, and forwards it to the replica that the router chooses."""

# Ray Serve copies the methods of Ingress, and the globals that they use, when the class is created. So this module has
# no postponed annotations, and globals that change later are read as attributes of their modules.

import time
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from llmsched.cli.cluster.forwarded_answer import ForwardedAnswer
from llmsched.cli.cluster.forwarded_request import ForwardedRequest
from llmsched.cli.cluster.merged_answers import merge_cache, merge_slowest, merge_stats
from llmsched.cli.cluster.prompt_reader import PromptReader, ReadPrompts
from llmsched.cli.cluster.replica_group import ReplicaGroup
from llmsched.cli.cluster.replica_spec import ReplicaSpec
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_body import read_body
from llmsched.cli.serve.preparation_turns import SMALL_BYTES, PreparationTurns, Work
from llmsched.engine.config import adapter_directories
from llmsched.engine.model.loader import load_config, load_info, load_tokenizer
from llmsched.engine.model.source import locate

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


def prompt_reader(spec: ReplicaSpec) -> PromptReader:
    """Return a reader of prompts with the tokenizer and the limits of the replicas."""
    source = locate(spec.config.model)
    tokenizer = load_tokenizer(source)
    longest = spec.config.max_model_len or load_info(source, load_config(source), tokenizer).max_position
    adapters = list(adapter_directories(spec.config.lora))
    return PromptReader(tokenizer, longest, spec.config.block_size, adapters, spec.limits.max_choices)


@serve.ingress(app)
class Ingress:
    """Deployment of Ray Serve that receives all HTTP requests."""

    def __init__(self, arguments: dict[str, Any], replicas: DeploymentHandle) -> None:
        spec = ReplicaSpec.from_arguments(arguments)
        self._max_body_size = spec.limits.max_body_size
        self._access = spec.access()
        self._reader = prompt_reader(spec)
        self._turns = PreparationTurns(is_serving=lambda: True)
        self._replicas = replicas.options(stream=True)
        self._all = ReplicaGroup(self._replicas)

    @app.get("/metrics")
    async def metrics(self, request: Request) -> Response:
        return await self._all.metrics(request)

    @app.get("/v1/stats")
    async def stats(self, request: Request) -> Response:
        return await self._all.merged(request, merge_stats, b"histograms=true")

    @app.get("/v1/cache")
    async def cache(self, request: Request) -> Response:
        return await self._all.merged(request, merge_cache)

    @app.get("/v1/requests/slowest")
    async def slowest(self, request: Request) -> Response:
        return await self._all.merged(request, merge_slowest)

    @app.get("/v1/requests/{given:path}/explain")
    async def explain(self, request: Request, given: str) -> Response:
        return await self._all.first_to_know(request)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(self, request: Request) -> Response:
        return await self._all.told(request)

    @app.api_route("/v1/prefixes{rest:path}", methods=["GET", "POST", "DELETE"])
    async def prefixes(self, rest: str) -> Response:
        message = "prefixes cannot be pinned with --replicas: a pin would reach one replica only"
        return ApiError(501, message, code="not_with_replicas").response()

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def forward(self, request: Request, path: str) -> Response:
        """Forward a request, and return the answer of a replica."""
        arrival = time.monotonic()
        try:
            body = await read_body(request, self._max_body_size)
        except ApiError as error:
            return error.response()
        prompts = await self._read_prompts(request, body)
        forwarded = ForwardedRequest.of(request, body, prompts.token_ids)
        return ForwardedAnswer(self._replicas, prompts.first, forwarded, arrival)

    async def _read_prompts(self, request: Request, body: bytes) -> ReadPrompts:
        """Return the prompts of a request, not tokenised if a replica will refuse its sender."""
        try:
            await self._access.client(request)
        except ApiError:
            return self._reader.unread(body)
        work = Work.LARGE if len(body) > SMALL_BYTES else Work.SMALL
        (prompts,) = await self._turns.collect(self._reader.read(request.url.path, body), work)
        return prompts
