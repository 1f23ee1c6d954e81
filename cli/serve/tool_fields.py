"""Fields of a chat request that declare functions and say which of them the model calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

from llmsched.cli.serve.strict_schema import wrong
from llmsched.engine.errors import RequestError

_NO_PARAMETERS = {"type": "object", "properties": {}}


class _Declaration(BaseModel):
    """Base class that keeps unknown fields, because chat templates may show them to the model."""

    model_config = ConfigDict(strict=True, extra="allow")


class Function(_Declaration):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    #: True: the arguments follow the schema in `parameters` exactly.
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise wrong(f'the type must be "object", not {str(schema["type"])[:40]!r}')
        return schema


class Tool(_Declaration):
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: with parameters, and without fields that are None."""
        shown = self.model_dump(exclude_none=True)
        shown["function"].pop("strict", None)
        shown["function"].setdefault("parameters", _NO_PARAMETERS)
        return shown


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """Choice of one function, which the model must call."""

    name: str


def _tool_choice(value: Any) -> str | NamedFunction | None:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedFunction(name)
    raise wrong(
        'must be "none", "auto", "required" or an object such as {"type": "function", "function": {"name": "f"}}'
    )


_NAME_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NAMED_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _NAME_SCHEMA},
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    str | NamedFunction | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_SCHEMA]}),
]


def check_tools(tools: Sequence[Tool], choice: str | NamedFunction | None) -> None:
    """Raise RequestError for a name that is declared twice, or a choice that `tools` do not allow."""
    names = Counter(tool.function.name for tool in tools)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise RequestError("tools", f"tools declares the function {twice!r} more than once")
    if not tools and choice not in (None, "none"):
        raise RequestError("tool_choice", "tool_choice is only allowed when tools declares functions")
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise RequestError("tool_choice", f"tool_choice names the function {choice.name[:100]!r}; declare it in tools")
