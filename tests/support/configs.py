"""Resolved settings for tests that build a scheduler or an engine without planning memory."""

from __future__ import annotations

from typing import Any

from llmsched.engine.config import ResolvedConfig


def resolved(**knobs: Any) -> ResolvedConfig:
    """Return settings as they are after planning on a CPU. `knobs` replace the values chosen here."""
    chosen = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32"}
    return ResolvedConfig(**{**chosen, "max_model_len": 4096, "max_num_batched_tokens": 2048, **knobs})
