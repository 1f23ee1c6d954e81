"""Serving engine: Engine (synchronous), AsyncEngine (in a thread), their settings, requests and outputs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmsched.engine.config import EngineConfig
from llmsched.engine.request import FinishReason, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from llmsched.engine.build import build_engine
    from llmsched.engine.core import Engine
    from llmsched.engine.service import AsyncEngine
    from llmsched.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "build_engine",
]

_LAZY = {"AsyncEngine": "service", "Engine": "core", "EngineStats": "stats", "build_engine": "build"}


def __getattr__(name: str) -> Any:
    """Import the object `name` and return it. Raises AttributeError for an unknown name.

    Python calls this function for a name in _LAZY, which is imported only when a program uses it. So programs that only
    plan memory do not import the engine.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
