from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.bench.report.detailed_file import read_request
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, UrlOption, checked, server_client
from llmsched.cli.timeline import saved_entries
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

    The server keeps the scheduler's decisions about its latest 2,000 requests.

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


def summary(entries: Sequence[dict[str, Any]]) -> str:
    """Return a line that says how long the request waited, how often it was preempted and how it ended."""
    admitted = [entry for entry in entries if entry["what"] == "admitted"]
    waited = render.human_seconds((admitted[0] if admitted else entries[-1])["until_ms"] / 1e3)
    told = [f"waited {waited}" if admitted else f"not admitted after {waited}"]
    if preempted := sum(entry["count"] for entry in entries if entry["what"] == "preempted"):
        told.append(f"preempted {times(preempted)}")
    last = entries[-1]
    if last["what"] == "finished":
        details = last["details"]
        told.append(
            f"ended ({details['reason']}) after {render.human_seconds(last['at_ms'] / 1e3)} "
            f"with {details['output_tokens']} tokens"
        )
    else:
        told.append("has not ended")
    return ", ".join(told)


def decision_text(entry: dict[str, Any]) -> str:
    details = entry["details"]
    try:
        words = _WORDS[entry["what"]](details)
    except KeyError:
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in details.items())
    return words if entry["count"] == 1 else f"{words} ({times(entry['count'])})"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


#: Words for each WaitReason of the scheduler.
_WAITED_FOR = {
    "slot": "room among the running requests (max_num_seqs)",
    "memory": "memory",
    "step": "token budget",
    "prefix": "a prefix that another request was computing",
}


def _admitted(details: dict[str, Any]) -> str:
    words = f"{details['cached_tokens']} of {details['tokens']} tokens cached, {details['running']} running"
    if waits := [
        f"{render.human_seconds(ms / 1e3)} for {name}"
        for what, name in _WAITED_FOR.items()
        if (ms := details.get(f"waited_for_{what}_ms"))
    ]:
        words = f"waited {', '.join(waits)}; {words}"
    if restored := details.get("restored_blocks"):
        words += f"; {restored} blocks copied back from host memory"
    prefix, known = details.get("prefix"), details.get("known_tokens")
    if prefix == "diverged":
        return f"{words}; same as cached text up to token {known}, then different"
    if prefix == "evicted":
        age = details.get("evicted_s_ago")
        return f"{words}; the rest was evicted" + ("" if age is None else f" {render.human_seconds(age)} ago")
    return words if prefix in (None, "hit") else f"{words}; not cached: {prefix}"


def _does_not_fit(details: dict[str, Any]) -> str:
    when = {
        "now": f"with a headroom of {details['headroom_blocks']}",
        "predicted peak": "at the running requests' predicted peak",
    }[details["reason"]]
    return (
        f"{details['missing_blocks']} blocks short {when}; {details['free_blocks']} available, "
        f"{details['running']} running"
    )


def _preempted(details: dict[str, Any]) -> str:
    cost = render.human_seconds(details["cost_ms"] / 1e3)
    reason = {
        "memory": "memory ran out",
        "class": "a request of higher priority needed its room",
        "step_memory": "a step ran out of memory",
    }[details["reason"]]
    if details["how"] == "swap":
        return f"{reason}; {details['swapped_blocks']} blocks swapped to host memory, about {cost} out and back"
    return f"{reason}; {details['lost_tokens']} tokens to recompute, about {cost}"


def _computed(details: dict[str, Any]) -> str:
    words = f"up to token {details['up_to']} of {details['of']}"
    if details.get("reason") != "itl":
        return words
    within, decoding = render.human_seconds(details["step_ms"] / 1e3), details["decoding"]
    return f"{words}; each step is kept within {within} for the tokens of {decoding} decoding requests"


#: Functions that put the details of a scheduler's decision or of a client's event into words, by the name of the entry.
_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "queued": lambda d: f"{d['ahead']} waiting, {d['running']} running",
    "held back": lambda d: str(d["reason"]),
    "passed": lambda d: f"{d['by']} (priority {d['by_priority']}) goes first; overtaken {times(d['times'])} so far",
    "waits for a prefix": lambda d: f"another request is computing {d['tokens']} tokens that both need",
    "does not fit": _does_not_fit,
    "admitted": _admitted,
    "preempted": _preempted,
    "computed": _computed,
    "longest stall": lambda d: f"{render.human_seconds(d['lasted_ms'] / 1e3)} without a token",
    "failed": lambda d: f"{d['reason']}: {d['detail']}" if d["detail"] else str(d["reason"]),
    "complete": lambda d: f"{d['output_tokens']} tokens",
    "finished": lambda d: f"{d['reason']}, {d['output_tokens']} tokens",
}
