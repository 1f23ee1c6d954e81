"""Resolved settings for tests that do not plan memory, and published config.json files of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsched.engine.architecture.config_fields import read_config_file
from llmsched.engine.config import ResolvedConfig

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"


def published_config(name: str) -> dict[str, Any]:
    """Return the config.json of the model that `name` names, such as openai--gpt-oss-20b."""
    return read_config_file(CONFIGS / f"{name}_config.json")


def resolved(**knobs: Any) -> ResolvedConfig:
    """Return settings as they are after planning on a CPU. `knobs` replace the values chosen here."""
    chosen = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32"}
    return ResolvedConfig(**{**chosen, "max_model_len": 4096, "max_num_batched_tokens": 2048, **knobs})
