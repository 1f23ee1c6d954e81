"""Random JSON schemas with the keywords that people use, small enough that a random model completes their values."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("id", "name", "size", "on", "next", "a b", "é", "x-1", "list", "value")
#: Only formats of limited length.
FORMATS = ("date", "time", "ipv4", "uuid", "date-time")
PATTERNS = ("^[a-c]{1,4}$", "[0-9]{2}", "^(yes|no)$", "^[A-Z][a-z]{0,3}(-[0-9])?$", "^.{2,3}$")


class SchemaMaker:
    """Maker of random schemas. Equal seeds make equal schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """Return a schema, sometimes with definitions, of which one may refer to itself."""
        if self._random.random() < 0.7:
            return self._value(3)
        self._refs = ["#/$defs/item", "#/definitions/tree"]
        tree = {
            "type": "object",
            "properties": {
                "v": self._scalar(),
                "kids": {"type": "array", "items": {"$ref": self._refs[1]}, "maxItems": 2},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
        found = {"type": "array", "items": {"$ref": self._random.choice(self._refs)}, "minItems": 1, "maxItems": 2}
        return found | {"$defs": {"item": self._value(2)}, "definitions": {"tree": tree}}

    def _value(self, depth: int) -> dict[str, Any]:
        makers = [self._scalar] if not depth else [self._scalar, self._object, self._array, self._union, self._object]
        maker = self._random.choice(makers)
        return maker(depth - 1) if depth and maker != self._scalar else self._scalar()

    def _scalar(self) -> dict[str, Any]:
        pick, low = self._random.random(), self._random.randint(-50, 50)
        if pick < 0.2:
            return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 2000)}
        if pick < 0.3:
            return {
                "type": "integer",
                "exclusiveMinimum": low,
                "multipleOf": self._random.randint(1, 12),
                "maximum": 9999,
            }
        if pick < 0.4:
            return {"type": "number", "minimum": low / 4, "exclusiveMaximum": low / 4 + 3}
        if pick < 0.5:
            return {"enum": self._random.sample(["a", "b c", 'q"', 1, -2.5, None, True, [1], {"k": "v"}], 3)}
        if pick < 0.55:
            return {"const": self._random.choice(["fixed", 7, None, {"a": [1, {"b": False}]}])}
        if pick < 0.65:
            return {"type": self._random.sample(["null", "boolean", "integer"], 2)}
        if pick < 0.75:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if pick < 0.85:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 9)}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.7]
        pick = self._random.random()
        if pick < 0.6:
            schema["additionalProperties"] = False
        elif pick < 0.8:
            schema["additionalProperties"] = self._scalar()
            schema["required"] = names
            schema["maxProperties"] = len(names) + 2
            schema["minProperties"] = len(names) + self._random.randint(0, 1)
        elif pick < 0.9:
            schema["patternProperties"] = {"^z[0-9]$": self._scalar()}
            schema["additionalProperties"] = False
        else:
            schema = {"allOf": [schema, {"properties": {"more": self._scalar()}, "required": ["more"]}]}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        schema = {"type": "array", "items": self._value(depth), "minItems": least}
        schema["maxItems"] = least + self._random.randint(0, 2)
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self._scalar(), self._scalar()]
        return schema

    def _union(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.3:
            kinds = self._random.sample(["boolean", "null", "integer"], 2)
            return {"oneOf": [{"type": kind} for kind in kinds]}
        return {"anyOf": [self._value(depth), self._value(depth)], "title": "either", "description": "one of two"}
