"""Decision ledger: why requests were delayed, preempted or ended. Also the scheduler's totals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Number of ended requests whose entries are kept, and of entries kept per request.
MAX_REQUESTS = 2048
MAX_ENTRIES = 256

Detail = int | float | str


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine was built.

    Fields whose names begin with num_ count events. Fields whose names begin with wait_ are seconds from arrival to the
    first admission, summed over requests, by the reason why the first waiting request waited. All other fields count
    tokens.
    """

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_headroom_changes: int = 0
    num_drafts: int = 0  # rows with a draft
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that became output
    accepted_by_position: tuple[int, ...] = ()  # the same by the position of the token in its draft
    wait_for_slot: float = 0.0
    wait_for_memory: float = 0.0
    wait_for_step: float = 0.0
    wait_for_prefix: float = 0.0

    def count_wait(self, reason: str, seconds: float) -> None:
        setattr(self, WAITS[reason], getattr(self, WAITS[reason]) + seconds)


#: Field of SchedulerCounters by WaitReason.
WAITS = {reason: f"wait_for_{reason}" for reason in ("slot", "memory", "step", "prefix")}


@dataclass(slots=True)
class Entry:
    """Decision about a request, made `count` times in a row from `time` to `until` (seconds of the engine's clock)."""

    time: float
    what: str  # name of the decision, such as "preempted"
    details: dict[str, Detail]  # reason and figures of the last of these decisions
    until: float
    count: int = 1


class Ledger:
    """Decisions about all unfinished requests and about the MAX_REQUESTS requests that ended last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._living: dict[str, list[Entry]] = {}
        self._ended: OrderedDict[str, list[Entry]] = OrderedDict()

    def begin(self, request_id: str, arrival_time: float, **details: Detail) -> None:
        """Add the entry "queued", which begins at `arrival_time`, for a new request."""
        self._living.setdefault(request_id, []).append(Entry(arrival_time, "queued", details, self._clock()))

    def note(self, request_id: str, what: str, **details: Detail) -> None:
        """Note a decision about a request.

        The decision is merged with the request's last entry if both have the same `what` and the same details "reason"
        and "by". If the request already has MAX_ENTRIES entries, a new one replaces the last.
        """
        now = self._clock()
        entries = self._living.setdefault(request_id, [])
        last = entries[-1] if entries else None
        same = ("reason", "by")
        if last is not None and last.what == what and all(last.details.get(k) == details.get(k) for k in same):
            last.details, last.until, last.count = details, now, last.count + 1
            return
        if len(entries) == MAX_ENTRIES:
            entries.pop()
        entries.append(Entry(now, what, details, now))

    def end(self, request_id: str) -> None:
        """Mark the request as ended. Its entries are dropped after MAX_REQUESTS more requests have ended."""
        self._ended[request_id] = self._living.pop(request_id, [])
        if len(self._ended) > MAX_REQUESTS:
            self._ended.popitem(last=False)

    def entries(self, request_id: str) -> list[Entry]:
        """Return a request's entries, oldest first; [] if the request is unknown or its entries were dropped."""
        return self._living.get(request_id) or self._ended.get(request_id, [])
