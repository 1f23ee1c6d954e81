from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmsched.cli.serve.key_budgets import BUDGET_HEADERS
from llmsched.engine.errors import ConfigError

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
#: Valid request ids. Others from clients are replaced, because ids are written to logs.
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#,]+")


def new_id() -> str:
    return uuid.uuid4().hex


class RequestIds:
    """ASGI middleware that gives each request an id, `request.state.request_id`, and sends it back as X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _VALID_ID.fullmatch(given) else new_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed (X-Request-Id %s)", scope["path"], request_id)


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Wrap `app` so that web pages of these origins may send requests and read the answers (CORS)."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "Retry-After", *BUDGET_HEADERS],
    )


def read_origins(text: str | None) -> list[str]:
    """Return the origins in a text such as "https://a.example,http://localhost:3000". Raises ConfigError."""
    origins = [origin.strip().lower() for origin in text.split(",")] if text is not None else []
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                "cors_origins", f"{origin!r} is not an origin; write SCHEME://HOST[:PORT] without a path, or * for all"
            )
    return origins
