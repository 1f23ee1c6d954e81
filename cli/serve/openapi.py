"""OpenAPI description of the server's routes, at /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def with_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a body of this schema itself."""
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of these bodies and of errors to the description of `app`, which is made at its first use."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app, bodies)
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]  # as FastAPI's documentation says


def _description(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}")
    components = document.setdefault("components", {})
    components["schemas"] = {**found["$defs"], "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    error = {"description": "Error", "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # this server answers 400
            operation["responses"]["default"] = error
    return document
