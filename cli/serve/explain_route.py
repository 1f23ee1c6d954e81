from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import Response

from llmsched.cli.serve.api_errors import ApiError, json_response
from llmsched.cli.serve.completion_response import engine_ids
from llmsched.cli.timeline import routed_entry, timeline_body
from llmsched.cli.timeline_words import decision_text, summary
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.core import Engine, Timeline
from llmsched.engine.scheduler.ledger import MAX_REQUESTS

T = TypeVar("T")


class LatestAnswers(dict[str, T]):
    """Dictionary with a value for each of the latest MAX_REQUESTS answers, by an id of the answer or its request."""

    def add(self, name: str, value: T) -> None:
        self.pop(name, None)
        self[name] = value
        if len(self) > MAX_REQUESTS:
            del self[next(iter(self))]


def explain_route(
    engine: AsyncEngine,
    answer_ids: Mapping[str, str],
    routings: Mapping[str, Mapping[str, Any]],
    max_choices: int,
) -> APIRouter:
    """Return the route /v1/requests/ID/explain, where ID is the id of an answer or the X-Request-Id of its request.

    `answer_ids` has the ids of answers by X-Request-Id, `routings` the choices of an ingress by the ids of answers.
    """
    router = APIRouter()

    @router.get("/v1/requests/{given:path}/explain")
    async def explain(given: str) -> Response:
        for answer_id in (given, answer_ids.get(given, given)):
            if timelines := await engine.call(partial(timelines_of, answer_id=answer_id, max_choices=max_choices)):
                routing = routings.get(answer_id)
                choices = [_in_words(each, routing) for each in timelines]
                replica = {} if routing is None else {"replica": routing["replica"]}
                return json_response({"id": answer_id, **replica, "choices": choices})
        raise ApiError(
            404,
            f"request {given[:200]!r} is unknown; the server remembers only its latest requests",
            param="request_id",
            code="request_not_found",
        )

    return router


def _in_words(timeline: Timeline, routing: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a timeline as JSON, with a `summary` and, in each entry, the decision in words (`why`)."""
    body = timeline_body(timeline)
    routed = [] if routing is None else [routed_entry(routing)]
    entries = [{**entry, "why": decision_text(entry)} for entry in (*routed, *body["entries"])]
    return {**body, "summary": summary(entries), "entries": entries}


def timelines_of(engine: Engine, answer_id: str, max_choices: int) -> list[Timeline]:
    """Return the timelines of an answer's choices, numbered as in the answer; [] if the answer is unknown."""
    if timelines := engine.explain(answer_id):
        return timelines
    of_prompts = [engine.explain(name) for name in engine_ids(answer_id, max_choices)]
    n = 1 + max((timeline.index for prompt in of_prompts for timeline in prompt), default=0)
    return [
        replace(timeline, index=number * n + timeline.index)
        for number, prompt in enumerate(of_prompts)
        for timeline in prompt
    ]
