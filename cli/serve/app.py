"""The routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from llmsched.cli.serve.api_errors import ApiError, api_error, json_response
from llmsched.cli.serve.auth import require_key
from llmsched.cli.serve.body import read_body, until_disconnect
from llmsched.cli.serve.cache import cache_routes
from llmsched.cli.serve.choices import ChatStyle, CompletionStyle, Style
from llmsched.cli.serve.classes import CLASS_HEADER, priority_of
from llmsched.cli.serve.event_stream import EventStream
from llmsched.cli.serve.generation import Generation
from llmsched.cli.serve.prepare import PreparedPrompt, Preparer
from llmsched.cli.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse
from llmsched.cli.serve.timelines import timelines_of
from llmsched.cli.serve.tokens import TokenWriter
from llmsched.cli.timeline import timeline_body
from llmsched.engine.errors import EngineDeadError, LlmschedError
from llmsched.engine.service import AsyncEngine

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=GenerationRequest)


def build_app(engine: AsyncEngine, model_name: str, api_key: str | None = None) -> FastAPI:
    """The ASGI application that serves `engine` under `model_name`; with `api_key`, to those who send it."""
    app = FastAPI(title="llmsched", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_open_routes(engine))
    desk = _Desk(engine, model_name)
    for router in (_model_routes(engine, desk), cache_routes(engine, desk.preparer, desk.check_model)):
        app.include_router(router, dependencies=[Depends(require_key(api_key))])
    app.add_exception_handler(LlmschedError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    return app


def _open_routes(engine: AsyncEngine) -> APIRouter:
    """What probes and dashboards ask, without a key."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if engine.healthy and not engine.draining:
            return json_response({"status": "ok"})
        status = "draining" if engine.healthy else "dead"
        return json_response({"status": status, "error": engine.error}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _model_routes(engine: AsyncEngine, desk: _Desk) -> APIRouter:
    router = APIRouter()

    @router.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [desk.card()]})

    @router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def model(name: str) -> Response:
        desk.check_model(name)
        return json_response(desk.card())

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await desk.answer(request, CompletionRequest, desk.preparer.completion, CompletionStyle)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await desk.answer(request, ChatRequest, desk.preparer.chat, ChatStyle)

    @router.get("/v1/requests/{request_id}/explain")
    async def explain(request_id: str) -> Response:
        timelines = await timelines_of(engine, request_id)
        if not timelines:
            raise ApiError(
                404,
                f"request {request_id[:200]!r} is not known here; only the latest ones are kept",
                param="request_id",
                code="request_not_found",
            )
        return json_response({"id": request_id, "choices": [timeline_body(timeline) for timeline in timelines]})

    return router


class _Desk:
    """Takes requests for the one model that is served."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.preparer = Preparer(engine)
        self._engine = engine
        self._model_name = model_name
        self._writer = TokenWriter(engine.tokenizer)
        self._created = int(time.time())

    def card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "llmsched",
            "max_model_len": self._engine.config.max_model_len,
        }

    def check_model(self, name: str | None) -> None:
        """None, a field left out, means the one model there is."""
        if name is not None and name != self._model_name:
            raise ApiError(
                404,
                f"model {name[:200]!r} is not served here; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(
        self,
        http: Request,
        schema: type[R],
        prepare: Callable[[R], list[PreparedPrompt]],
        make_style: Callable[[R, list[PreparedPrompt], TokenWriter], Style],
    ) -> Response:
        """Read, check, tokenise, submit, answer. Whatever is wrong is told before a stream begins."""
        try:
            return await self._answer(http, schema, prepare, make_style)
        except (LlmschedError, ClientDisconnect):
            raise
        except Exception as error:
            logger.exception("%s failed", http.url.path)
            return api_error(error).response()

    async def _answer(
        self,
        http: Request,
        schema: type[R],
        prepare: Callable[[R], list[PreparedPrompt]],
        make_style: Callable[[R, list[PreparedPrompt], TokenWriter], Style],
    ) -> Response:
        if self._engine.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        request = parse(schema, await read_body(http))
        self.check_model(request.model)
        priority = priority_of(request.priority, http.headers.get(CLASS_HEADER))

        async def work() -> Response:
            prompts = await asyncio.to_thread(prepare, request)
            generation = Generation(
                self._engine, make_style(request, prompts, self._writer), self._model_name, priority
            )
            if request.stream:
                return EventStream(generation.events(), generation.abort)
            return json_response(await generation.whole())

        return await until_disconnect(http.receive, work())


async def _answer_error(_: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client has gone: nobody reads this (499 is what proxies log for it)."""
    return Response(status_code=499)
