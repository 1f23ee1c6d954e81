from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from llmsched.cli.serve.api_errors import json_response
from llmsched.cli.serve.chat_messages import Message
from llmsched.cli.serve.openapi import with_body
from llmsched.cli.serve.prompt_tokenizer import PromptTokenizer, dumped
from llmsched.cli.serve.protocol import Int, ModelRequest, TemplateOptions
from llmsched.engine.core import Engine
from llmsched.engine.errors import RequestError


class TokenizeRequest(TemplateOptions, ModelRequest):
    """Body of POST /tokenize: a text, or the messages of a chat."""

    unsupported: ClassVar[Mapping[str, Any]] = {"chat_template": None, "mm_processor_kwargs": None}

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest):
    tokens: Annotated[list[Int], Field(fail_fast=True)]


def tokenize_routes(engine: Engine, prompts: PromptTokenizer, prepare: Callable[..., Awaitable[Any]]) -> APIRouter:
    """Return the routes /tokenize and /detokenize (POST), with vLLM's fields."""
    router = APIRouter()
    tokenizer, last = engine.tokenizer, engine.model.vocab_size - 1

    def tokens_of(request: TokenizeRequest) -> Iterator[list[int]]:
        """Yield the token ids, as the routes for completions and chats would compute them."""
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        options = request.template_kwargs()
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            yield prompts.token_ids(request.prompt, options.get("parse_special", True), special)
        elif request.add_special_tokens:
            raise RequestError("add_special_tokens", "only a prompt can have it; the template writes a chat's own")
        else:
            yield prompts.chat_ids(dumped(request.messages or ()), options)

    def text_of(request: DetokenizeRequest) -> Iterator[str]:
        if wrong := next((token for token in request.tokens if not 0 <= token <= last), None):
            raise RequestError("tokens", f"tokens has the id {wrong}; allowed is 0 to {last}")
        yield tokenizer.decode(request.tokens, skip_special_tokens=False)

    @router.post("/tokenize", openapi_extra=with_body(TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        request, (tokens,) = await prepare(http, TokenizeRequest, tokens_of)
        strings = [tokenizer.backend.id_to_token(token) for token in tokens] if request.return_token_strs else None
        length = engine.config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings})

    @router.post("/detokenize", openapi_extra=with_body(DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        _, (text,) = await prepare(http, DetokenizeRequest, text_of)
        return json_response({"prompt": text})

    return router
