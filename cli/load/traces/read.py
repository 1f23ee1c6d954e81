"""Reader of trace files. It detects the format, checks the records, and sorts the requests by time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmsched.cli.load.traces.formats import FORMATS, Format, FormatOptions, TraceFormat, has_lengths
from llmsched.cli.load.traces.rows import Row, TraceError, csv_header, first_line, json_objects, shown
from llmsched.cli.load.traces.timestamps import Timestamp, TimestampUnit, offsets, read_timestamp
from llmsched.cli.load.traces.trace import Trace, TraceRequest
from llmsched.engine.errors import setting

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_trace(
    path: Path,
    trace_format: TraceFormat | None = None,
    *,
    timestamp_unit: TimestampUnit | None = None,
    turns: int | None = None,
    trace_block_size: int | None = None,
    limit: int | None = None,
    name: str | None = None,
) -> Trace:
    """Return the trace in a file, which may be gzipped. If `trace_format` is None, the format is detected.

    Requests are sorted by time; requests with equal times keep the file's order. Only the first `limit` requests are
    kept. `timestamp_unit` is the unit of timestamps that are numbers; if it is None, the unit is found as timestamps.py
    describes. `turns` (1 if None) is only for ShareGPT, `trace_block_size` (512 tokens if None) only for Mooncake: see
    FormatOptions.

    Raises TraceError if the file cannot be read or has no requests, if a timestamp or length is missing, negative or
    not a number, if the unit of the timestamps is ambiguous, or if an option does not fit the format.
    """
    trace_format = trace_format or detect(path)
    file_format = FORMATS[trace_format]
    for setting_name, value, only, content in (
        ("turns", turns, "sharegpt", "conversations"),
        ("trace_block_size", trace_block_size, "mooncake", "blocks"),
    ):
        if value is not None and trace_format != only:
            has_none = f"{trace_format} traces have no {content}"
            raise TraceError(f"{path}: {setting(setting_name)} {value} is given, but {has_none}")
    options = FormatOptions(turns or 1, trace_block_size or 512)
    found: list[tuple[Timestamp | None, TraceRequest]] = []
    for entry in _entries(path, file_format, options):
        found.append(entry)
        if limit is not None and len(found) >= limit and entry[0] is None:
            break
    if not found:
        raise TraceError(f"{path} contains no request (read as {trace_format})")
    stamps = [stamp for stamp, _ in found if stamp is not None]
    requests = [request for _, request in found]
    if stamps:
        due = offsets(stamps, timestamp_unit, file_format.unit, str(path))
        requests = [replace(request, offset=time) for request, time in zip(requests, due, strict=True)]
        requests.sort(key=lambda request: request.offset)
    elif timestamp_unit is not None:
        raise TraceError(f"{path}: {setting('timestamp_unit')} {timestamp_unit} is given, but there are no timestamps")
    return Trace(name or path.name, trace_format, tuple(requests[:limit]), bool(stamps), options.block_tokens)


def _entries(
    path: Path, file_format: Format, options: FormatOptions
) -> Iterator[tuple[Timestamp | None, TraceRequest]]:
    """Yield the requests of a file with their timestamps. Raises TraceError if only some have a timestamp."""
    first: tuple[Row, str | None] | None = None
    for row in file_format.rows(path):
        field = file_format.time(row)
        first = first or (row, field)
        if (field is None) != (first[1] is None):
            there, missing = (first[0], row) if field is None else (row, first[0])
            raise missing.wrong(f"no timestamp, though line {there.line} has one")
        stamp = None if field is None else read_timestamp(row, field)
        for request in file_format.requests(row, options):
            if request.content is not None and _SURROGATE.search(request.content.text):
                raise row.wrong("the prompt is not valid Unicode: it contains half of a surrogate pair")
            yield stamp, request


def detect(path: Path) -> TraceFormat:
    """Return a file's format by its header or its first object's fields. Raises TraceError if none is known."""
    line = first_line(path)
    if not line:
        raise TraceError(f"{path} is empty")
    if has_lengths(line, ()):
        return "lengths"
    if line[0] in "[{":
        head = next(json_objects(path), None)
        if head is None:
            raise TraceError(f"{path} is an empty list")
        names = set(head.values)
    else:
        names = {name.lower() for name in csv_header(line)}
    for format_name, marks in _MARKS:
        if marks <= names:
            return format_name
    if has_lengths(line, names):
        return "lengths"
    raise TraceError(f"{path} is not a trace in a known format ({', '.join(FORMATS)}); it begins with {shown(line)}")


#: Columns or fields that identify a format.
_MARKS: tuple[tuple[TraceFormat, set[str]], ...] = (
    ("azure", {"timestamp", "contexttokens", "generatedtokens"}),
    ("burstgpt", {"timestamp", "request tokens", "response tokens"}),
    ("mooncake", {"input_length", "output_length"}),
    ("sharegpt", {"conversations"}),
    ("sharegpt", {"items"}),
    ("log", {"messages"}),
    ("log", {"prompt"}),
    ("log", {"body"}),
)
