"""The waiting queue: in which order requests are offered a place."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from operator import attrgetter

from llmsched.engine.config import EngineConfig
from llmsched.engine.request import Request

#: Of each round of admissions this share goes by waiting time alone, whatever ranks say (70/30 quota).
ARRIVAL_QUOTA = 0.3
#: Requests at the front of the queue among which a prefix hit may change the order.
BONUS_WINDOW = 8
#: The smallest difference of ranks that is made on purpose (seconds).
RANK_STEP = 1e-6

_BY_RANK = attrgetter("rank", "request_id")
_BY_ARRIVAL = attrgetter("arrival_time", "request_id")


def initial_rank(request: Request, config: EngineConfig) -> float:
    """Place in the queue: the arrival time, moved by what the priority is worth in waiting (a lower number is earlier).

    Ageing is linear in waiting time, so the order of two requests never changes while they wait: a sorted list does,
    and a request is passed only by those that arrive within (levels between them) x priority_step after it.
    """
    if config.scheduling_policy == "sptf":
        return float(request.num_prompt_tokens + request.sampling.max_tokens)
    return request.arrival_time + request.priority * config.priority_step


def is_short(request: Request, num_cached_tokens: int, config: EngineConfig) -> bool:
    """Whether the fast lane is for this request: little to compute before its first token, and soon gone."""
    uncached = request.num_tokens - num_cached_tokens
    return uncached <= config.fast_lane_prompt and request.sampling.max_tokens <= config.fast_lane_output


class WaitingQueue:
    """Waiting requests, sorted by rank, by arrival, and the short ones by rank once more. All operations but iteration
    cost a binary search, however many wait.
    """

    def __init__(self) -> None:
        self._by_rank: list[Request] = []
        self._by_arrival: list[Request] = []
        self._short: list[Request] = []
        self._quota = 0.0
        self._by_turn: Request | None = None

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rank)

    @property
    def has_short(self) -> bool:
        return bool(self._short)

    @property
    def first(self) -> Request:
        """The first by rank; there must be one."""
        return self._by_rank[0]

    @property
    def first_arrival(self) -> Request | None:
        return self._by_arrival[0] if self._by_arrival else None

    def add(self, request: Request, *, short: bool) -> None:
        bisect.insort(self._by_rank, request, key=_BY_RANK)
        bisect.insort(self._by_arrival, request, key=_BY_ARRIVAL)
        if short:
            bisect.insort(self._short, request, key=_BY_RANK)

    def move_to_head_of_class(self, request: Request) -> None:
        """Give a request that is to be added the rank before all that wait with its priority."""
        first = next((other.rank for other in self._by_rank if other.priority == request.priority), request.rank)
        request.rank = min(request.rank, first - RANK_STEP)

    def remove(self, request: Request) -> None:
        _remove(self._by_rank, request, _BY_RANK)
        _remove(self._by_arrival, request, _BY_ARRIVAL)
        _remove(self._short, request, _BY_RANK)

    def short_ones(self, count: int) -> list[Request]:
        """The first `count` requests of the fast lane."""
        return self._short[:count]

    def in_order(self, count: int, bonus: Callable[[Request], float], max_bonus: float) -> Iterator[Request]:
        """The first `count` requests to offer a place to; take out and count those that are admitted as they come.

        Mostly by rank, where `bonus` (at most `max_bonus`) moves requests of the front window forward; ARRIVAL_QUOTA of
        the places that are taken goes to the one that has waited longest (see `count_admission`).
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
                self._by_turn = next((r for r in oldest if r not in offered), None)
                if self._by_turn is not None:
                    offered.add(self._by_turn)
                    yield self._by_turn
                self._by_turn = None
            if request not in offered:
                offered.add(request)
                yield request

    def count_admission(self, request: Request) -> None:
        """A request of `in_order` took its place: the turn of waiting time alone comes nearer, or this was it."""
        if request is self._by_turn:
            self._quota -= 1.0
        else:
            self._quota += ARRIVAL_QUOTA / (1 - ARRIVAL_QUOTA)


def _remove(requests: list[Request], request: Request, key: Callable[[Request], tuple[float, str]]) -> None:
    index = bisect.bisect_left(requests, key(request), key=key)
    if index < len(requests) and requests[index] is request:
        del requests[index]
