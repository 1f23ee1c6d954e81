"""HTTP routes of the prefix cache (statistics, pinned prefixes, reset), and `serve --pin-prefix FILE`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmsched.cli import render
from llmsched.cli.live_stats import hit_counts
from llmsched.cli.serve.api_errors import ApiError, json_response
from llmsched.cli.serve.openapi import with_body
from llmsched.cli.serve.prompt_preparation import Preparer
from llmsched.cli.serve.protocol import PrefixRequest, parse
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, EngineDeadError, RequestError
from llmsched.engine.kv.pins import PinState
from llmsched.engine.prompt_changes import PromptChange
from llmsched.engine.stats import EngineStats


def prefix_cache_routes(
    engine: AsyncEngine,
    preparer: Preparer,
    prepare: Callable[..., Awaitable[tuple[PrefixRequest, list[list[int]]]]],
) -> APIRouter:
    """Return the routes /v1/cache (GET), /v1/prefixes (GET, POST, DELETE) and /reset_prefix_cache (POST)."""
    router = APIRouter()

    @router.get("/v1/cache")
    async def cache() -> Response:
        change = await engine.call(lambda core: core.prefixes.changes.check())
        return json_response(cache_body(engine.stats(), engine.core.config.block_size, change))

    @router.get("/v1/prefixes")
    async def prefixes() -> Response:
        pins = await engine.call(lambda core: core.prefixes.pins())
        return json_response({"object": "list", "data": [_pin_body(pin) for pin in pins]})

    @router.post("/v1/prefixes", openapi_extra=with_body(PrefixRequest))
    async def pin(http: Request) -> Response:
        if engine.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        request, (token_ids,) = await prepare(http, PrefixRequest, preparer.prefix)
        try:
            state = await engine.call(lambda core: _pin(core, token_ids, request))
        except RequestError as error:
            given = "prompt" if request.messages is None else "messages"
            raise RequestError(error.param if error.param == "ttl" else given, str(error), error.code) from error
        return json_response(_pin_body(state))

    @router.delete("/v1/prefixes/{prefix_id}")
    async def unpin(prefix_id: str) -> Response:
        try:
            await engine.call(lambda core: core.prefixes.unpin(prefix_id))
        except RequestError as error:
            raise ApiError(404, str(error), param="prefix_id", code="prefix_not_found") from error
        return json_response({"id": prefix_id, "object": "prefix", "deleted": True})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await engine.call(lambda core: core.prefixes.reset())
        return json_response({"status": "ok"})

    return router


def cache_body(stats: EngineStats, block_size: int, change: PromptChange | None) -> dict[str, Any]:
    """Return the body of GET /v1/cache. `change` tells at which early token recent prompts differ."""
    queried, hit = stats.prefix_queried_tokens, stats.prefix_hit_tokens
    changed: dict[str, Any] | None = None
    if change is not None:
        quoted = None if change.private else change.examples
        examples = quoted and [example._asdict() for example in quoted]
        changed = {"position": change.position, "count": change.count, "window": change.window, "examples": examples}
    return {
        "object": "cache",
        "block_size": block_size,
        "blocks": {
            "total": stats.blocks_total,
            "used": stats.blocks_used,
            "cached": stats.blocks_cached,
            "free": stats.blocks_free,
            "pinned": stats.blocks_pinned,
            "max_pinned": stats.max_blocks_pinned,
        },
        "prompt_tokens": {"queried": queried, "hit": hit, "hit_rate": hit / queried if queried else None},
        "recomputed_tokens": stats.recomputed_tokens,
        "requests": hit_counts(stats.prefix_misses),
        "prompt_change": changed,
    }


def _pin(engine: Engine, token_ids: list[int], request: PrefixRequest) -> PinState:
    adapter = request.model if request.model in engine.adapters else None
    return engine.prefixes.pin(token_ids, cache_salt=request.cache_salt or "", adapter=adapter, ttl=request.ttl)


def _pin_body(pin: PinState) -> dict[str, Any]:
    """Return a pin as JSON: its length and its cached part in tokens, and the seconds until it expires."""
    return {
        "id": pin.pin_id,
        "object": "prefix",
        "tokens": pin.num_tokens,
        "written_tokens": pin.num_written_tokens,
        "expires_in": None if pin.expires_at is None else round(max(0.0, pin.expires_at - time.monotonic()), 3),
    }


def read_prefixes(paths: Sequence[Path]) -> list[tuple[Path, PrefixRequest]]:
    """Read the files of --pin-prefix: a .json file as the body of a POST to /v1/prefixes, others as plain text."""
    found = []
    for path in paths:
        try:
            if path.is_char_device():
                raise ConfigError("pin_prefix", f"{path}: is a device, not a file")
            content = path.read_bytes()
            request = (
                parse(PrefixRequest, content) if path.suffix == ".json" else PrefixRequest(prompt=content.decode())
            )
        except OSError as error:
            raise ConfigError("pin_prefix", f"{path}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError as error:
            raise ConfigError("pin_prefix", f"{path} is not UTF-8 text: {error.reason} at {error.start}") from error
        except RequestError as error:
            raise ConfigError("pin_prefix", f"{path}: {error.message}") from error
        found.append((path, request))
    return found


def pin_prefixes(
    engine: Engine, files: Sequence[tuple[Path, PrefixRequest]], served_model_name: str | None = None
) -> None:
    """Pin the prefixes; the engine computes them in its first steps. Raises ConfigError if one cannot be pinned.

    `served_model_name` is the name of the model in requests (None: the name in ModelInfo).
    """
    preparer = Preparer(engine)
    names = (served_model_name or engine.model.name, *engine.adapters)
    for path, request in files:
        if request.model not in (None, *names):
            raise ConfigError(
                "pin_prefix",
                f"{path}: model {request.model!r} is not served here; name one of {', '.join(names)}, or none",
            )
        try:
            (token_ids,) = preparer.prefix(request)
            pin = _pin(engine, token_ids, request)
        except RequestError as error:
            raise ConfigError("pin_prefix", f"{path}: {error.message}") from error
        render.note(f"{path}: the first {pin.num_tokens} of {len(token_ids)} tokens are pinned as {pin.pin_id}")
