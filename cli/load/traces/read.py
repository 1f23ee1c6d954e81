"""Reader of trace files. It detects the format, checks the records, and sorts the requests by time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmsched.cli.load.traces.file_rows import Row, TraceError, csv_header, first_line, json_objects, shown
from llmsched.cli.load.traces.formats import (
    BODIES,
    FORMATS,
    PROMPTS,
    TALKS,
    Format,
    FormatOptions,
    TraceFormat,
    has_lengths,
)
from llmsched.cli.load.traces.timestamps import Timestamp, TimestampUnit, offsets, read_timestamp
from llmsched.cli.load.traces.trace import Trace, TraceRequest
from llmsched.engine.errors import setting

#: Note on files of AIPerf and GenAI-Perf, whose turns wait for the answer to the turn before.
_SESSIONS = (
    "sessions (session_id, delay): a turn waits for an answer, so no times are replayed and each turn is a request of "
    "its own"
)

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_trace(
    path: Path,
    trace_format: TraceFormat | None = None,
    *,
    timestamp_unit: TimestampUnit | None = None,
    turns: int | None = None,
    trace_block_size: int | None = None,
    limit: int | None = None,
    times: bool = True,
    name: str | None = None,
) -> Trace:
    """Return the trace in a file, which may be gzipped. If `trace_format` is None, the format is detected.

    Only the first `limit` requests by time are kept. `timestamp_unit` is the unit of numeric timestamps; if it is None,
    the unit is found as timestamps.py describes. `turns` is only for ShareGPT, `trace_block_size` only for formats with
    blocks. Without `times`, timestamps are not read. Raises TraceError for a bad file and for an option that does not
    fit the format.
    """
    trace_format = trace_format or detect(path)
    file_format = FORMATS[trace_format]
    for setting_name, value, fits, content in (
        ("turns", turns, trace_format == "sharegpt", "conversations"),
        ("trace_block_size", trace_block_size, file_format.block_tokens, "blocks"),
    ):
        if value is not None and not fits:
            has_none = f"{trace_format} traces have no {content}"
            raise TraceError(f"{path}: {setting(setting_name)} {value} is given, but {has_none}")
    options = FormatOptions(turns or 1, trace_block_size or file_format.block_tokens or 512)
    found: list[tuple[Timestamp | None, TraceRequest]] = []
    for entry in _entries(path, file_format, options, times):
        found.append(entry)
        if limit is not None and len(found) >= limit and entry[0] is None:
            break
    notes = [_SESSIONS] if options.sessions else []
    if skipped := options.skipped:
        count = sum(skipped.values())
        notes.append(f"{count:,} turn{'s' if count > 1 else ''} skipped: {', '.join(sorted(skipped))}")
    if not found:
        raise TraceError(f"{path} contains no request ({', '.join([f'read as {trace_format}', *notes])})")
    stamps = [stamp for stamp, _ in found if stamp is not None]
    requests = [request for _, request in found]
    if timed := bool(stamps) and not options.sessions:
        due, note = offsets(stamps, timestamp_unit, file_format.unit, file_format.fixed_unit, str(path))
        notes += [note] if note else []
        requests = [replace(request, offset=time) for request, time in zip(requests, due, strict=True)]
        requests.sort(key=lambda request: request.offset)
    elif timestamp_unit is not None:
        raise TraceError(f"{path}: {setting('timestamp_unit')} {timestamp_unit} is given, but there are no timestamps")
    return Trace(name or path.name, trace_format, tuple(requests[:limit]), timed, options.block_tokens, tuple(notes))


def _entries(
    path: Path, file_format: Format, options: FormatOptions, times: bool
) -> Iterator[tuple[Timestamp | None, TraceRequest]]:
    """Yield the requests of a file with their timestamps. Raises TraceError if only some have a timestamp."""
    first: tuple[Row, str | None] | None = None
    for row in file_format.rows(path):
        field = file_format.time(row) if times else None
        first = first or (row, field)
        if field is None and row.values.get("session_id") is not None and (row.values.get("delay") or first[1]):
            options.sessions = True
        elif (field is None) != (first[1] is None) and not options.sessions:
            there, missing = (first[0], row) if field is None else (row, first[0])
            raise missing.wrong(f"no timestamp, though line {there.line} has one")
        stamp = None if field is None else read_timestamp(row, field)
        for request in file_format.requests(row, options):
            if request.content is not None and _SURROGATE.search(request.content.text):
                raise row.wrong("the prompt is not valid Unicode: it contains half of a surrogate pair")
            yield stamp, request


def detect(path: Path) -> TraceFormat:
    """Return the format of a file, judged by its first line or first object. Raises TraceError if no format fits."""
    line = first_line(path)
    if not line:
        raise TraceError(f"{path} is empty")
    if has_lengths(line, ()):
        return "lengths"
    is_json, example = line[0] in "[{", {}
    if is_json:
        head = next(json_objects(path), None)
        if head is None:
            raise TraceError(f"{path} is an empty list")
        names, example = set(head.values), dict(head.values)
    else:
        names = {name.lower() for name in csv_header(line)}
    for format_name, marks in _MARKS:
        if marks <= names and (is_json or format_name != "sharegpt"):
            return format_name
    if has_lengths(line, names):
        return "lengths"
    known = f"not a trace in a known format ({', '.join(FORMATS)})"
    if isinstance(example.get("turns"), list):
        raise TraceError(f"{path} is a multi-turn file of AIPerf (turns); write a line with text_input for each turn")
    lists = [name for name in ("data", "rows", "records", "requests", "train") if isinstance(example.get(name), list)]
    if lists:
        known += f"; if {lists[0]} has the records, write them to a file of their own (jq '.{lists[0]}' FILE)"
    if not is_json and (path.suffix in (".csv", ".tsv") or (len(names) > 1 and "" not in names)):
        raise TraceError(
            f"{path} is a CSV file without a column of prompts (prompt) or lengths (input_length, output_length): its "
            f"header is {shown(line)}"
        )
    raise TraceError(f"{path} is {known}; it begins with {shown(line)}")


#: Columns or fields that identify a format.
_MARKS: tuple[tuple[TraceFormat, set[str]], ...] = (
    ("azure", {"timestamp", "contexttokens", "generatedtokens"}),
    ("burstgpt", {"timestamp", "request tokens", "response tokens"}),
    ("bailian", {"chat_id", "input_length", "output_length"}),
    ("mooncake", {"input_length", "output_length"}),
    ("mooncake", {"text_input"}),
    ("mooncake", {"timestamp", "messages", "output_length"}),
    ("mooncake", {"timestamp", "payload"}),
    *(("sharegpt", {name}) for name in TALKS),
    *(("log", {name}) for name in ("messages", *BODIES, *PROMPTS) if name != "input"),
    ("log", {"input", "output"}),
    ("log", {"input", "max_output_tokens"}),
)
