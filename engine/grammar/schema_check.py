"""Search of JSON schemas for what llguidance would ignore, and for the place of an error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

#: Keywords whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_DEFINITIONS = ("$defs", "definitions")
#: Keywords whose values are objects with a schema for each name.
_NAMED = (*_DEFINITIONS, "properties", "patternProperties")
#: Largest least common multiple of all values of multipleOf. llguidance takes time and memory in proportion to it.
MAX_MULTIPLE = 100_000
#: Seconds that the search for the place of an error may take.
_SEARCH_S = 0.2


def check_schema(schema: Any, compile_problem: Callable[[Any], str | None]) -> str | None:
    """Return what is wrong with a JSON schema and where, or None if it is supported.

    `compile_problem(schema)` returns the compiler's error for a schema, or None.
    """
    if schema is False:
        return "at #: false allows no value"
    if isinstance(schema, dict) and "x-guidance" in schema:
        return "at #: x-guidance is not supported"
    found = _ignored_limit(schema) or _large_multiple(schema)
    if found is None and (message := compile_problem(schema)) is not None:
        found = _place_of(schema, message, compile_problem), message
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
