"""The scheduler's decisions about all that a request asked for."""

from __future__ import annotations

from dataclasses import replace

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
