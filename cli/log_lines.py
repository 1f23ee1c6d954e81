"""Lines of the log, as text or as one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")


class JsonLines(logging.Formatter):
    """Formatter that writes a record as JSON: time (UTC), level, and a message or the fields of `event(...)`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname.lower()}
        if (name := getattr(record, "event", None)) is not None:
            line |= {"event": name, **getattr(record, "fields", {})}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, allow_nan=False)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that looks up sys.stderr for each record, because `serve` replaces sys.stderr."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class sets it once
        return sys.stderr


def event(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the argument `extra` of a log call whose JSON line has these fields in place of the message."""
    return {"event": name, "fields": fields}
