"""Parser of server-sent events (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

from typing import NamedTuple

#: Most bytes of one event before the stream is rejected.
_LONGEST = 1 << 24


class Event(NamedTuple):
    """Event with its type ("message" if the stream gives no type) and its data lines, joined by newlines."""

    type: str
    data: str


class EventParser:
    """Incremental parser of server-sent events.

    As some servers deviate from the standard, `close()` returns a last event that lacks its blank line, and a line
    `error: ...` gives an event of type "error".
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._at_start = True
        self._type = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, received: bytes) -> list[Event]:
        """Return the events that `received` completes. Raises ValueError for an event of more than 16 MiB."""
        if self._after_cr and received:
            received = received.removeprefix(b"\n")
            self._after_cr = False
        self._after_cr = received.endswith(b"\r")
        *lines, rest = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for line in lines:
            self._line += line
            if event := self._end_line():
                events.append(event)
        self._line += rest
        self._size = 0 if events else self._size + len(received)
        if self._size > _LONGEST:
            raise ValueError(f"an event of more than {_LONGEST >> 20} MiB")
        return events

    def close(self) -> Event | None:
        """Return the last event if it lacks the blank line that should end it."""
        return (self._end_line() if self._line else None) or self._end_event()

    def _end_line(self) -> Event | None:
        line = self._line.decode("utf-8", errors="replace")
        self._line.clear()
        if self._at_start:
            line, self._at_start = line.removeprefix("\ufeff"), False
        if not line:
            return self._end_event()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "error":
            self._type = name
            self._data.append(value)
        return None

    def _end_event(self) -> Event | None:
        event = Event(self._type or "message", "\n".join(self._data)) if self._data else None
        self._type = ""
        self._data.clear()
        return event
