from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from llmsched.cli.load.traces.file_rows import (
    Row,
    TraceError,
    csv_header,
    csv_rows,
    first_line,
    json_objects,
    open_text,
    records,
    shown,
)
from llmsched.cli.load.traces.timestamps import UNITS, TimestampUnit
from llmsched.cli.load.traces.trace import Content, TraceRequest
from llmsched.engine.errors import setting

TraceFormat = Literal["azure", "burstgpt", "lengths", "mooncake", "bailian", "sharegpt", "log"]

#: Names that a request log may use for a field, in order of preference. The name of a time may end in its unit.
_TIMES = tuple(
    name + unit
    for name in ("timestamp", "arrival_time", "arrived_at", "created_at", "created", "time")
    for unit in ("", *(f"_{unit}" for unit in UNITS))
)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
BODIES = ("body", "payload", "request")
PROMPTS = ("prompt", "text_input", "instruction", "question", "text", "input")
_CONTEXTS = ("input", "context")
_ANSWERS = ("completion", "response", "output", "answer")

#: Names that a file of conversations may use for the turns of a conversation.
TALKS = ("conversations", "conversation", "items")

#: Speakers in a ShareGPT conversation -> their roles in the chat API. Early dumps also name other assistants.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}

#: Lower-case names of columns and keys in the traces of Azure, Mooncake, BurstGPT and Vidur, in OpenAI's usage and in
#: benchmarks. A total is used only if there is no prompt length.
_PROMPT = (
    *("contexttokens", "input_length", "request tokens", "num_prefill_tokens"),
    *("prompt_tokens", "prompt_tokens_count", "input_tokens", "prompt_len", "input_len", "isl"),
)
_OUTPUT = (
    *("generatedtokens", "output_length", "response tokens", "num_decode_tokens"),
    *("completion_tokens", "output_tokens", "output_tokens_count", "output_len", "osl"),
)
_TOTAL = ("total_tokens", "num_total_tokens", "length", "tokens")

#: Fields of the rows that `length_rows` yields.
INPUT, OUTPUT = "input tokens", "output tokens"

_NUMBERS = re.compile(r"[\d.+-][\d.eE+\s,-]*|\[[\d.eE+\s,-]+\]")


@dataclass(slots=True)
class FormatOptions:
    """Options of a trace's reader, and facts that the reader notes about the file."""

    turns: int  # largest number of requests from one ShareGPT conversation
    block_tokens: int
    skipped: Counter[str] = field(default_factory=Counter)  # turns that were left out, by speaker
    sessions: bool = False  # True if turns in the file wait for the answer to the turn before


@dataclass(frozen=True, slots=True)
class Format:
    """File format of traces. The functions raise TraceError for a bad record."""

    rows: Callable[[Path], Iterator[Row]]
    requests: Callable[[Row, FormatOptions], list[TraceRequest]]
    time: Callable[[Row], str | None]  # returns the name of the field with the record's timestamp
    unit: TimestampUnit = "s"  # usual unit of numeric timestamps
    fixed_unit: bool = False  # True if all files use `unit`
    block_tokens: int | None = None


def has_lengths(line: str, names: Collection[str]) -> bool:
    """Return True if the first line `line`, or the columns or keys `names`, belong to a file for `length_rows(...)`."""
    return bool(_NUMBERS.fullmatch(line)) or bool(_length_fields([name.lower() for name in names]))


def length_rows(path: Path) -> Iterator[Row]:
    """Yield a row per request with its lengths and, if known, its time. Raises TraceError if a record has no length."""
    line = first_line(path)
    if _NUMBERS.fullmatch(line):
        # Each line has one length, or those of a prompt and its answer. Commas and brackets are ignored.
        with open_text(path) as text:
            for number, row_text in enumerate(text, start=1):
                if not (cells := row_text.strip().strip("[]").replace(",", " ").split()):
                    continue
                row = Row(path, number, dict(zip((INPUT, OUTPUT), cells, strict=False)))
                if len(cells) > 2:
                    raise row.wrong(
                        f"{len(cells)} numbers; allowed are one (a length) or two (of the prompt and the answer)"
                    )
                yield row
    elif line[:1] in ("[", "{"):
        for row in json_objects(path):
            values = {name.lower(): value for name, value in row.values.items()}
            chosen = _length_fields([name for name, value in values.items() if value not in (None, "")])
            if not chosen:
                raise row.wrong(_no_length(list(row.values)))
            yield row.inside({field: values[name] for name, field in (chosen | _time_field(values)).items()})
    elif line:
        header = csv_header(line)
        names = [name.lower() for name in header]
        chosen = _length_fields(names)
        if not chosen:
            raise TraceError(f"{path}: {_no_length(header)}")
        yield from csv_rows(path, chosen | _time_field(names))


def _length_fields(names: Collection[str]) -> dict[str, str]:
    """Map the columns or keys that hold lengths to INPUT (length of the prompt or in total) and OUTPUT (answer)."""
    output = next((name for name in _OUTPUT if name in names), None)
    for name in _PROMPT:
        if name in names:
            return {name: INPUT} if output is None else {name: INPUT, output: OUTPUT}
    return next(({name: INPUT} for name in _TOTAL if name in names), {})


def _time_field(names: Collection[str]) -> dict[str, str]:
    return next(({name: name} for name in _TIMES if name in names), {})


def _no_length(names: Collection[str]) -> str:
    known = ", ".join((_PROMPT[0], _PROMPT[1], _PROMPT[4], _TOTAL[2]))
    return f"none of {shown(', '.join(names))} is a length ({known}, ...)"


def _lengths(row: Row, options: FormatOptions) -> list[TraceRequest]:
    answer = row.length(OUTPUT) if OUTPUT in row.values else None
    return [TraceRequest(row.line, 0.0, row.length(INPUT), answer)]


def _mooncake(row: Row, options: FormatOptions) -> list[TraceRequest]:
    if "input_length" not in row.values:
        return _log(row, options)
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
    name = next((name for name in TALKS if name in row.values), TALKS[0])
    said = row.values.get(name)
    if not isinstance(said, list) or not all(isinstance(turn, dict) for turn in said):
        raise row.wrong(f'{name} is {shown(said)}; allowed is a list of {{"from": ..., "value": TEXT}}')
    messages: list[dict[str, str]] = []
    for turn in said:
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str):
            raise row.wrong(f"from is {shown(speaker)}; allowed are {', '.join(_ROLES)}")
        if (role := _ROLES.get(speaker.lower())) is None:
            options.skipped[speaker] += 1
        elif not isinstance(text, str):
            raise row.wrong(f"value is {shown(text)}; allowed is text")
        messages.append({"role": role or "", "content": text if role else ""})
    asked = [at for at, pair in enumerate(pairwise(messages)) if [m["role"] for m in pair] == ["user", "assistant"]]
    return [
        TraceRequest(
            row.line,
            0.0,
            content=Content.of_messages([message for message in messages[: at + 1] if message["role"]]),
            answer=messages[at + 1]["content"],
        )
        for at in asked[: options.turns]
    ]


def _log(row: Row, options: FormatOptions) -> list[TraceRequest]:
    """Return a list with the single request that a record logs, such as the body of an OpenAI API request."""
    inner = next((row.values[name] for name in BODIES if isinstance(row.values.get(name), dict)), None)
    body = row if inner is None else row.inside(inner)
    if "embedding" in str(row.values.get("url")):
        raise row.wrong(f"url is {shown(row.values['url'])}; only requests that generate text can be sent")
    given = {name: value for name, value in body.values.items() if value not in (None, "")}
    limit = next((name for name in (*_LIMITS, *_OUTPUT) if name in given), None)
    length = None if limit is None else body.length(limit)
    answer = next((given[name] for name in _ANSWERS if isinstance(given.get(name), str)), None)
    talk = "input" if isinstance(given.get("input"), list) else "messages"
    if talk in given:
        messages = _messages(body, talk)
        if len(messages) > 1 and messages[-1]["role"] == "assistant" and limit not in _LIMITS:
            *messages, last = messages
            answer = Content.of_messages([last]).text or json.dumps(last.get("tool_calls"))
        return [TraceRequest(row.line, 0.0, None, length, content=Content.of_messages(messages), answer=answer)]
    name = next((name for name in PROMPTS if name in given), "prompt")
    prompt = given.get(name)
    if not isinstance(prompt, str) or prompt.strip().isdecimal():
        raise row.wrong(f"{name} is {shown(prompt)} and messages are missing; give messages, or prompt as text")
    contexts = [given[more] for more in _CONTEXTS if name == "instruction" and isinstance(given.get(more), str)]
    return [TraceRequest(row.line, 0.0, None, length, content=Content("\n\n".join([prompt, *contexts])), answer=answer)]


def _messages(row: Row, name: str) -> list[Mapping[str, Any]]:
    messages = row.values[name]
    if not isinstance(messages, list) or not messages:
        raise row.wrong(f"{name} is {shown(messages)}; allowed is a list of one or more")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.wrong(f"{name}[{at}] is {shown(message)}; allowed is an object with a role")
        parts = message.get("content")
        if not (parts is None or isinstance(parts, str) or (isinstance(parts, list) and all(map(_is_text, parts)))):
            raise row.wrong(f"{name}[{at}].content is {shown(parts)}; allowed is text, or a list of text parts")
    return messages


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


_AZURE = {"timestamp": "TIMESTAMP", "contexttokens": INPUT, "generatedtokens": OUTPUT}
_BURSTGPT = {"timestamp": "Timestamp", "request tokens": INPUT, "response tokens": OUTPUT}


def _time(row: Row) -> str | None:
    return next((name for name in _TIMES if row.values.get(name) is not None), None)


FORMATS: dict[TraceFormat, Format] = {
    "azure": Format(partial(csv_rows, needed=_AZURE), _lengths, lambda row: "TIMESTAMP"),
    "burstgpt": Format(partial(csv_rows, needed=_BURSTGPT), _lengths, lambda row: "Timestamp", fixed_unit=True),
    "lengths": Format(length_rows, _lengths, _time),
    "mooncake": Format(records, _mooncake, _time, "ms", block_tokens=512),
    "bailian": Format(records, _mooncake, _time, "s", True, 16),
    "sharegpt": Format(json_objects, _sharegpt, lambda row: None),
    "log": Format(records, _log, _time),
}
