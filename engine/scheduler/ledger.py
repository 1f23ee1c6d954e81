"""Why each request was delayed, cut, or thrown out: the decisions that cost it something, in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Ended requests whose entries are kept, and entries kept per request.
MAX_REQUESTS = 2048
MAX_ENTRIES = 256

Detail = int | float | str

#: Details that make a decision another one, not the same again.
_TELLING = ("reason", "by")


@dataclass(slots=True)
class Entry:
    """One decision. `time` and `until` are seconds of the engine's clock: the same decision, taken again and again, is
    one entry with a `count`; one that took its time has a count of 1.
    """

    time: float
    what: str
    details: dict[str, Detail]
    until: float
    count: int = 1


class Ledger:
    """Entries of all requests that live and of the latest that have ended, by request id.

    Costs nothing for a step in which nothing is decided.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._living: dict[str, list[Entry]] = {}
        self._ended: OrderedDict[str, list[Entry]] = OrderedDict()

    def begin(self, request_id: str, arrival_time: float, **details: Detail) -> None:
        """Write down that a request was queued, which began when it arrived: a step may have been in between."""
        self._living.setdefault(request_id, []).append(Entry(arrival_time, "queued", details, self._clock()))

    def note(self, request_id: str, what: str, **details: Detail) -> None:
        """Write down a decision. One that repeats the last is merged with it and keeps the newest numbers.

        A request that has too many entries keeps its first ones and the last.
        """
        now = self._clock()
        entries = self._living.setdefault(request_id, [])
        last = entries[-1] if entries else None
        if last is not None and last.what == what and all(last.details.get(k) == details.get(k) for k in _TELLING):
            last.details, last.until, last.count = details, now, last.count + 1
            return
        if len(entries) == MAX_ENTRIES:
            entries.pop()
        entries.append(Entry(now, what, details, now))

    def end(self, request_id: str) -> None:
        """Nothing more will be noted of this request: it may be forgotten when MAX_REQUESTS others have ended."""
        self._ended[request_id] = self._living.pop(request_id, [])
        if len(self._ended) > MAX_REQUESTS:
            self._ended.popitem(last=False)

    def entries(self, request_id: str) -> list[Entry]:
        """What was noted for a request, oldest first; empty if it is unknown or long gone."""
        return self._living.get(request_id) or self._ended.get(request_id, [])
