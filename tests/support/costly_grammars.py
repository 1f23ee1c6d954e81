"""Grammars that cost much to compile, or would if nothing bounded the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmsched.engine.grammar.spec import GrammarSpec


def _object(count: int, leaf: Callable[[int], Any]) -> GrammarSpec:
    """Return an object whose property number i has the schema `leaf(i)`."""
    properties = {f"p{i}": leaf(i) for i in range(count)}
    return GrammarSpec.json_schema({"type": "object", "properties": properties, "required": list(properties)})


def _chain(length: int) -> GrammarSpec:
    definitions: dict[str, Any] = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{length}": {"type": "null"}}})


_KINDS: list[Any] = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"items": {"type": "number"}}]

GRAMMARS = {
    "40 properties": _object(40, lambda i: _KINDS[i % 4]),
    "long strings": _object(40, lambda i: {"type": "string", "maxLength": 2000 + i}),
    "patterns": _object(1400, lambda i: {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 3}}}x{i}$"}),
    "choices": GrammarSpec.choice([f"v{i * 7919 % 100_000}" for i in range(13_000)]),
    "multiples": _object(40, lambda i: {"type": "integer", "multipleOf": 99_991}),
    "ranges": _object(1500, lambda i: {"type": "integer", "minimum": i * 1_234_567, "maximum": i * 9_876_543 + 99}),
    "references": _chain(2200),
    "optional letters": GrammarSpec("regex", "a?" * 8000),
    "brackets": GrammarSpec.json_schema({"type": "string", "pattern": "[" * 120_000}),
}
