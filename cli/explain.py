"""`llmsched explain`: where the time of one request went, as the scheduler's ledger has it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.engine.errors import LlmschedError


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The id in the server's answer (cmpl-...).")],
    url: Annotated[str, typer.Option("--url", help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key of the server; default: LLMSCHED_API_KEY.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell where the time of one request went: what it waited for, who passed it, how it was computed, what it lost.

    The server keeps the decisions about its latest two thousand requests.

    \b
    Examples:
      llmsched explain cmpl-0c2f5a9e
      llmsched explain chatcmpl-77ab --url http://gpu-box:8000 --json
    """
    answer = _fetch(url, request_id, api_key or os.environ.get("LLMSCHED_API_KEY"))
    if as_json:
        render.emit_json(answer)
        return
    for choice in answer["choices"]:
        name = request_id if len(answer["choices"]) == 1 else f"{request_id}, choice {choice['index']}"
        rows = [(_when(entry), entry["what"], _told(entry)) for entry in choice["entries"]]
        render.table(
            f"{name}: what the scheduler decided", ("ms after arrival", "decision", "why"), rows, text_columns=3
        )


def _fetch(url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    """The server's answer. Raises LlmschedError when there is none or it is a refusal."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{url.rstrip('/')}/v1/requests/{request_id}/explain"
    try:
        response = httpx.get(address, headers=headers, timeout=10.0)
        body = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise LlmschedError(f"{url} does not answer as an llmsched server: {error or type(error).__name__}") from error
    if response.status_code != 200:
        raise LlmschedError(body.get("error", {}).get("message") or f"{url} answered {response.status_code}")
    return dict(body)


def _when(entry: dict[str, Any]) -> str:
    if entry["count"] == 1:
        return f"{entry['at_ms']:.1f}"
    return f"{entry['at_ms']:.1f} to {entry['until_ms']:.1f}"


def _told(entry: dict[str, Any]) -> str:
    """The numbers of a decision in words: `missing_blocks` 3 becomes "missing blocks 3"."""
    told = [f"{name.replace('_', ' ')} {value}" for name, value in entry["details"].items()]
    if entry["count"] > 1:
        told.append(f"{entry['count']} times")
    return ", ".join(told)
