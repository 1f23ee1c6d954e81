"""Whether a model that can be planned for can be served as well, told without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsched.engine.architecture.fields import transformers_config
from llmsched.engine.errors import ModelError
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.engine.model.support import check_stated, check_supported

_ANY = "any"  # the name in messages that are told without it


def refusal(planner: ModelPlanner) -> str | None:
    """Why serve would not take the model, None if it would as far as its config tells."""
    try:
        if check_stated(planner.content, _ANY):
            return None
    except ModelError as problem:
        return _reason(problem)
    if planner.cache is None:
        return _of_class(planner.content)
    reason: str | None = planner.cache.get("refusal", lambda: _of_class(planner.content))
    return reason


def _of_class(content: Mapping[str, Any]) -> str | None:
    """As `refusal`, from the class that transformers has for the model."""
    made = transformers_config(content)
    if made is None:
        return f"transformers does not know model_type {content.get('model_type')}"
    try:
        check_supported(made, _ANY)
    except ModelError as problem:
        return _reason(problem)
    return None


def _reason(problem: ModelError) -> str:
    return str(problem).removeprefix(f"model {_ANY}: ")
