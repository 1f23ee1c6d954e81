"""Descriptions of outputs in which the model calls functions with arguments that are valid under their schemas."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

from llmsched.engine.grammar.spec import GrammarSpec, Mark, Tag, inline_json, literals, tagged_output
from llmsched.engine.text.parsers.deepseek_calls import DeepSeekV3Parser, DeepSeekV31Parser
from llmsched.engine.text.parsers.harmony import HarmonyParser
from llmsched.engine.text.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from llmsched.engine.text.parsers.output_parser import Functions, OutputParser
from llmsched.engine.text.parsers.python_calls import PythonicParser
from llmsched.engine.text.parsers.xml_calls import Qwen3CoderParser

#: Notations without a grammar -> the notation in which grammars write calls. It begins calls with the same mark.
_FORCED_IN: Mapping[type[OutputParser], type[OutputParser]] = {Qwen3CoderParser: HermesParser}
_SEPARATORS: Mapping[type[OutputParser], str] = {HermesParser: "\n", Llama3JsonParser: "; ", DeepSeekV3Parser: "\n"}
#: Keywords that may declare arguments besides those in `properties`.
_OTHERS = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
#: Keywords of a function's schema that keyword arguments express, and those that restrict nothing.
_OF_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", *_DEFINITIONS})
_OF_KEYWORDS |= {"title", "description", "$schema", "$id", "$comment"}
#: Reference to something outside the definitions of a schema, in its JSON text.
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


def forced_notation(parser: type[OutputParser]) -> type[OutputParser]:
    """Return the parser of the notation in which a model with this parser writes calls under a grammar."""
    return _FORCED_IN.get(parser, parser)


def forced_calls(
    parser: type[OutputParser], functions: Functions, special_ids: Mapping[str, int], *, many: bool
) -> GrammarSpec:
    """Return the description of outputs that are one call or, if `many`, one or several calls of `functions`.

    `parser` is a result of `forced_notation`. `special_ids` has the ids of marks that are special tokens.
    """
    if parser is PythonicParser:
        return _python_calls(functions, many=many)
    tags = [_tag(parser, name, schema, special_ids) for name, schema in functions.items()]
    many = many and parser is not HarmonyParser
    around = _around(parser, special_ids)
    return tagged_output(tags, around=around, separator=_SEPARATORS.get(parser, ""), many=many)


def strict_calls(
    parser: type[OutputParser], functions: Functions, special_ids: Mapping[str, int], *, many: bool
) -> GrammarSpec | None:
    """Return the description of outputs that are text, calls, or both.

    The arguments are those of `forced_calls`. Returns None if the marks of the notation are not special tokens, but
    would have to be.
    """
    if parser in (Llama3JsonParser, PythonicParser):
        begin = "{" if parser is Llama3JsonParser else r"\["
        return _or(forced_calls(parser, functions, special_ids, many=many), rf"/\s*([^{begin}\s](.|\n)*)?/")
    if parser is HarmonyParser:
        return _harmony_messages(functions, special_ids)
    tags = [_tag(parser, name, schema, special_ids) for name, schema in functions.items()]
    trigger = special_ids.get(parser.markers[0], parser.markers[0])
    around, separator = _around(parser, special_ids), _SEPARATORS.get(parser, "")
    return tagged_output(tags, around=around, trigger=trigger, separator=separator, many=many)


def calls_or_json(calls: GrammarSpec, schema: str) -> GrammarSpec:
    """Return the description of outputs that are `calls` (from `forced_calls`) or JSON that is valid under `schema`."""
    wanted = json.loads(schema)
    return calls if wanted is False else _or(calls, inline_json(wanted))


def _or(calls: GrammarSpec, other: str) -> GrammarSpec:
    return GrammarSpec("tags", calls.text.replace("start:", f"start: calls | other\nother: {other}\ncalls:", 1))


def _around(parser: type[OutputParser], special_ids: Mapping[str, int]) -> tuple[Mark, Mark] | None:
    """Return the marks around all calls of an output."""
    if not issubclass(parser, DeepSeekV31Parser):
        return None
    first, last = parser.markers[:2]
    return special_ids.get(first, first), special_ids.get(last, last)


def _harmony_messages(functions: Functions, special_ids: Mapping[str, int]) -> GrammarSpec | None:
    """Return the description of messages of which the last one may be a call. None if their marks are no tokens."""
    if not special_ids.keys() >= {*_HARMONY_MARKS}:
        return None
    channel, message, end, start = (literals([special_ids[mark]]) for mark in _HARMONY_MARKS)
    text = f"{channel} CHANNEL {message} TEXT"
    lines = [
        "start: message* (last | calls)",
        f'message: {text} {end} {start} "assistant"',
        f"last: {text}",
        'CHANNEL: "analysis" | "commentary" | "final"',
        r"TEXT: /(.|\n)*/",
    ]
    calls = forced_calls(HarmonyParser, functions, special_ids, many=False)
    return GrammarSpec("tags", "\n".join([*lines, calls.text.replace("start:", "calls:", 1)]))


def _python_calls(functions: Functions, *, many: bool) -> GrammarSpec:
    """Return the description of a Python list of calls. Arguments that keywords cannot express are a dictionary."""
    call = "(" + " | ".join(f"call{i}" for i in range(len(functions))) + ")"
    lines = [f'start: "[" {call} (", " {call})* "]"' if many else f'start: "[" {call} "]"']
    for i, (name, schema) in enumerate(functions.items()):
        schema = _closed({**_ANY_OBJECT, **schema})
        if (values := _keyword_values(schema)) is None:
            lines.append(f'call{i}: {literals([f"{name}(**"])} {inline_json(schema)} ")"')
        else:
            lines += _keyword_call(i, name, values, _required(schema))
    return GrammarSpec("tags", "\n".join(lines))


def _keyword_call(
    number: int, name: str, values: Mapping[str, Mapping[str, Any]], required: Collection[str]
) -> list[str]:
    """Return the rule `call{number}` of a call with keyword arguments, in the order of `values`, and its parts."""
    parts, firsts = [], list[str]()
    for place, (key, schema) in enumerate(values.items()):
        rest = f" rest{number}of{place + 1}" if place + 1 < len(values) else ""
        argument = f"argument{number}of{place}"
        parts.append(f"{argument}: {literals([f'{key}='])} {inline_json(schema)}")
        if place:
            parts.append(f'rest{number}of{place}: (", " {argument}){"" if key in required else "?"}{rest}')
        if not any(earlier in required for earlier in list(values)[:place]):
            firsts.append(argument + rest)  # nothing before it has to be there
    inner = f"({' | '.join(firsts)}){'' if required else '?'}" if firsts else ""
    return [f'call{number}: {literals([f"{name}("])} {inner} ")"', *parts]


def _keyword_values(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]] | None:
    """Return the schemas of arguments by keyword. None if the function's schema says more about them than that."""
    properties = schema.get("properties", {})
    if not schema.keys() <= _OF_KEYWORDS or schema.get("additionalProperties") is not False:
        return None
    if not isinstance(properties, Mapping) or not all(map(_is_keyword, properties)):
        return None
    if not set(_required(schema)) <= properties.keys() or _OTHER_REFERENCE.search(json.dumps(schema)):
        return None
    if not all(isinstance(each, Mapping) for each in properties.values()):
        return None
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return {key: {**each, **shared} for key, each in properties.items()}


def _required(schema: Mapping[str, Any]) -> list[str]:
    return schema.get("required") or []


def _is_keyword(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


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
    if issubclass(parser, DeepSeekV31Parser):
        return Tag(marks(*parser.begin, name, *parser.middle), schema, marks(*parser.end))
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
    definitions: dict[str, Any] = {key: inner.pop(key) for key in _DEFINITIONS if key in inner}
    properties = {"name": {"const": name}, arguments: inner}
    required = ["name", arguments]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **definitions,
    }
