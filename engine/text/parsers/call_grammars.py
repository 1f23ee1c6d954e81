"""Descriptions of outputs in which the model calls functions with arguments that are valid under their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmsched.engine.grammar.spec import GrammarSpec, Mark, Tag, inline_json, tagged_output
from llmsched.engine.text.parsers.harmony import HarmonyParser
from llmsched.engine.text.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from llmsched.engine.text.parsers.output_parser import Functions, OutputParser
from llmsched.engine.text.parsers.python_calls import PythonicParser
from llmsched.engine.text.parsers.xml_calls import Qwen3CoderParser

#: Notations without a grammar -> the notation in which calls are forced.
_FORCED_IN: Mapping[type[OutputParser], type[OutputParser]] = {
    PythonicParser: Llama3JsonParser,
    Qwen3CoderParser: HermesParser,
}
_SEPARATORS: Mapping[type[OutputParser], str] = {HermesParser: "\n", Llama3JsonParser: "; "}
#: Keywords that may declare arguments besides those in `properties`.
_OTHERS = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def forced_notation(parser: type[OutputParser]) -> type[OutputParser]:
    """Return the parser of the notation in which a model with this parser writes calls that a grammar forces."""
    return _FORCED_IN.get(parser, parser)


def forced_calls(
    parser: type[OutputParser], functions: Functions, special_ids: Mapping[str, int], *, many: bool
) -> GrammarSpec:
    """Return the description of outputs that are one call or, if `many`, one or several calls of `functions`.

    `parser` is a result of `forced_notation`. `special_ids` has the ids of marks that are special tokens.
    """
    tags = [_tag(parser, name, schema, special_ids) for name, schema in functions.items()]
    many = many and parser is not HarmonyParser
    return tagged_output(tags, separator=_SEPARATORS.get(parser, ""), many=many)


def strict_calls(
    parser: type[OutputParser], functions: Functions, special_ids: Mapping[str, int], *, many: bool
) -> GrammarSpec | None:
    """Return the description of outputs that are text, calls, or both, or None if there is none for this notation."""
    if parser in (HermesParser, MistralParser):
        tags = [_tag(parser, name, schema, special_ids) for name, schema in functions.items()]
        return tagged_output(tags, trigger=special_ids.get(parser.markers[0], parser.markers[0]), many=many)
    if parser is not Llama3JsonParser:
        return None
    return _or(forced_calls(parser, functions, special_ids, many=many), r"/\s*([^{\s](.|\n)*)?/")


def calls_or_json(calls: GrammarSpec, schema: str) -> GrammarSpec:
    """Return the description of outputs that are `calls` (from `forced_calls`) or JSON that is valid under `schema`."""
    wanted = json.loads(schema)
    return calls if wanted is False else _or(calls, inline_json(wanted))


def _or(calls: GrammarSpec, other: str) -> GrammarSpec:
    return GrammarSpec("tags", calls.text.replace("start:", f"start: calls | other\nother: {other}\ncalls:", 1))


def _tag(parser: type[OutputParser], name: str, schema: Mapping[str, Any], special_ids: Mapping[str, int]) -> Tag:
    def marks(*texts: str) -> list[Mark]:
        return [special_ids.get(text, text) for text in texts]

    schema = _closed({**_ANY_OBJECT, **schema})
    if parser is HermesParser:
        return Tag(marks("<tool_call>", "\n"), _call(name, "arguments", schema), marks("\n", "</tool_call>"))
    if parser is Llama3JsonParser:
        return Tag([], _call(name, "parameters", schema))
    if parser is HarmonyParser:
        head = ("<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")
        return Tag(marks(*head), schema)
    assert parser is MistralParser
    if "[ARGS]" in special_ids:
        return Tag(marks("[TOOL_CALLS]", name, "[ARGS]"), schema)
    return Tag(marks("[TOOL_CALLS]", "["), _call(name, "arguments", schema), ["]"])


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid arguments that the schema does not declare, unless it has a rule for them such as additionalProperties."""
    if "properties" not in schema or _OTHERS & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


def _call(name: str, arguments: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call as JSON. Definitions move to its root, where references expect them."""
    inner = dict(schema)
    definitions: dict[str, Any] = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
    properties = {"name": {"const": name}, arguments: inner}
    required = ["name", arguments]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **definitions,
    }
