"""Fields of a request that restrict its output, such as response_format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import from_json

from llmsched.cli.serve.strict_schema import Schema, wrong
from llmsched.engine.grammar.spec import JSON_OBJECT, GrammarSpec

JsonSchemaText = dict[str, Any] | bool


class NamedSchema(Schema):
    """Schema of a response_format. It is enforced even if `strict` is False."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonSchemaText, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Schema):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema must be given if, and only if, type is json_schema")
        return self

    def spec(self) -> GrammarSpec | None:
        if self.json_schema is not None:
            return GrammarSpec.json_schema(self.json_schema.schema_)
        return JSON_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Schema):
    """vLLM's structured_outputs. Exactly one field must be given."""

    json_: Annotated[JsonSchemaText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None

    @field_validator("json_", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        """Parse a schema that is given as text."""
        if not isinstance(value, str):
            return value
        try:
            return from_json(value)
        except ValueError as error:
            raise wrong(f"the schema is not valid JSON: {error}") from error

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = [name for name in ("json_", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) + bool(self.json_object) != 1:
            raise wrong("give exactly one of json, json_object, regex, choice and grammar")
        return self

    def spec(self) -> GrammarSpec:
        if self.json_ is not None:
            return GrammarSpec.json_schema(self.json_)
        if self.choice is not None:
            return GrammarSpec.choice(self.choice)
        if self.regex is not None:
            return GrammarSpec("regex", self.regex)
        return JSON_OBJECT if self.grammar is None else GrammarSpec("grammar", self.grammar)
