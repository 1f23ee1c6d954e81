"""Checks of JSON schemas: finds rules that llguidance would ignore, and the place of an error."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

#: Keywords whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_DEFINITIONS = ("$defs", "definitions")
#: Keywords whose values are objects with a schema for each name.
_NAMED = (*_DEFINITIONS, "properties", "patternProperties")
#: Characters that JSON can write only with the escape \\u, and DEL. llguidance drops them from values.
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: Such a character in a pattern, written as it is or as an escape. It may stand in a class of characters. A class that
#: does not end extends to the end of the text, so that many of them are not searched for an end again and again.
_CONTROLS_IN_PATTERN = re.compile(
    rf"(?P<control>{_CONTROLS.pattern}|\\(?:x|u00)(?:0[0-7bef]|1[0-9a-f]|7f))|\\.|\[(?:\\.|[^\]\\])*+\\?\]?",
    re.I | re.S,
)
#: Flags that turn on free spacing, outside classes of characters. llguidance would change the meaning.
#: There are 7 flags, each at most once.
_FREE_SPACING = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*+\\?\]?|\(\?(?P<flags>[a-zA-Z]{0,8}x[a-zA-Z]{0,8})(?:-[a-zA-Z]{1,8})?[:)]", re.S
)
#: Largest least common multiple of all values of multipleOf. llguidance takes time and memory in proportion to it.
MAX_MULTIPLE = 100_000
#: Seconds that the search for the place of an error may take.
_SEARCH_S = 0.2


def check_schema(schema: Any, compile_problem: Callable[[Any], str | None]) -> str | None:
    """Return a message that says what is wrong with a JSON schema and where, or None if it is supported.

    `compile_problem(schema)` returns the compiler's error for a schema, or None.
    """
    if schema is False:
        return "at #: false allows no value"
    if isinstance(schema, dict) and "x-guidance" in schema:
        return "at #: x-guidance is not supported"
    problem = check_values(schema)
    if problem is None and (message := compile_problem(schema)) is not None:
        problem = f"at {_place_of(schema, message, compile_problem)}: {message}"
    return problem


def check_values(schema: Any) -> str | None:
    """Return which value of a schema the compiler would not enforce, or would enforce at a high cost, and where."""
    found = _ignored_limit(schema) or _large_multiple(schema) or _unsupported_text(schema)
    return found and f"at {found[0]}: {found[1]}"


def _ignored_limit(schema: Any) -> tuple[str, str] | None:
    """Return the path of a minProperties that would not be enforced, and a message."""
    # Additional properties may repeat a name, and a repeated name is one property.
    for path, node in _all_schemas(schema):
        least, required = node.get("minProperties"), node.get("required")
        most = 1 + (len(required) if isinstance(required, list) else 0)
        if isinstance(least, int) and least > most:
            return path, f"minProperties is {least}; at most {most}, one more than are required, is supported"
    return None


def _large_multiple(schema: Any) -> tuple[str, str] | None:
    """Return the path of a multipleOf whose least common multiple with the others is too large, and a message."""
    common = 1
    for path, node in _all_schemas(schema):
        value = node.get("multipleOf")
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            # Decimals are compared without the point: 0.25 counts as 25.
            common = math.lcm(common, int(value) if value == int(value) else _digits(value))
            if common > MAX_MULTIPLE:
                return path, (
                    f"multipleOf is {str(value)[:40]}; the least common multiple of all values of multipleOf, read "
                    f"without their decimal points, must be at most {MAX_MULTIPLE}"
                )
    return None


def _digits(value: float) -> int:
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


def _unsupported_text(schema: Any) -> tuple[str, str] | None:
    """Return the path of a text or pattern of which llguidance would change the meaning, and a message."""
    for path, node in _all_schemas(schema):
        for keyword in ("const", "enum"):
            if any(map(_CONTROLS.search, _strings(node.get(keyword)))):
                return f"{path}/{keyword}", "control characters are not supported, except \\b, \\f, \\n, \\r and \\t"
        named = node.get("patternProperties")
        patterns = [node.get("pattern"), *(named if isinstance(named, dict) else ())]
        for pattern in filter(lambda each: isinstance(each, str), patterns):
            if any(found["control"] for found in _CONTROLS_IN_PATTERN.finditer(pattern)):
                return path, f"the pattern {pattern[:60]!r} has a control character, which is not supported"
            if has_free_spacing(pattern):
                return path, f"the pattern {pattern[:60]!r} has the flag x (free spacing), which is not supported"
    return None


def has_free_spacing(pattern: str) -> bool:
    """Return True if a regular expression has the flag x, with which white space and comments count for nothing."""
    return any(found["flags"] for found in _FREE_SPACING.finditer(pattern))


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, without the names of properties."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case list(items):
                waiting += items
            case dict(fields):
                waiting += fields.values()


def _all_schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `schema` and all objects in it that are schemas, with their paths."""
    waiting = [("#", schema)] if isinstance(schema, dict) else []
    while waiting:
        path, node = waiting.pop()
        yield path, node
        waiting += _subschemas(path, node)


def _place_of(schema: Any, message: str, compile_problem: Callable[[Any], str | None]) -> str:
    """Return the path of the innermost subschema for which alone the compiler gives this error."""
    until = time.monotonic() + _SEARCH_S
    path, node = "#", schema
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema} if isinstance(schema, dict) else {}
    while True:
        for where, child in _subschemas(path, node):
            if time.monotonic() > until:
                return path
            if compile_problem({**shared, **child}) == message:
                path, node = where, child
                break
        else:
            return path


def _subschemas(path: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects directly inside a schema that are schemas, with their paths. Definitions come first."""
    items = sorted(node.items(), key=lambda item: item[0] not in _DEFINITIONS) if isinstance(node, dict) else ()
    for key, value in items:
        children: list[tuple[str, Any]] = [(f"{path}/{key}", value)]
        if key in _NAMED and isinstance(value, dict):
            children = [(f"{path}/{key}/{name}", child) for name, child in value.items()]
        elif isinstance(value, list):
            children = [(f"{path}/{key}/{index}", child) for index, child in enumerate(value)]
        if key not in _DATA:
            yield from ((where, child) for where, child in children if isinstance(child, dict))
