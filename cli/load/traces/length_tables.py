"""Files from which only the lengths of requests are read: CSV tables, JSON lines, plain numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from llmsched.cli.load.traces.rows import (
    Row,
    TraceError,
    csv_header,
    csv_rows,
    first_line,
    json_objects,
    open_text,
    shown,
)

#: Lower-case names of columns and keys in the traces of Azure, Mooncake, BurstGPT and Vidur, in OpenAI's usage and in
#: benchmarks. A total counts only if there is no prompt length.
_PROMPT = (
    *("contexttokens", "input_length", "request tokens", "num_prefill_tokens"),
    *("prompt_tokens", "prompt_len", "input_len"),
)
_OUTPUT = (
    *("generatedtokens", "output_length", "response tokens", "num_decode_tokens"),
    *("completion_tokens", "output_tokens", "output_len"),
)
_TOTAL = ("total_tokens", "num_total_tokens", "length", "tokens")

#: Fields of the rows that `length_rows` yields.
INPUT, OUTPUT = "input tokens", "output tokens"

_NUMBERS = re.compile(r"[\d.+-][\d.eE+\s,-]*|\[[\d.eE+\s,-]+\]")


def has_lengths(line: str, names: Collection[str]) -> bool:
    """Return whether `length_rows` can read a file with this first line, or with these columns or keys."""
    return _is_numbers(line) or bool(_length_fields([name.lower() for name in names]))


def length_rows(path: Path) -> Iterator[Row]:
    """Yield a row per request with the field INPUT, and OUTPUT if the file states it. Raises TraceError."""
    line = first_line(path)
    if _is_numbers(line):
        yield from _plain_rows(path)
    elif line[:1] in ("[", "{"):
        for row in json_objects(path):
            values = {name.lower(): value for name, value in row.values.items()}
            chosen = _length_fields([name for name, value in values.items() if value not in (None, "")])
            if not chosen:
                raise row.wrong(_no_length(list(row.values)))
            yield row.inside({field: values[name] for name, field in chosen.items()})
    elif line:
        header = csv_header(line)
        chosen = _length_fields([name.lower() for name in header])
        if not chosen:
            raise TraceError(f"{path}: {_no_length(header)}")
        yield from csv_rows(path, chosen)


def _plain_rows(path: Path) -> Iterator[Row]:
    """Yield lines with one length, or with a prompt's and an answer's; commas and brackets are ignored."""
    with open_text(path) as text:
        for number, line in enumerate(text, start=1):
            if not (values := line.strip().strip("[]").replace(",", " ").split()):
                continue
            row = Row(path, number, dict(zip((INPUT, OUTPUT), values, strict=False)))
            if len(values) > 2:
                raise row.wrong(
                    f"{len(values)} numbers; allowed are one (a length) or two (of the prompt and the answer)"
                )
            yield row


def _is_numbers(line: str) -> bool:
    return _NUMBERS.fullmatch(line) is not None


def _length_fields(names: Collection[str]) -> dict[str, str]:
    """Return the fields by the names that they are read from; empty if no name is a length of prompts or a total."""
    output = next((name for name in _OUTPUT if name in names), None)
    for name in _PROMPT:
        if name in names:
            return {name: INPUT} if output is None else {name: INPUT, output: OUTPUT}
    return next(({name: INPUT} for name in _TOTAL if name in names), {})


def _no_length(names: Collection[str]) -> str:
    known = ", ".join((_PROMPT[0], _PROMPT[1], _PROMPT[4], _TOTAL[2]))
    return f"none of {shown(', '.join(names))} is a length ({known}, ...)"
