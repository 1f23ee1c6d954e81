"""What transformers had to be asked about a config, kept for the next time: asking takes seconds.

Families of engine/kv/families.py are never asked for and never kept. An entry is found by the config's content and the
versions that it came from; one that cannot be read or written is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Changes when what is kept, or how it is worked out, does.
FORMAT = 1


class Recall:
    """The kept answers about one config.json, in a file of `directory`."""

    def __init__(self, content: Mapping[str, Any], directory: Path) -> None:
        self._content = content
        self._directory = directory
        self._answers: dict[str, Any] | None = None

    def get(self, name: str, ask: Callable[[], Any]) -> Any:
        """The answer of that name: the kept one, else what `ask` returns, which must be plain JSON. Raises as `ask`."""
        answers = self._load()
        if name not in answers:
            answers[name] = ask()
            self._save(answers)
        return answers[name]

    @cached_property
    def _path(self) -> Path:
        versions = [FORMAT, version("llmsched"), version("transformers")]
        digest = hashlib.sha256(json.dumps([versions, self._content], sort_keys=True, default=str).encode())
        return self._directory / f"{digest.hexdigest()[:32]}.json"

    def _load(self) -> dict[str, Any]:
        if self._answers is None:
            self._answers = {}
            try:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                self._answers = found if isinstance(found, dict) else {}
            except (OSError, ValueError) as problem:
                logger.debug("nothing is kept in %s: %s", self._path, problem)
        return self._answers

    def _save(self, answers: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(answers)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".part", encoding="utf-8", delete=False
            ) as part:
                part.write(text)
            os.replace(part.name, self._path)
        except (OSError, TypeError) as problem:
            logger.debug("%s cannot be kept: %s", self._path, problem)
