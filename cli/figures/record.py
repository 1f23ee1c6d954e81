from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from llmsched.cli.figures.engine_counts import EngineCounts
from llmsched.cli.figures.kv_memory import KVMeter, TargetState
from llmsched.engine.memory.plan import MemoryParts

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline


class RequestFailed(Exception):  # noqa: N818 - an outcome that is counted, not a fault of the program
    """Failure of a request. `reason` is a short name, `detail` the server's message."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Chunk:
    time: float
    text: str
    tokens: int | None = None  # None if the target does not report how many tokens the chunk holds


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """Record of one request. Times are seconds on the event loop's clock, None for events that did not happen."""

    index: int
    scheduled: float  # when the request should have been sent
    ready: float | None = None  # when --max-concurrency allowed the client to send it
    sent: float | None = None  # when the first byte was written
    connected: float | None = None  # None if the client reused a connection
    end: float | None = None  # when the response ended or failed
    chunks: list[Chunk] = field(default_factory=list)
    usage: ReportedUsage = field(default_factory=ReportedUsage)
    failure: RequestFailed | None = None
    asked_tokens: int | None = None  # exact output length requested; None if the answer may be shorter
    prompt_len: int = 0  # tokens; each word of a text counts as one
    request_id: str | None = None
    finish_reason: str | None = None
    timeline: Timeline | None = None
    connecting: float | None = None  # None if the client reused a connection

    @property
    def connect_time(self) -> float | None:
        """Seconds that opening the connection took; None if the client reused a connection."""
        return None if self.connecting is None or self.connected is None else self.connected - self.connecting

    @property
    def client_lag(self) -> float | None:
        """Seconds from `ready` to `sent`, less `connect_time`; None if either event did not happen."""
        return None if self.sent is None or self.ready is None else self.sent - self.ready - (self.connect_time or 0.0)

    @property
    def completed(self) -> bool:
        return self.end is not None and self.failure is None

    def moved(self, seconds: float, places: int) -> RequestRecord:
        """Return a copy with `seconds` added to all times, `places` added to the index, and no `timeline`."""
        times = {name: getattr(self, name) for name in ("ready", "sent", "connecting", "connected", "end")}
        later: dict[str, Any] = {name: None if time is None else time + seconds for name, time in times.items()}
        return replace(
            self,
            index=self.index + places,
            scheduled=self.scheduled + seconds,
            chunks=[replace(chunk, time=chunk.time + seconds) for chunk in self.chunks],
            timeline=None,
            **later,
        )


class LoopLag(NamedTuple):
    """Lag of a timer of the client's event loop, which was due at `due` and fired `late` seconds later."""

    due: float
    late: float
    machine: float = 0.0  # lower bound of the seconds without a CPU core


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one run of a load. All times are seconds on one clock. None means unknown."""

    records: Sequence[RequestRecord]
    counts: EngineCounts = EngineCounts()
    loop_lags: Sequence[LoopLag] | None = None
    own_process: bool = True  # False if the client ran in the target's process
    samples: Sequence[TargetState] = ()
    memory: MemoryParts | None = None
    interrupted: bool = False  # by the user
    meter: KVMeter | None = None
    repeated_share: float | None = None  # share of prompt tokens that repeat the start of an earlier prompt

    @property
    def start(self) -> float:
        return min((record.scheduled for record in self.records), default=0.0)

    @property
    def end(self) -> float:
        """Time at which the last request ended; `start` if no request ended."""
        return max((record.end for record in self.records if record.end is not None), default=self.start)
