from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.live_stats import status_line
from llmsched.cli.options.flags import duration_option
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, checked, server_client
from llmsched.engine.errors import LlmschedError, check_range
from llmsched.engine.units import three_figures

if TYPE_CHECKING:
    import httpx

#: Characters of the bar of KV blocks, by the state of the blocks.
_BAR = {"requests": "█", "pinned": "▓", "cached": "▒", "free": "░"}
_BAR_WIDTH = 60


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="http://HOST:PORT of a server that `llmsched serve` runs.")
    ] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and exit.")] = False,
    interval: Annotated[
        float, duration_option("Time between two queries of the server.  [default: 2s]", show_default=False)
    ] = 2.0,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures once, as JSON.")] = False,
) -> None:
    """Watch the live figures of a running server: latency, queue, KV cache, and the slowest requests.

    Counts and latencies are those of the last minute. The page at the server's address shows the same figures. Ctrl-C
    ends the display. If the output is not a terminal, each query prints one line. The slowest requests need a
    key for administrative routes, if the server has one (`llmsched serve --admin-api-key`); `llmsched explain` shows
    the timeline of each.

    \b
    Examples:
      llmsched top
      llmsched top http://gpu-box:8000 --api-key KEY
      llmsched top --once
      llmsched top http://gpu-box:8000 --json
      llmsched top --interval 10s
    """
    check_range("interval", interval, interval >= 0.1, "0.1s or more")
    if once or as_json:
        with server_client(url, api_key) as client:
            figures = _look(client)
        if as_json:
            render.emit_json(figures)
        else:
            _show(url, figures)
        return
    try:
        if render.stdout().is_terminal:
            _watch(url, api_key, interval)
        else:
            _print_lines(url, api_key, interval)
    except KeyboardInterrupt:
        return


def _look(client: httpx.Client) -> dict[str, Any]:
    """Return the server's figures and its slowest requests. If it refuses to list them, `slowest_refused` says why."""
    figures = checked(client.get("/v1/stats"), "kv_blocks")
    try:
        slowest = checked(client.get("/v1/requests/slowest"), "data")["data"]
    except LlmschedError as problem:
        return figures | {"slowest_requests": None, "slowest_refused": str(problem)}
    return figures | {"slowest_requests": slowest, "slowest_refused": None}


def _looks(url: str, api_key: str | None, interval: float) -> Iterator[dict[str, Any] | LlmschedError]:
    """Yield the figures every `interval` seconds, or an error while the server does not answer.

    Raises LlmschedError if the first look fails, because the address or the key is wrong then.
    """
    has_answered = False
    while True:
        try:
            with server_client(url, api_key) as client:
                while True:
                    figures = _look(client)
                    has_answered = True
                    yield figures
                    time.sleep(interval)
        except LlmschedError as problem:
            if not has_answered:
                raise
            yield problem
            time.sleep(interval)


def _print_lines(url: str, api_key: str | None, interval: float) -> None:
    for found in _looks(url, api_key, interval):
        if isinstance(found, LlmschedError):
            render.warn(str(found))
        else:
            render.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status_line(found)}")


def _watch(url: str, api_key: str | None, interval: float) -> None:
    looks = _looks(url, api_key, interval)
    found = next(looks)  # before the screen is cleared: an error must stay readable
    with render.full_screen() as show:
        while True:
            show(partial(render.say, str(found)) if isinstance(found, LlmschedError) else partial(_show, url, found))
            found = next(looks)


def _show(url: str, figures: Mapping[str, Any]) -> None:
    requests, ended = figures["requests"], figures["requests"]["ended"]
    problem = f" ({figures['error']})" if figures["error"] else ""
    render.say(
        f"{figures['model']} at {url}: {figures['status']}{problem}, up for {_since(figures['uptime_s'])}; counts and "
        f"latencies of the last {figures['window_s']:.0f} s"
    )
    render.say(
        f"requests      {requests['running']} of at most {requests['max_running']} running, {requests['waiting']} "
        f"waiting; {ended['stop'] + ended['length']} completed, {ended['error']} failed, {ended['abort']} abandoned, "
        f"{ended['deadline']} past their deadline"
    )
    render.say(f"speed         {three_figures(figures['output_tokens_per_s'])} output tokens/s")
    _show_memory(figures)
    rows = [
        (name.upper(), *("-" if value is None else render.human_seconds(value / 1e3) for value in latency.values()))
        for name in ("ttft", "itl")
        for latency in (figures[f"{name}_ms"],)
    ]
    render.table("latency", ("", *(name.upper() for name in figures["ttft_ms"])), rows)
    _show_replicas(figures.get("replicas") or {})
    _show_slowest(figures)


def _show_memory(figures: Mapping[str, Any]) -> None:
    blocks, swapped, cache = figures["kv_blocks"], figures["swapped_blocks"], figures["prefix_cache"]
    if total := blocks["total"]:
        ends, bar = 0, ""
        for state, character in _BAR.items():
            ends += blocks[state]
            bar += character * (round(_BAR_WIDTH * ends / total) - len(bar))
        render.say(f"KV blocks     {bar}")
        held = ", ".join(f"{character} {state} {blocks[state]:,}" for state, character in _BAR.items())
        render.say(f"              {held}; of {total:,}, admission keeps {blocks['headroom']:,} free (headroom)")
    else:
        render.say("KV blocks     none: all layers of the model are recurrent")
    lost = f"{figures['preemptions']}, {figures['recomputed_tokens']:,} tokens to recompute"
    if swapped["total"]:
        lost += f"; {swapped['used']:,} of {swapped['total']:,} blocks in host memory"
    render.say(f"preemptions   {lost}")
    counts = sorted(cache["requests"].items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in counts if count)
    if cache["hit_rate"] is None:
        render.say("prefix cache  no prompts")
    else:
        render.say(
            f"prefix cache  hit rate {cache['hit_rate']:.1%}: {cache['hit_tokens']:,} of {cache['queried_tokens']:,} "
            f"prompt tokens; requests by result: {reasons}"
        )


def _show_replicas(replicas: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, figures in replicas.items():
        blocks, hit_rate, ttft = figures["kv_blocks"], figures["prefix_cache"]["hit_rate"], figures["ttft_ms"]["p99"]
        held = blocks["requests"] + blocks["pinned"]
        rows.append(
            (
                name,
                figures["status"],
                *(f"{figures['requests'][state]:,}" for state in ("running", "waiting")),
                three_figures(figures["output_tokens_per_s"]),
                f"{held / blocks['total']:.0%}" if blocks["total"] else "-",
                "-" if hit_rate is None else f"{hit_rate:.0%}",
                "-" if ttft is None else render.human_seconds(ttft / 1e3),
            )
        )
    if rows:
        columns = ("", "state", "running", "waiting", "output tokens/s", "KV", "prefix hits", "P99 TTFT")
        render.table("replicas", columns, rows, text_columns=2)


def _show_slowest(figures: Mapping[str, Any]) -> None:
    if figures["slowest_requests"] is None:
        render.say(f"slowest       not shown: {figures['slowest_refused']}")
        return
    columns = ("", "state", "longest wait", "TTFT", "longest stall", "tokens in", "out", "preemptions", "arrived")
    rows = [
        (
            request["id"],
            request["state"],
            *(
                "-" if request[name] is None else render.human_seconds(request[name] / 1e3)
                for name in ("longest_wait_ms", "ttft_ms", "longest_stall_ms")
            ),
            *(f"{request[name]:,}" for name in ("prompt_tokens", "output_tokens", "preemptions")),
            f"{_since(request['arrived_ms_ago'] / 1e3)} ago",
        )
        for request in figures["slowest_requests"]
    ]
    if rows:
        title = "the latest requests by their longest wait for a token"
        spare = ("out", "tokens in", "TTFT", "longest stall", "preemptions")  # a list would fill several screens
        render.table(title, columns, rows, text_columns=2, spare=spare)


def _since(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((3600, "h"), (60, "min")) if seconds >= 2 * unit), (1, "s"))
    return f"{seconds / unit:.0f} {name}"
