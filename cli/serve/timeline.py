"""The scheduler's decisions about a request as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmsched.cli.serve.generation import prompt_ids
from llmsched.cli.serve.protocol import MAX_CHOICES
from llmsched.engine.core import Timeline
from llmsched.engine.service import AsyncEngine


async def timelines_of(engine: AsyncEngine, request_id: str) -> list[Timeline]:
    """All choices of all prompts of a request, numbered as in its answer; empty if it is unknown or long gone."""
    one, *several = await engine.explain([request_id, *prompt_ids(request_id, MAX_CHOICES)])
    if one:
        return one
    n = 1 + max((timeline.index for prompt in several for timeline in prompt), default=0)
    return [
        replace(timeline, index=number * n + timeline.index)
        for number, prompt in enumerate(several)
        for timeline in prompt
    ]


def timeline_body(timeline: Timeline) -> dict[str, Any]:
    """Entries of one choice; times are milliseconds since the request was queued."""
    return {
        "index": timeline.index,
        "entries": [
            {
                "at_ms": _milliseconds(entry.time - timeline.start),
                "until_ms": _milliseconds(entry.until - timeline.start),
                "what": entry.what,
                "count": entry.count,
                "details": entry.details,
            }
            for entry in timeline.entries
        ],
    }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)
