"""Configs of popular models, so that planning for these models works offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def shipped_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the content of each shipped config.json by hub id, without settings that do not matter to planning."""
    lines = files(__package__).joinpath("models/configs.jsonl").read_text(encoding="utf-8").splitlines()
    return {name: entry["config"] for entry in map(json.loads, lines) for name in entry["ids"]}
