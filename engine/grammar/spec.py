"""Descriptions of the outputs that a request allows. They hold text only; compiler.py compiles them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

#: Options of JSON, as llguidance calls them. The limit on white space keeps a model from writing nothing else. Without
#: the escape \u, each string has one spelling, so an additional property cannot be a declared one in disguise.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}", "json_allowed_escapes": 'nrbtf\\"'}

#: What stands between the begin and the end of a literal in the source: a text, or the id of a special token.
Mark = str | int


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Description of the outputs that are allowed. An output that ends by itself matches it as a whole.

    `text` is one of these: a JSON schema (json_schema), a regular expression in the syntax of Rust's regex crate, with
    classes such as \\d for ASCII only (regex), a JSON list of strings (choice), a grammar in GBNF or in Lark's syntax
    as llguidance extends it (grammar), or the result of `tagged_output` (tags).
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "tags"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> GrammarSpec:
        return cls("json_schema", json.dumps({} if schema is True else schema, ensure_ascii=False))

    @classmethod
    def choice(cls, choices: Iterable[str]) -> GrammarSpec:
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


_JSON = re.compile(r"%json\s*")

#: Any JSON object.
JSON_OBJECT = GrammarSpec.json_schema({"type": "object"})


@dataclass(frozen=True, slots=True)
class Tag:
    """JSON between two marks, such as a tool call. A mark consists of texts and ids of special tokens."""

    begin: ListLike[Mark]
    schema: Mapping[str, Any]
    end: ListLike[Mark] = ()


def tagged_output(
    tags: ListLike[Tag],
    *,
    around: tuple[Mark, Mark] | None = None,
    trigger: Mark | None = None,
    separator: str = "",
    many: bool = True,
) -> GrammarSpec:
    """Return the description of outputs that consist of one tag or, if `many`, of tags with `separator` between them.

    `around` has the marks before the first tag and after the last one.

    With `trigger`, an output is any text, but each `trigger` in it begins a tag or, with `around`, tags. All tags begin
    with it, unless it is the first mark of `around`. If `many` is False, the first tag ends the output.
    """
    tag = "(" + " | ".join(f"tag{i}" for i in range(len(tags))) + ")"
    run = f"{tag} ({literals([separator])} {tag})*" if many else tag
    first, last = ("", "") if around is None else (literals(around[:1]), literals(around[1:]))
    begins = [tag.begin for tag in tags]
    if trigger is None:
        lines = [f"start: {first} {run} {last}"]
    else:
        if around is None:
            begins, run = [_after(trigger, begin) for begin in begins], tag
        calls = f"head {run} {last}"
        lazy = "[lazy]" if isinstance(trigger, str) else ""
        lines = [f"start: ({calls})* rest" if many else f"start: {calls} | rest", "rest: TEXT", "TEXT: /(.|\\n)*/"]
        lines.append(f"head{lazy}: TEXT {literals([trigger])}")
    for i, (begin, each) in enumerate(zip(begins, tags, strict=True)):
        lines.append(f"tag{i}: {literals(begin)} {inline_json(each.schema)} {literals(each.end)}")
    return GrammarSpec("tags", "\n".join(lines))


def inline_json(schema: Mapping[str, Any]) -> str:
    """Return the JSON texts that are valid under `schema` as a rule in Lark's syntax."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def inline_schemas(lark: str) -> Iterator[Any]:
    """Yield the schemas in a text in Lark's syntax, such as the result of `inline_json`."""
    end = 0
    while found := _JSON.search(lark, end):
        end = found.end()
        with suppress(ValueError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(lark, end)
            yield schema


def literals(marks: Iterable[Mark]) -> str:
    """Return texts and token ids in Lark's syntax."""
    # JSON leaves DEL as it is, which Lark does not allow.
    written = [
        f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark).replace("\x7f", "\\u007f") for mark in marks
    ]
    return " ".join(text for text in written if text != '""')


def _after(trigger: Mark, begin: ListLike[Mark]) -> list[Mark]:
    first = begin[0] if begin else ""
    if isinstance(trigger, str) and isinstance(first, str) and first.startswith(trigger):
        return [first.removeprefix(trigger), *begin[1:]]
    if first == trigger:
        return list(begin[1:])
    raise ValueError(f"the tag {list(begin)!r} does not begin with the trigger {trigger!r}")
