from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from llmsched.cli.serve.protocol import MAX_TIMEOUT_S
from llmsched.engine.errors import RequestError
from llmsched.engine.request import ChoiceRecord

CLASS_HEADER = "x-llmsched-class"
DEADLINE_HEADER = "x-request-deadline-ms"

#: Priority of each request class; a lower number is more urgent.
CLASSES = {"interactive": 0, "batch": 1}


@dataclass(frozen=True, slots=True)
class IngressFacts:
    """Facts about a request from the ingress that has forwarded it. A client cannot set them."""

    prompts: Sequence[list[int]] | None = None  # token ids of the prompts; None: not computed
    age: float = 0.0  # seconds from the arrival at the ingress to the choice of this server
    routing: Mapping[str, Any] | None = None  # which replica was chosen and why, as JSON


def ingress_facts(http: Request) -> IngressFacts:
    """Return what the ingress has put into the state of an HTTP request; nothing if there is no ingress."""
    return getattr(http.state, "ingress", _NO_INGRESS)


_NO_INGRESS = IngressFacts()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Facts about an HTTP request to the model that are not in its body."""

    request_id: str = ""  # X-Request-Id
    priority: int = 0
    deadline: float = math.inf  # in seconds of the engine's clock
    #: Called once, when the whole answer has ended, with the answer's id and its choices that have ended.
    on_end: Callable[[str, list[ChoiceRecord]], None] = lambda _, __: None


def priority_of(priority: int | None, class_name: str | None) -> int:
    """Return `priority` or, if it is None, the priority of the class `class_name` (default: interactive).

    Raises RequestError.
    """
    if class_name is not None and class_name not in CLASSES:
        raise RequestError(CLASS_HEADER, f"{CLASS_HEADER} is {class_name[:100]!r}; allowed is {' or '.join(CLASSES)}")
    return CLASSES[class_name or "interactive"] if priority is None else priority


def seconds_allowed(timeout: float | None, header: str | None) -> float:
    """Return the seconds from a request's arrival to its deadline; infinity without a deadline.

    `timeout` is the field of the body in seconds, `header` the value of x-request-deadline-ms. The earlier deadline
    counts. Raises RequestError for a header that is not a number of milliseconds.
    """
    allowed = math.inf if timeout is None else timeout
    if header is None:
        return allowed
    try:
        milliseconds = float(header)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= 1e3 * MAX_TIMEOUT_S:
        most = f"{1e3 * MAX_TIMEOUT_S:.0f}"
        raise RequestError(
            DEADLINE_HEADER,
            f"{DEADLINE_HEADER} is {header[:40]!r}; allowed are milliseconds above 0 and up to {most}",
        )
    return min(allowed, milliseconds / 1e3)
