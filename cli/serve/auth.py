"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from llmsched.cli.serve.api_errors import ApiError


def require_key(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a request pass only with `Authorization: Bearer <api_key>`; None lets everyone pass."""

    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared in constant time: how long it takes tells nothing of the key. Headers are bytes, read as Latin-1.
        key = given.strip(" \t").encode("latin-1")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key, api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check
