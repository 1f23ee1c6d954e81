"""Page at / for browsers: a chat with the model and the live figures of /v1/stats."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")


def web_page_route() -> APIRouter:
    """Return the route /. The page holds no data, so it needs no key; its scripts ask the other routes for data."""
    content = _FILE.read_bytes()
    headers = {
        "Content-Security-Policy": content_security_policy(content),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    router = APIRouter()

    @router.head("/", include_in_schema=False)
    @router.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return Response(content, headers=headers, media_type="text/html; charset=utf-8")

    return router


def content_security_policy(html: bytes) -> str:
    """Return a policy that allows the page's own script and style, and requests to the server it came from."""
    allowed = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
        )
        for kind, tag in (("script-src", b"script"), ("style-src", b"style"))
    }
    rules = {
        "default-src": "'none'",
        **allowed,
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {sources}" for name, sources in rules.items())
