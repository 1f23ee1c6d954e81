"""Files that tell how long requests are and nothing else that is wanted of them: tables, JSON lines, plain numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from llmsched.cli.load.traces.rows import (
    Row,
    TraceError,
    csv_rows,
    first_line,
    json_objects,
    names_of,
    opened,
    shown,
)

#: Names of columns and keys, in small letters: Azure's traces, Mooncake's, BurstGPT's, Vidur's, OpenAI's usage,
#: benchmarks'. A total counts where no prompt is told.
_PROMPT = (
    *("contexttokens", "input_length", "request tokens", "num_prefill_tokens"),
    *("prompt_tokens", "prompt_len", "input_len"),
)
_OUTPUT = (
    *("generatedtokens", "output_length", "response tokens", "num_decode_tokens"),
    *("completion_tokens", "output_tokens", "output_len"),
)
_TOTAL = ("total_tokens", "num_total_tokens", "length", "tokens")

#: The fields of the rows that are made of them.
INPUT, OUTPUT = "input tokens", "output tokens"

_NUMBERS = re.compile(r"[\d.+-][\d.eE+\s,-]*|\[[\d.eE+\s,-]+\]")


def tells_lengths(line: str, names: Collection[str]) -> bool:
    """Whether a file with this first line, a header or a first object with these names, can be read here."""
    return _is_numbers(line) or bool(_chosen([name.lower() for name in names]))


def length_rows(path: Path) -> Iterator[Row]:
    """A row per request, with INPUT, and OUTPUT where it is told apart. Raises TraceError."""
    line = first_line(path)
    if _is_numbers(line):
        yield from _plain_rows(path)
    elif line[:1] in ("[", "{"):
        for row in json_objects(path):
            values = {name.lower(): value for name, value in row.values.items()}
            chosen = _chosen([name for name, value in values.items() if value not in (None, "")])
            if not chosen:
                raise row.wrong(_no_length(list(row.values)))
            yield row.inside({field: values[name] for name, field in chosen.items()})
    elif line:
        header = names_of(line)
        chosen = _chosen([name.lower() for name in header])
        if not chosen:
            raise TraceError(f"{path}: {_no_length(header)}")
        yield from csv_rows(path, chosen)


def _plain_rows(path: Path) -> Iterator[Row]:
    """A length a line, or a prompt's and an answer's with a comma or blanks between them, also in brackets."""
    with opened(path) as text:
        for number, line in enumerate(text, start=1):
            if not (values := line.strip().strip("[]").replace(",", " ").split()):
                continue
            row = Row(path, number, dict(zip((INPUT, OUTPUT), values, strict=False)))
            if len(values) > 2:
                raise row.wrong(f"{len(values)} numbers; allowed are one (a length) or two (a prompt's, an answer's)")
            yield row


def _is_numbers(line: str) -> bool:
    return _NUMBERS.fullmatch(line) is not None


def _chosen(names: Collection[str]) -> dict[str, str]:
    """Which of the names are read as what; none where no length of a prompt or of both is among them."""
    output = next((name for name in _OUTPUT if name in names), None)
    for name in _PROMPT:
        if name in names:
            return {name: INPUT} if output is None else {name: INPUT, output: OUTPUT}
    return next(({name: INPUT} for name in _TOTAL if name in names), {})


def _no_length(names: Collection[str]) -> str:
    known = ", ".join((_PROMPT[0], _PROMPT[1], _PROMPT[4], _TOTAL[2]))
    return f"none of {shown(', '.join(names))} is a length ({known}, ...)"
