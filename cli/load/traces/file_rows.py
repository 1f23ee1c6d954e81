from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, TextIO

from llmsched.cli.quantities import MOST_TOKENS
from llmsched.engine.errors import LlmschedError

_GZIP = b"\x1f\x8b"
#: First bytes of files that are no text, and what to do with them.
_BINARY = {
    b"PAR1": "a Parquet file; write it as JSON lines, with pandas: read_parquet(FILE).to_json(OUT, orient='records', "
    "lines=True)",
    b"ARROW1": "an Arrow file; write it as JSON lines or CSV",
    b"PK\x03\x04": "a zip file or spreadsheet; unpack it, or save it as CSV",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "compressed with xz; unpack it, or pack it with gzip",
    b"BZh": "compressed with bzip2; unpack it, or pack it with gzip",
    b"SQLite format 3": "an SQLite database; write its table as CSV",
}
_SHOWN = 80
csv.field_size_limit(1 << 30)  # long prompts
_CHUNK = 1 << 20

#: Text between the elements of a JSON array.
_BETWEEN = re.compile(r"[\s,]*")
#: Length of the longest JSON token that the end of a chunk can split (-Infinity, a pair of \u escapes).
_LONGEST_WORD = 12


class TraceError(LlmschedError):
    """Error for a trace that cannot be read or used."""


class Row:
    """Record of a trace: its fields by name, and the number of its line (or entry) in the file."""

    def __init__(self, path: Path, line: int, values: Mapping[str, Any], word: str = "line") -> None:
        self.line = line
        self.values = values
        self._where = f"{path}, {word} {line}"

    def inside(self, values: Mapping[str, Any]) -> Row:
        """Return a record for the nested object `values` of this record, with the same line number."""
        inner = copy(self)
        inner.values = values
        return inner

    def wrong(self, message: str) -> TraceError:
        return TraceError(f"{self._where}: {message}")

    def length(self, name: str) -> int:
        """Return a field, which must be a whole number of tokens from 0 to MOST_TOKENS. Raises TraceError."""
        value = self.values.get(name)
        try:
            count = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            count = math.nan
        if not 0 <= count <= MOST_TOKENS or not count.is_integer():
            raise self.wrong(f"{name} is {shown(value)}; allowed is a whole number of tokens, 0 to {MOST_TOKENS}")
        return int(count)


def shown(value: Any) -> str:
    """Return a value as one short line for an error message."""
    if value is None or value == "":
        return "missing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 file, which may be gzipped. An OSError or decoding error in the block becomes a TraceError."""
    try:
        if path.is_char_device():
            raise TraceError(f"{path} is a device, not a file")
        with path.open("rb") as raw:
            begin = raw.read(16)
        if kind := next((kind for mark, kind in _BINARY.items() if begin.startswith(mark)), None):
            raise TraceError(f"{path} is {kind}")
        opener = gzip.open if begin.startswith(_GZIP) else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as text:
            yield text
    except UnicodeDecodeError as problem:
        raise TraceError(f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start}") from problem
    except (OSError, EOFError, zlib.error) as problem:
        raise TraceError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from problem


def first_line(path: Path) -> str:
    """Return the first line that is not blank, stripped and cut to about a million characters."""
    with open_text(path) as text:
        while line := text.readline(_CHUNK):
            if stripped := line.strip():
                return stripped
    return ""


def csv_header(line: str) -> list[str]:
    """Return the column names of a CSV header, or an empty list if the line is not valid CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=_delimiter(line)))]
    except csv.Error:
        return []


def _delimiter(header: str) -> str:
    return next((mark for mark in ",;\t" if mark in header), ",")


def records(path: Path) -> Iterator[Row]:
    """Yield the records of a JSON or CSV file. The column names of a CSV file are put in lower case."""
    line = first_line(path)
    if line[:1] in ("[", "{"):
        yield from json_objects(path)
    else:
        yield from csv_rows(path, {name: name for name in map(str.lower, csv_header(line))})


def csv_rows(path: Path, needed: Mapping[str, str]) -> Iterator[Row]:
    """Yield the records of a CSV file. `needed` maps lower-case column names to field names. Raises TraceError."""
    delimiter = _delimiter(first_line(path))
    with open_text(path) as text:
        reader = csv.reader(text, delimiter=delimiter)
        try:
            header = next((row for row in reader if any(cell.strip() for cell in row)), [])
            names = [cell.strip().lower() for cell in header]
            if missing := [name for name in needed if name not in names]:
                raise TraceError(f"{path}: no column {', '.join(missing)} in the header {shown(', '.join(header))}")
            places = {field: names.index(name) for name, field in needed.items()}
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    values = {field: cells[at].strip() if at < len(cells) else "" for field, at in places.items()}
                    yield Row(path, reader.line_num, values)
        except csv.Error as problem:
            raise TraceError(f"{path}, line {reader.line_num}: {problem}") from problem


def json_objects(path: Path) -> Iterator[Row]:
    """Yield the JSON objects of a file, which are one per line or in an array. Raises TraceError for anything else."""
    if first_line(path).startswith("["):
        yield from _elements(path)
        return
    with open_text(path) as text:
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            row = Row(path, number, {})
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as problem:
                hint = "; write one object per line (jq -c . FILE)" if line.strip() == "{" else ""
                raise row.wrong(f"not valid JSON ({_reason(problem)}): {shown(line)}{hint}") from problem
            if not isinstance(value, dict):
                raise row.wrong(f"{shown(line)} is not allowed; write one JSON object per line")
            yield Row(path, number, value)


def _elements(path: Path) -> Iterator[Row]:
    decoder = json.JSONDecoder()
    with open_text(path) as text:
        waiting, number, wanted = text.read(_CHUNK), 0, _CHUNK
        while not waiting.strip():
            waiting = text.read(_CHUNK)
        at = waiting.index("[") + 1
        while True:
            at = _BETWEEN.match(waiting, at).end()  # type: ignore[union-attr]  # always matches
            row = Row(path, number + 1, {}, "entry")
            if waiting.startswith("]", at):
                return
            try:
                value, at = decoder.raw_decode(waiting, at)
            except (ValueError, RecursionError) as problem:
                # Reading on helps only if the error is near the end of the chunk, or is an unclosed string.
                mended = isinstance(problem, json.JSONDecodeError) and (
                    problem.msg.startswith("Unterminated") or problem.pos >= len(waiting) - _LONGEST_WORD
                )
                more = text.read(wanted) if mended else ""
                if not more:
                    raise row.wrong(
                        f"not valid JSON ({_reason(problem)}): {shown(waiting[at : at + _CHUNK])}"
                    ) from problem
                waiting, at, wanted = waiting[at:] + more, 0, 2 * wanted
                continue
            if not isinstance(value, dict):
                raise row.wrong(f"{shown(value)} is not allowed; write JSON objects")
            number, wanted = number + 1, _CHUNK
            yield Row(path, number, value, "entry")


def _reason(problem: Exception) -> str:
    return problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)
