"""Serving engine: Engine (synchronous), AsyncEngine (in a thread), their settings, requests and outputs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmsched.engine.config import EngineConfig
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.request import FinishReason, Request, RequestOutput
from llmsched.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmsched.engine.async_engine import AsyncEngine
    from llmsched.engine.build import build_engine
    from llmsched.engine.core import Engine
    from llmsched.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "GrammarSpec",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "build_engine",
]

_LAZY = {"AsyncEngine": "async_engine", "Engine": "core", "EngineStats": "stats", "build_engine": "build"}


def __getattr__(name: str) -> Any:
    """Import the object `name` when a program first uses it, so that programs that only plan memory load no engine."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
