"""The waiting queue: who is next."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from llmsched.engine.request import Request

#: One priority level is worth this much waiting. Waiting counts linearly, so the order of two requests never changes
#: while they wait, and nobody starves: a request is passed only by those that arrive within
#: (levels between them) x this time after it.
PRIORITY_SECONDS = 10.0


def rank(request: Request) -> tuple[float, str]:
    """Sort key, smallest first: arrival time, moved by the priority (lower numbers are more urgent)."""
    return request.arrival_time + request.priority * PRIORITY_SECONDS, request.request_id


class WaitingQueue:
    """Requests in the order of `rank`. A preempted request keeps its rank, so it is ahead of all that came later."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._requests, rank(request), key=rank)
        assert self._requests[index] is request
        del self._requests[index]

    @property
    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None
