from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Schema(BaseModel):
    """Base class of objects in request bodies. It converts no types and rejects unknown fields."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )

    #: Fields of the API that this server does not support -> the only value that it accepts, besides null.
    unsupported: ClassVar[Mapping[str, Any]] = {}
    #: Former names of fields -> what to send instead.
    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """Raise an error for the first unknown field. pydantic's own check would list them all, which may be many."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and (unknown := next((key for key in value if key not in known), None)):
            hint = f"; use {cls.renamed[unknown]}" if unknown in cls.renamed else ""
            raise PydanticCustomError(
                "unknown_field", "unknown field '{field}'{hint}", {"field": unknown[:100], "hint": hint}
            )
        return value


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_value", "{message}", {"message": message})
