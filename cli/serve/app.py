from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from llmsched.cli.serve.access import Access
from llmsched.cli.serve.api_errors import ApiError, api_error, json_response
from llmsched.cli.serve.api_keys import ApiKey
from llmsched.cli.serve.choice_formats import ChatFormat, ChoiceFormat, CompletionFormat, TokenWriter
from llmsched.cli.serve.completion_response import AnswerFailedError, CompletionResponse
from llmsched.cli.serve.explain_route import LatestAnswers, explain_route
from llmsched.cli.serve.health_routes import health_routes
from llmsched.cli.serve.http_body import read_body, until_disconnect
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.cli.serve.key_budgets import KeyBudgets
from llmsched.cli.serve.middleware import with_cors
from llmsched.cli.serve.openapi import describe, with_body
from llmsched.cli.serve.prefix_routes import prefix_cache_routes
from llmsched.cli.serve.preparation_turns import SMALL_BYTES, PreparationTurns, Work
from llmsched.cli.serve.prompt_preparation import PreparedPrompt, Preparer
from llmsched.cli.serve.protocol import (
    MAX_VALUES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelRequest,
    PrefixRequest,
    parse,
)
from llmsched.cli.serve.request_context import (
    CLASS_HEADER,
    DEADLINE_HEADER,
    RequestContext,
    ingress_facts,
    priority_of,
    seconds_allowed,
)
from llmsched.cli.serve.request_log import EndedRequest, RequestObserver
from llmsched.cli.serve.responses_answer import ResponsesAnswer, ResponsesFormat
from llmsched.cli.serve.responses_request import ResponsesRequest
from llmsched.cli.serve.sse_response import EventStream
from llmsched.cli.serve.stats_routes import slowest_route, stats_route
from llmsched.cli.serve.tokenize_routes import DetokenizeRequest, TokenizeRequest, tokenize_routes
from llmsched.cli.serve.web_page import web_page_route
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.config import adapter_directories
from llmsched.engine.errors import EngineDeadError, LlmschedError
from llmsched.engine.request import ChoiceRecord
from llmsched.engine.text.parsers.notation import Notation, find_notation

T = TypeVar("T")
R = TypeVar("R", bound=ModelRequest)
G = TypeVar("G", bound=GenerationRequest)
F = TypeVar("F", bound=ChoiceFormat)

_ROUTES = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize and /detokenize"
#: Routes whose refusals are counted.
_MODEL_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Request bodies that /openapi.json describes.
_BODIES = (CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest, PrefixRequest)
#: Most names that the error for an unknown model lists.
MAX_NAMES = 8


def build_app(
    engine: AsyncEngine,
    model_name: str,
    access: Access | None = None,
    limits: HttpLimits | None = None,
    notation: Notation | None = None,
    observers: Sequence[RequestObserver] = (),
    *,
    ui: bool = True,
) -> ASGIApp:
    """Return the ASGI application that serves `engine`. `access` does not apply to /, /health, /ready, /metrics
    and /openapi.json.

    `notation` says how the model writes tool calls and reasoning (default: detected from its chat template). Each
    observer is called when a request that produced choices has ended. Without `ui` there is no page at /.
    """
    access = access or Access()
    app = FastAPI(title="llmsched", version=version("llmsched"), docs_url=None, redoc_url=None)
    describe(app, _BODIES)
    app.include_router(health_routes(engine))
    if ui:
        app.include_router(web_page_route())
    notation = notation or find_notation(engine.core.tokenizer)
    served = _ServedModel(engine, model_name, limits or HttpLimits(), notation, observers)
    for router in (
        _model_routes(served),
        tokenize_routes(engine.core, served.preparer.prompt_tokenizer, served.prepare),
        explain_route(engine, served.answer_ids, served.routings, served.limits.max_choices),
        stats_route(engine, model_name),
    ):
        app.include_router(router, dependencies=[Depends(access.client)])
    for router in (prefix_cache_routes(engine, served.preparer, served.prepare), slowest_route(engine)):
        app.include_router(router, dependencies=[Depends(access.admin)])

    @app.exception_handler(LlmschedError)
    async def answer_error(request: Request, error: LlmschedError) -> Response:
        known = api_error(error)
        if request.url.path in _MODEL_PATHS and not isinstance(known, AnswerFailedError):
            engine.core.metrics.refused(known.code or "invalid_request")
        return known.response()

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        """Answer an unknown route or a wrong method in OpenAI's error shape."""
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        if error.status_code == 404:
            message += f"; this server answers {_ROUTES}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(ClientDisconnect)
    async def answer_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def answer_failure(_: Request, error: Exception) -> Response:
        """Answer an unexpected error with a 500. Starlette raises it again, and RequestIds logs it."""
        return api_error(error).response()

    return with_cors(app, access.cors_origins) if access.cors_origins else app


def _model_routes(served: _ServedModel) -> APIRouter:
    router = APIRouter()

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [served.card(name) for name in served.names]})

    @router.head("/v1/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(served.card(served.chosen(name)))

    @router.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version("llmsched")})

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise ApiError(404, "this server generates text and computes no embeddings; ask a server of an embedding model")

    @router.post("/v1/completions", openapi_extra=with_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await served.answer(request, CompletionRequest, served.preparer.completion, CompletionFormat)

    @router.post("/v1/chat/completions", openapi_extra=with_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await served.answer(request, ChatRequest, served.preparer.chat, ChatFormat)

    @router.post("/v1/responses", openapi_extra=with_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        return await served.answer_response(request)

    return router


class _ServedModel:
    def __init__(
        self,
        engine: AsyncEngine,
        model_name: str,
        limits: HttpLimits,
        notation: Notation,
        observers: Sequence[RequestObserver],
    ) -> None:
        self.limits = limits
        self.preparer = Preparer(engine.core, notation)
        self.answer_ids = LatestAnswers[str]()
        self.routings = LatestAnswers[Mapping[str, Any]]()
        self._key_budgets = KeyBudgets(engine.core.metrics)
        self._observers = observers
        self._engine = engine
        self._model_name = model_name
        self._adapter_directories = adapter_directories(engine.core.config.lora)
        self._writer = TokenWriter(engine.core.tokenizer)
        self._created = int(time.time())
        self._turns = PreparationTurns(is_serving=lambda: engine.num_open > 0)

    @property
    def names(self) -> list[str]:
        """Names of the model and of its LoRA adapters."""
        return [self._model_name, *self._engine.core.adapters]

    def card(self, name: str) -> dict[str, Any]:
        config = self._engine.core.config
        directory = self._adapter_directories.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "llmsched",
            "root": config.model if directory is None else str(directory),
            "parent": None if directory is None else self._model_name,
            "max_model_len": config.max_model_len,
        }

    def chosen(self, name: str | None) -> str:
        """Return the served name that a request asks for (None: the model's). Raises ApiError 404 for any other."""
        if name is None:
            return self._model_name
        if name not in self.names:
            served = ", ".join(map(repr, self.names[:MAX_NAMES]))
            more = f" and {len(self.names) - MAX_NAMES} more" if len(self.names) > MAX_NAMES else ""
            raise ApiError(
                404,
                f"model {name[:200]!r} is not served here; this server has {served}{more}",
                param="model",
                code="model_not_found",
            )
        return name

    async def prepare(self, http: Request, schema: type[R], steps: Callable[[R], Iterator[T]]) -> tuple[R, list[T]]:
        """Read a request from the body. Return it and the items of `steps(request)`, which are collected in threads.

        Raises RequestError for an invalid request, ApiError 404 for a model that is not served, ApiError 413 for a body
        that is too large, and ClientDisconnect if the client disconnects before all items are collected.
        """
        body = await read_body(http, self.limits.max_body_size)
        large = len(body) > SMALL_BYTES
        max_values = MAX_VALUES + self._engine.core.config.max_model_len

        def parsed() -> Iterator[R]:
            yield parse(schema, body, self.limits.max_choices, max_values)

        (request,) = await self._turns.collect(parsed(), Work.LARGE) if large else parsed()
        self.chosen(request.model)
        work = Work.LARGE if large else Work.SMALL
        if self.preparer.may_compile(request, large=large):
            work = Work.COMPILING
        return request, await until_disconnect(http.receive, self._turns.collect(steps(request), work))

    async def answer(
        self,
        http: Request,
        schema: type[G],
        prepare: Callable[[G, Sequence[list[int]] | None], Iterator[PreparedPrompt]],
        make_format: Callable[[G, list[PreparedPrompt], TokenWriter], ChoiceFormat],
    ) -> Response:
        arrival = self._begin(http)
        request, prompts = await self._prepare_prompts(http, schema, prepare)
        return await self._respond(http, arrival, make_format(request, prompts, self._writer), CompletionResponse)

    async def answer_response(self, http: Request) -> Response:
        """Answer a request to /v1/responses."""
        arrival = self._begin(http)
        request, prompts = await self._prepare_prompts(http, ResponsesRequest, self.preparer.response)
        choice_format = ResponsesFormat(request.chat, prompts, self._writer)
        return await self._respond(http, arrival, choice_format, partial(ResponsesAnswer, request))

    async def _prepare_prompts(
        self,
        http: Request,
        schema: type[R],
        prepare: Callable[[R, Sequence[list[int]] | None], Iterator[PreparedPrompt]],
    ) -> tuple[R, list[PreparedPrompt]]:
        known = ingress_facts(http).prompts
        return await self.prepare(http, schema, lambda request: prepare(request, known))

    def _begin(self, http: Request) -> float:
        """Return the time at which the request arrived, here or at the ingress, on the engine's clock.

        Raises EngineDeadError or QueueFullError if the server takes no requests now, and ApiError 429 if the sender's
        API key has used up its budget.
        """
        if self._engine.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        self._engine.check_queue()
        if (key := http.state.api_key) is not None:
            self._key_budgets.begin(key)
        return self._engine.core.clock() - ingress_facts(http).age

    async def _respond(
        self,
        http: Request,
        arrival: float,
        choice_format: F,
        make_response: Callable[[AsyncEngine, F, str, RequestContext], CompletionResponse],
    ) -> Response:
        request, headers = choice_format.request, http.headers
        model_name = self.chosen(request.model)
        key: ApiKey | None = http.state.api_key

        def on_end(answer_id: str, records: list[ChoiceRecord]) -> None:
            if key is not None:
                self._key_budgets.take_tokens(key, sum(each.num_output_tokens for each in records), "generation_tokens")
            if records and self._observers:
                name, path, streamed = None if key is None else key.name, http.url.path, bool(request.stream)
                ended = EndedRequest(
                    context.request_id,
                    answer_id,
                    path,
                    model_name,
                    name,
                    streamed,
                    records,
                    headers,
                    choice_format.prompts[0].sampling,
                )
                for observe in self._observers:
                    observe(ended)

        context = RequestContext(
            http.state.request_id,
            priority_of(request.priority, headers.get(CLASS_HEADER)),
            arrival + seconds_allowed(request.timeout, headers.get(DEADLINE_HEADER)),
            on_end,
        )
        if context.deadline < math.inf:
            await self._check_deadline(choice_format, model_name, context)
        response = make_response(self._engine, choice_format, model_name, context)
        self.answer_ids.add(http.state.request_id, response.id)
        if (routing := ingress_facts(http).routing) is not None:
            self.routings.add(response.id, routing)
        limits: dict[str, str] = {}
        if key is not None:
            num_tokens = sum(len(prompt.token_ids) for prompt in choice_format.prompts)
            self._key_budgets.take_tokens(key, num_tokens, "prompt_tokens")
            limits = self._key_budgets.headers(key)
        if request.stream:
            return EventStream(response.events, response.abort, self.limits.sse_keep_alive, limits)
        return json_response(await until_disconnect(http.receive, response.whole()), headers=limits)

    async def _check_deadline(self, choice_format: ChoiceFormat, model_name: str, context: RequestContext) -> None:
        """Raise DeadlineError if the first token is predicted to miss the deadline."""
        prompts = choice_format.prompts
        await self._engine.call(
            lambda core: core.check_deadline(
                [prompt.token_ids for prompt in prompts],
                max(prompt.sampling.max_tokens for prompt in prompts),
                deadline=context.deadline,
                priority=context.priority,
                cache_salt=choice_format.request.cache_salt or "",
                adapter=model_name if model_name in core.adapters else None,
            )
        )
