"""From a file to a Trace: which format it is, its requests in the order of time, nothing wrong left in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmsched.cli.load.traces.formats import FORMATS, Format, Reading, TraceFormat
from llmsched.cli.load.traces.length_tables import tells_lengths
from llmsched.cli.load.traces.rows import Row, TraceError, first_line, json_objects, names_of, shown
from llmsched.cli.load.traces.timestamps import Stamp, TimestampUnit, offsets, read_stamp
from llmsched.cli.load.traces.trace import Trace, TraceRequest
from llmsched.engine.errors import setting


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
    """The trace in a file (also packed with gzip), in a format of FORMATS; None: what its first line looks like.

    Requests are sorted by time, those of one time stay in the order of the file; `limit` keeps the first of them.
    `unit` is that of timestamps that are numbers; `turns` (of a conversation become requests, 1) and `block_tokens` (of
    Mooncake's blocks, 512) are refused where they have no meaning.

    Raises TraceError, with the line where one is to blame: a file that cannot be read or understood, a timestamp or a
    length that is missing, negative or no number, a unit that must be guessed, no request at all.
    """
    known = FORMATS[detect(path) if trace_format is None else trace_format]
    reading = _reading(path, known, turns, trace_block_size)
    found: list[tuple[Stamp | None, TraceRequest]] = []
    for entry in _entries(path, known, reading):
        found.append(entry)
        if limit is not None and len(found) >= limit and entry[0] is None:
            break
    if not found:
        raise TraceError(f"{path} holds no request (read as {known.name})")
    stamps = [stamp for stamp, _ in found if stamp is not None]
    requests = [request for _, request in found]
    if stamps:
        due = offsets(stamps, timestamp_unit, known.unit, str(path))
        requests = [replace(request, offset=time) for request, time in zip(requests, due, strict=True)]
        requests.sort(key=lambda request: request.offset)
    elif timestamp_unit is not None:
        raise TraceError(f"{path}: {setting('timestamp_unit')} {timestamp_unit} is given, but there are no timestamps")
    return Trace(name or path.name, known.name, tuple(requests[:limit]), bool(stamps), reading.block_tokens)


def _reading(path: Path, known: Format, turns: int | None, trace_block_size: int | None) -> Reading:
    if turns is not None and known.name != "sharegpt":
        raise TraceError(f"{path}: {setting('turns')} {turns} is given, but {known.name} traces have no conversations")
    if trace_block_size is not None and known.name != "mooncake":
        raise TraceError(
            f"{path}: {setting('trace_block_size')} {trace_block_size} is given, but {known.name} traces have no blocks"
        )
    default = Reading()
    return Reading(turns or default.turns, trace_block_size or default.block_tokens)


def _entries(path: Path, known: Format, reading: Reading) -> Iterator[tuple[Stamp | None, TraceRequest]]:
    """The requests of a file with their timestamps. All have one, or none has."""
    first: tuple[Row, str | None] | None = None
    for row in known.rows(path):
        field = known.time(row)
        first = first or (row, field)
        if (field is None) != (first[1] is None):
            there, missing = (first[0], row) if field is None else (row, first[0])
            raise missing.wrong(f"no timestamp, though line {there.line} has one")
        stamp = None if field is None else read_stamp(row, field)
        for request in known.requests(row, reading):
            if request.content is not None and not _is_unicode(request.content.text):
                raise row.wrong("the prompt is no valid Unicode: it has half of a surrogate pair")
            yield stamp, request


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def detect(path: Path) -> TraceFormat:
    """The name of the format that a file looks like: by its header, or the fields of its first object.

    Raises TraceError naming the formats.
    """
    line = first_line(path)
    if not line:
        raise TraceError(f"{path} is empty")
    if tells_lengths(line, ()):
        return "lengths"
    if line[0] in "[{":
        head = next(json_objects(path), None)
        if head is None:
            raise TraceError(f"{path} is an empty list")
        names = set(head.values)
    else:
        names = {name.lower() for name in names_of(line)}
    for format_name, marks in _MARKS:
        if marks <= names:
            return format_name
    if tells_lengths(line, names):
        return "lengths"
    raise TraceError(f"{path} is no trace of a known format ({', '.join(FORMATS)}); it begins with {shown(line)}")


#: What tells the formats apart: columns or fields that are there.
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
