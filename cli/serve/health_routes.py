"""Routes for probes and monitoring: /health, /ready and /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from llmsched.cli.serve.api_errors import json_response
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.errors import QueueFullError


def health_body(engine: AsyncEngine) -> dict[str, str | None]:
    """Return "ok", "draining", "unhealthy" or "dead" as `status`, and the reason as `error`."""
    problem = engine.diagnose()
    if problem is None and not engine.draining:
        return {"status": "ok", "error": None}
    return {
        "status": "dead" if not engine.healthy else "draining" if engine.draining else "unhealthy",
        "error": problem,
    }


def health_routes(engine: AsyncEngine) -> APIRouter:
    """Return the routes /health, /ready and /metrics, which need no key."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        body = health_body(engine)
        return json_response({"status": "ok"}) if body["status"] == "ok" else json_response(body, 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """Answer 200 while new requests are taken. /health stays 200 while the queue is full."""
        if (answer := await health()).status_code != 200:
            return answer
        try:
            engine.check_queue()
        except QueueFullError as error:
            return json_response({"status": "full", "error": str(error)}, 503)
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.core.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
