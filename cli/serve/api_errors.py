"""Errors in the JSON shape of OpenAI's API, and the HTTP status of each kind of error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json

from llmsched.engine.errors import DeadlineError, EngineDeadError, LlmschedError, QueueFullError, RequestError


class ApiError(LlmschedError):
    """Error that becomes an HTTP answer with the status `status` and a JSON error object in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON error object: the body of an answer, or the last event of a stream that failed."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def api_error(error: Exception) -> ApiError:
    """Return `error` as an ApiError. An exception of an unexpected type becomes a 500 without internal details."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case QueueFullError():
            seconds = str(math.ceil(error.retry_after))
            code = "deadline_too_early" if isinstance(error, DeadlineError) else "queue_full"
            return ApiError(429, str(error), code=code, headers={"Retry-After": seconds})
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_unavailable")
        case _:
            return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. `content` must hold no NaN or infinity, which JSON does not have."""
    return Response(to_json(content), status, headers, "application/json")
