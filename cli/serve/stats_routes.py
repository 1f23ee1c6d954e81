"""Routes behind the page at / and `llmsched top`: live figures, and the requests whose clients waited longest."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmsched.cli.live_stats import NUM_SLOWEST, histograms, stats_body, summary_body
from llmsched.cli.serve.api_errors import ApiError, json_response
from llmsched.cli.serve.health_routes import health_body
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.core import Engine


def stats_route(engine: AsyncEngine, model_name: str) -> APIRouter:
    """Return the route /v1/stats, with the figures of the latest minute.

    With `?histograms=true`, the body has the counts of latencies up to each bound, from which those of several servers
    are merged.
    """
    router = APIRouter()

    @router.get("/v1/stats")
    async def stats(http: Request) -> Response:
        wanted = http.query_params.get("histograms", "false")
        if wanted not in ("true", "false"):
            raise ApiError(400, f"histograms is {wanted[:40]!r}; allowed is true or false", param="histograms")
        before, now = engine.recent.window()
        uptime_s = round(now.time - engine.recent.start, 3)
        body = {"model": model_name, "uptime_s": uptime_s} | health_body(engine) | stats_body(before, now)
        return json_response(body | ({"histograms": histograms(before, now)} if wanted == "true" else {}))

    return router


def slowest_route(engine: AsyncEngine) -> APIRouter:
    """Return the route /v1/requests/slowest. It is administrative, because it names the requests of all clients."""
    router = APIRouter()

    @router.get("/v1/requests/slowest")
    async def slowest() -> Response:
        def look(core: Engine) -> list[dict[str, Any]]:
            now = core.clock()
            return [summary_body(each, now) for each in core.slowest(NUM_SLOWEST)]

        return json_response({"object": "list", "data": await engine.call(look)})

    return router
