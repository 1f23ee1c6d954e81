from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli.quantities import server_url
from llmsched.engine.errors import LlmschedError

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option("--url", help="URL of the server.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", help="Key of the server; default: LLMSCHED_API_KEY.", show_default=False),
]


@contextmanager
def server_client(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    """Yield a client of a running server. Raises LlmschedError if a request in the block gets no valid answer."""
    import httpx

    from llmsched.engine.proxies import proxy_for

    url = server_url(url) or url
    key = api_key or os.environ.get("LLMSCHED_API_KEY")
    with (
        valid_answers(url),
        httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(10.0, read=600.0),
            proxy=proxy_for(url),
            verify=httpx.create_ssl_context(verify=url.startswith("https:")),
            trust_env=False,  # the two lines above follow the environment
        ) as client,
    ):
        yield client


@contextmanager
def valid_answers(url: object) -> Iterator[None]:
    """Raise LlmschedError if a request to `url` in the block gets no valid answer."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = str(error) or type(error).__name__
        advice = "; `llmsched serve` starts a server" if isinstance(error, httpx.ConnectError) else ""
        raise LlmschedError(f"no valid answer from an llmsched server at {url}: {reason}{advice}") from error


def checked(response: httpx.Response, key: str) -> dict[str, Any]:
    """Return a response's JSON object. Raises LlmschedError for an error response, ValueError if `key` is missing."""
    body = response.json()
    if response.status_code == 200 and isinstance(body, dict) and key in body:
        return body
    match body:
        case {"error": {"message": str(message)}}:
            raise LlmschedError(message)
        case _:
            raise ValueError(f"status {response.status_code}")
