from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.bench.report.detailed_file import read_request
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, UrlOption, checked, server_client
from llmsched.cli.timeline import saved_entries
from llmsched.cli.timeline_words import decision_text, summary
from llmsched.engine.errors import LlmschedError


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The id in the server's answer (cmpl-...) or its X-Request-Id; with --file, also the request's index.",
        ),
    ],
    url: UrlOption = DEFAULT_URL,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Read the request from a file written by `bench --save-detailed`, not from a server.",
        ),
    ] = None,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where the time of one request went: waits, computation, preemptions, and the reason for each.

    The server keeps the scheduler's decisions about its latest 2,048 requests.

    \b
    Examples:
      llmsched explain cmpl-0c2f5a9e
      llmsched explain chatcmpl-77ab --url http://gpu-box:8000 --json
      llmsched bench demo --save-detailed run.jsonl; llmsched explain 17 --file run.jsonl
    """
    if file is not None:
        if url != DEFAULT_URL:
            raise LlmschedError("--url and --file do not go together: a file needs no server")
        if api_key is not None:
            raise LlmschedError("--api-key and --file do not go together: a file needs no key")
        try:
            explain_saved(read_request(file, request_id), as_json)
        except (KeyError, TypeError, ValueError) as problem:
            raise LlmschedError(f"--file {file}: its request {request_id!r} is damaged ({problem})") from problem
        return
    answer = _fetch(url, request_id, api_key)
    if as_json:
        render.emit_json(answer)
        return
    for choice in answer["choices"]:
        name = request_id if len(answer["choices"]) == 1 else f"{request_id}, choice {choice['index']}"
        _show(f"{name}: {summary(choice['entries'])}", ("ms after arrival", "decision", "why"), choice["entries"])


def _fetch(url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    from urllib.parse import quote

    with server_client(url, api_key) as client:
        return checked(client.get(f"/v1/requests/{quote(request_id, safe='')}/explain"), "choices")


def explain_saved(request: dict[str, Any], as_json: bool) -> None:
    """Print the client's events of a saved request and, if known, the scheduler's decisions about it."""
    entries = saved_entries(request)
    if as_json:
        render.emit_json({**request, "entries": entries})
        return
    decisions = request.get("decisions")
    name = f"request {request['index']}" + (f" ({request['id']})" if request["id"] else "")
    if decisions:
        outline = summary(decisions)
    elif request["failure"] is not None:
        outline = f"failed ({request['failure']['reason']})"
    else:
        ttft, e2e = (render.human_seconds(request[name] / 1e3) for name in ("ttft_ms", "e2e_ms"))
        outline = f"first token after {ttft}, last of {request['output_tokens']} after {e2e}"
    _show(f"{name}: {outline}", ("ms after it was due", "what", "why"), entries)
    if not decisions:
        render.note("the target did not report its scheduler's decisions")


def _show(title: str, columns: Sequence[str], entries: Sequence[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        at, until = f"{entry['at_ms']:.1f}", f"{entry['until_ms']:.1f}"
        rows.append((at if at == until else f"{at} to {until}", entry["what"], decision_text(entry)))
    render.table(title, columns, rows, text_columns=3)
