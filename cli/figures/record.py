"""What is noted of each request while it runs; the figures are worked out afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline


class RequestFailed(Exception):  # noqa: N818 - an outcome that is counted, not a fault of the program
    """A request ended without being served. `reason` is a short, countable name, `detail` what the server said."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the output. `tokens` is None where the target does not tell how many tokens a chunk holds."""

    time: float
    text: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the target states them; None: not stated."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of the event loop's clock, None for what did not happen.

    `scheduled` is when it should have been sent; `ready` when a slot of --max-concurrency was free (never before
    scheduled); `connecting` and `connected` when a new connection was begun and stood (None: an open one was used);
    `sent` when the first byte left; `end` when the response was over or failed. `asked_tokens` are what the target was
    told to make, come what may, None if it may end before; `request_id` and `finish_reason` are what the target says,
    `timeline` is what its scheduler decided (None: it does not tell).
    """

    index: int
    scheduled: float
    ready: float | None = None
    sent: float | None = None
    connected: float | None = None
    end: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    failure: RequestFailed | None = None
    asked_tokens: int | None = None
    request_id: str | None = None
    finish_reason: str | None = None
    timeline: Timeline | None = None
    connecting: float | None = None

    @property
    def connect_time(self) -> float | None:
        """How long (seconds) opening the connection took; None if an open one was used."""
        return None if self.connecting is None or self.connected is None else self.connected - self.connecting

    @property
    def client_lag(self) -> float | None:
        """How long (seconds) the client itself took from when it could send until it did."""
        return None if self.sent is None or self.ready is None else self.sent - self.ready - (self.connect_time or 0.0)

    @property
    def completed(self) -> bool:
        return self.end is not None and self.failure is None

    def moved(self, seconds: float, places: int) -> RequestRecord:
        """The same `seconds` later, its index larger by `places`; without the timeline, whose clock is another's."""

        def later(time: float | None) -> float | None:
            return None if time is None else time + seconds

        return replace(
            self,
            index=self.index + places,
            scheduled=self.scheduled + seconds,
            ready=later(self.ready),
            sent=later(self.sent),
            connecting=later(self.connecting),
            connected=later(self.connected),
            end=later(self.end),
            chunks=[replace(chunk, time=chunk.time + seconds) for chunk in self.chunks],
            timeline=None,
        )
