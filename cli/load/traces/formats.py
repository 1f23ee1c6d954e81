"""File formats of traces: how to read their records, and how to make requests of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from llmsched.cli.load.traces.length_tables import INPUT, OUTPUT, length_rows
from llmsched.cli.load.traces.rows import Row, csv_rows, json_objects, shown
from llmsched.cli.load.traces.timestamps import TimestampUnit
from llmsched.cli.load.traces.trace import Content, TraceRequest
from llmsched.engine.errors import setting

TraceFormat = Literal["azure", "burstgpt", "lengths", "mooncake", "sharegpt", "log"]

#: Names that a request log may use for a field, in order of preference.
_TIMES = ("timestamp", "arrival_time", "created_at", "created", "time")
_LIMITS = ("max_tokens", "max_completion_tokens")

#: Speakers of a ShareGPT conversation and their roles in the chat API. Early dumps also name other assistants.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}
#: Names of the field of a ShareGPT entry that holds the conversation.
_TALKS = ("conversations", "items")


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of some formats: turns of a conversation that become requests, and tokens of a block."""

    turns: int = 1
    block_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Format:
    """A file format.

    `rows` reads the records of a file. `requests` makes the requests of a record, with offset 0. `time` returns the
    name of the field that holds the record's timestamp, or None; `unit` is the unit of numbers in it. All of them raise
    TraceError.
    """

    name: TraceFormat
    rows: Callable[[Path], Iterator[Row]]
    requests: Callable[[Row, FormatOptions], list[TraceRequest]]
    time: Callable[[Row], str | None]
    unit: TimestampUnit = "s"


def _csv(columns: Mapping[str, str]) -> Callable[[Path], Iterator[Row]]:
    return lambda path: csv_rows(path, columns)


def _lengths(row: Row, options: FormatOptions) -> list[TraceRequest]:
    answer = row.length(OUTPUT) if OUTPUT in row.values else None
    return [TraceRequest(row.line, 0.0, row.length(INPUT), answer)]


def _mooncake(row: Row, options: FormatOptions) -> list[TraceRequest]:
    """Return a request whose `hash_ids` name the blocks of the prompt. The last block may be shorter."""
    length, answer = row.length("input_length"), row.length("output_length")
    blocks = row.values.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(b) is int and 0 <= b < 2**64 for b in blocks):
        raise row.wrong(f"hash_ids is {shown(blocks)}; allowed is a list of whole numbers from 0 to 2^64 - 1")
    needed = -(-length // options.block_tokens)
    if blocks and len(blocks) != needed:
        raise row.wrong(
            f"{len(blocks)} hash_ids; {length} tokens are {needed} blocks of {options.block_tokens} "
            f"({setting('trace_block_size')} sets another size)"
        )
    return [TraceRequest(row.line, 0.0, length, answer, tuple(blocks))]


def _sharegpt(row: Row, options: FormatOptions) -> list[TraceRequest]:
    """Return a request for each of the first user messages that have an answer, with all messages before it."""
    field = next((name for name in _TALKS if name in row.values), _TALKS[0])
    said = row.values.get(field)
    if not isinstance(said, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in said):
        raise row.wrong(f'{field} is {shown(said)}; allowed is a list of {{"from": ..., "value": TEXT}}')
    messages = [{"role": _role(row, turn), "content": turn["value"]} for turn in said]
    asked = [at for at, pair in enumerate(pairwise(messages)) if [m["role"] for m in pair] == ["user", "assistant"]]
    return [
        TraceRequest(row.line, 0.0, content=Content.of_messages(messages[: at + 1]), answer=messages[at + 1]["content"])
        for at in asked[: options.turns]
    ]


def _role(row: Row, turn: Mapping[str, Any]) -> str:
    name = turn.get("from")
    if not isinstance(name, str) or name not in _ROLES:
        raise row.wrong(f"from is {shown(name)}; allowed are {', '.join(_ROLES)}")
    return _ROLES[name]


def _log(row: Row, options: FormatOptions) -> list[TraceRequest]:
    """Return the request that a record holds: the body of an OpenAI API request, or an object with it as `body`."""
    body = row.inside(row.values["body"]) if isinstance(row.values.get("body"), dict) else row
    limit = next((name for name in _LIMITS if body.values.get(name) is not None), None)
    answer = None if limit is None else body.length(limit)
    if body.values.get("messages") is not None:
        content = Content.of_messages(_messages(body))
    elif isinstance(prompt := body.values.get("prompt"), str):
        content = Content(prompt)
    else:
        raise row.wrong(f"prompt is {shown(prompt)} and messages are missing; give messages, or prompt as text")
    return [TraceRequest(row.line, 0.0, output_len=answer, content=content)]


def _messages(row: Row) -> list[Mapping[str, Any]]:
    messages = row.values["messages"]
    if not isinstance(messages, list) or not messages:
        raise row.wrong(f"messages is {shown(messages)}; allowed is a list of one or more")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.wrong(f"messages[{at}] is {shown(message)}; allowed is an object with a role")
        parts = message.get("content")
        if not (parts is None or isinstance(parts, str) or (isinstance(parts, list) and all(map(_is_text, parts)))):
            raise row.wrong(f"messages[{at}].content is {shown(parts)}; allowed is text, or a list of text parts")
    return messages


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _time_of_log(row: Row) -> str | None:
    return next((name for name in _TIMES if name in row.values), None)


_AZURE = {"timestamp": "TIMESTAMP", "contexttokens": INPUT, "generatedtokens": OUTPUT}
_BURSTGPT = {"timestamp": "Timestamp", "request tokens": INPUT, "response tokens": OUTPUT}

FORMATS: dict[TraceFormat, Format] = {
    known.name: known
    for known in (
        Format("azure", _csv(_AZURE), _lengths, lambda row: "TIMESTAMP"),
        Format("burstgpt", _csv(_BURSTGPT), _lengths, lambda row: "Timestamp"),
        Format("lengths", length_rows, _lengths, lambda row: None),
        Format("mooncake", json_objects, _mooncake, lambda row: "timestamp", "ms"),
        Format("sharegpt", json_objects, _sharegpt, lambda row: None),
        Format("log", json_objects, _log, _time_of_log),
    )
}
