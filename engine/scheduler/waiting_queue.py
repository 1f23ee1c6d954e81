"""Waiting queue: the order in which requests are considered for admission, and the reasons why they wait."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.request import Request

#: Share of admissions that go by arrival time alone, regardless of rank (70/30 quota).
ARRIVAL_QUOTA = 0.3
#: Number of requests at the front of the queue that prefix hits may reorder.
BONUS_WINDOW = 8
#: Difference in rank (seconds) that places one request just before another.
RANK_STEP = 1e-6

_BY_RANK = attrgetter("rank", "request_id")
_BY_ARRIVAL = attrgetter("arrival_time", "request_id")


def initial_rank(request: Request, config: EngineConfig) -> float:
    """Return the request's position in the queue (lower is earlier): arrival time plus priority x priority_step.

    Under policy sptf, the rank is the prompt's length plus max_tokens.
    """
    if config.scheduling_policy == "sptf":
        return float(request.num_prompt_tokens + request.sampling.max_tokens)
    return request.arrival_time + request.priority * config.priority_step


class WaitReason(StrEnum):
    """Reason why the first waiting request is not admitted."""

    MAX_RUNNING = "slot"  # the limit on running requests is reached
    MEMORY = "memory"  # too few blocks are available
    STEP = "step"  # the step's token budget is used up
    PREFIX = "prefix"  # running requests are still computing KV that the request can reuse


class WaitingTimes:
    """Seconds for which the queue has waited for each reason, in total and for each waiting request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(WaitReason, 0.0)
        self._reason: WaitReason | None = None
        self._since = 0.0
        self._at_start: dict[Request, dict[WaitReason, float]] = {}

    def now_waiting_for(self, reason: WaitReason | None) -> None:
        """Set the reason why the queue waits from now on, or None if no request waits."""
        self._count()
        self._reason = reason

    def begin(self, request: Request) -> None:
        self._count()
        self._at_start[request] = self._seconds.copy()

    def end(self, request: Request) -> dict[WaitReason, float]:
        """Forget the request. Return the seconds that it waited for each reason, without times below 1 ms."""
        self._count()
        at_start = self._at_start.pop(request, self._seconds)
        waited = {reason: seconds - at_start[reason] for reason, seconds in self._seconds.items()}
        return {reason: seconds for reason, seconds in waited.items() if seconds >= 1e-3}

    def _count(self) -> None:
        now = self._clock()
        if self._reason is not None:
            self._seconds[self._reason] += now - self._since
        self._since = now


class Offer(NamedTuple):
    request: Request
    by_arrival: bool  # True if it was chosen by arrival time, False if by rank


class WaitingQueue:
    """Queue of waiting requests, kept as three sorted lists.

    One list has all requests by rank (see `initial_rank`), one has all by arrival time, and one has the short requests
    (see `Admission.is_short`) by rank.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times = WaitingTimes(clock)
        self._by_rank: list[Request] = []
        self._by_arrival: list[Request] = []
        self._short: list[Request] = []
        self._quota = 0.0

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rank)

    @property
    def first(self) -> Request:
        """First request by rank. The queue must not be empty."""
        return self._by_rank[0]

    @property
    def first_arrival(self) -> Request | None:
        return self._by_arrival[0] if self._by_arrival else None

    def add(self, request: Request, *, short: bool) -> None:
        bisect.insort(self._by_rank, request, key=_BY_RANK)
        bisect.insort(self._by_arrival, request, key=_BY_ARRIVAL)
        if short:
            bisect.insort(self._short, request, key=_BY_RANK)
        self.times.begin(request)

    def add_at_head_of_class(self, request: Request, *, short: bool) -> None:
        """Add a request ahead of all waiting requests of its priority."""
        first = next((other.rank for other in self._by_rank if other.priority == request.priority), request.rank)
        request.rank = min(request.rank, first - RANK_STEP)
        self.add(request, short=short)

    def remove(self, request: Request) -> dict[WaitReason, float]:
        """Remove the request. Return the seconds that it waited for each reason."""
        _remove(self._by_rank, request, _BY_RANK)
        _remove(self._by_arrival, request, _BY_ARRIVAL)
        _remove(self._short, request, _BY_RANK)
        return self.times.end(request)

    def short_ones(self, count: int) -> list[Request]:
        return self._short[:count]

    def offers(self, count: int, bonus: Callable[[Request], float], max_bonus: float) -> Iterator[Offer]:
        """Yield requests, each once, in the order in which they are considered for admission.

        The order is by rank, with two exceptions. Among the first BONUS_WINDOW requests, a request's rank is lowered by
        `bonus(request)` seconds, at most `max_bonus`. And the share ARRIVAL_QUOTA of admissions goes to the request
        that has waited longest; for this, the caller must pass each admitted offer to `count_taken(...)`. Only the
        first `count` requests by rank and the first `count` by arrival are considered.
        """
        ranked = self._by_rank[:count]
        window = ranked[:BONUS_WINDOW]
        near = [r for r in window if r.rank - max_bonus <= window[0].rank] if max_bonus else []
        if len(near) > 1:
            ranked[: len(near)] = sorted(near, key=lambda r: (r.rank - bonus(r), r.request_id))
        oldest = iter(self._by_arrival[:count])
        offered: set[Request] = set()
        for request in ranked:
            if self._quota >= 1.0:
                longest_waiting = next((r for r in oldest if r not in offered), None)
                if longest_waiting is not None:
                    offered.add(longest_waiting)
                    yield Offer(longest_waiting, by_arrival=True)
            if request not in offered:
                offered.add(request)
                yield Offer(request, by_arrival=False)

    def count_taken(self, offer: Offer) -> None:
        """Count an admitted offer, so that `offers(...)` can keep to ARRIVAL_QUOTA."""
        self._quota += -1.0 if offer.by_arrival else ARRIVAL_QUOTA / (1 - ARRIVAL_QUOTA)


def _remove(requests: list[Request], request: Request, key: Callable[[Request], tuple[float, str]]) -> None:
    index = bisect.bisect_left(requests, key(request), key=key)
    if index < len(requests) and requests[index] is request:
        del requests[index]
