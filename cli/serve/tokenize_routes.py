"""HTTP routes /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from llmsched.cli.serve.api_errors import json_response
from llmsched.cli.serve.preparation_turns import PreparationTurns
from llmsched.cli.serve.protocol import Int, Message, Schema, TemplateOptions
from llmsched.engine.core import Engine
from llmsched.engine.errors import RequestError
from llmsched.engine.text.chat import render_chat
from llmsched.engine.text.tokenizer import Tokenizer


class TokenizeRequest(TemplateOptions):
    """Body of POST /tokenize: a text, or the messages of a chat."""

    unsupported: ClassVar[Mapping[str, Any]] = {"tools": [], "chat_template": None, "mm_processor_kwargs": None}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Int], Field(fail_fast=True)]


def tokenize_routes(
    engine: Engine,
    turns: PreparationTurns,
    read: Callable[[Request, type[Any]], Awaitable[tuple[Any, int]]],
    check_model: Callable[[str | None], None],
) -> APIRouter:
    """Return the routes /tokenize and /detokenize (POST). They take texts that are longer than the context too."""
    router = APIRouter()
    tokenizer = engine.tokenizer

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request, body_bytes = await read(http, TokenizeRequest)
        check_model(request.model)
        (tokens,) = await turns.collect(_tokens(tokenizer, request), body_bytes)
        strings = [tokenizer.backend.id_to_token(token) for token in tokens] if request.return_token_strs else None
        length = engine.config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings})

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request, body_bytes = await read(http, DetokenizeRequest)
        check_model(request.model)
        (text,) = await turns.collect(_text(engine, request), body_bytes)
        return json_response({"prompt": text})

    return router


def _tokens(tokenizer: Tokenizer, request: TokenizeRequest) -> Iterator[list[int]]:
    """Yield the token ids, as the routes for completions and chats would compute them."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt", "give either prompt or messages")
    options = request.template_kwargs()
    if request.prompt is None:
        if request.add_special_tokens:
            raise RequestError("add_special_tokens", "only a prompt can have it; the template writes a chat's own")
        messages = [message.model_dump(exclude_none=True) for message in request.messages or ()]
        yield render_chat(tokenizer, messages, **options)
    else:
        escaped = not options.get("parse_special", True)
        text = tokenizer.escape(request.prompt) if escaped else request.prompt
        yield tokenizer.encode(text, request.add_special_tokens is not False, escaped=escaped)


def _text(engine: Engine, request: DetokenizeRequest) -> Iterator[str]:
    last = engine.model.vocab_size - 1
    if wrong := next((token for token in request.tokens if not 0 <= token <= last), None):
        raise RequestError("tokens", f"tokens has the id {wrong}; allowed is 0 to {last}")
    yield engine.tokenizer.decode(request.tokens, skip_special_tokens=False)
