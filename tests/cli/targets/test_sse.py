"""Server-sent events are the same however the bytes are split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsched.cli.targets.sse import Event, EventParser

STREAM = (
    "\ufeff: welcome\n\n"
    'data: {"text": "Grüße 🙂"}\n\n'
    ":ping\r\n"
    "data: one\r\n\r\n"
    "event: error\ndata:two\ndata: lines\n\n"
    "data: carriage\r\r"
    "id: 7\nretry: 3\nunknown\n\n"
    "data\n\n"
    "event: nothing\n\n"
    "data: [DONE]"
).encode()

EVENTS = [
    Event("message", '{"text": "Grüße 🙂"}'),
    Event("message", "one"),
    Event("error", "two\nlines"),
    Event("message", "carriage"),
    Event("message", ""),
    Event("message", "[DONE]"),
]


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    last = parser.close()
    return events if last is None else [*events, last]


def test_byte_by_byte_and_in_one_piece() -> None:
    assert parse(STREAM) == EVENTS
    assert parse(*(bytes([byte]) for byte in STREAM)) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_split_anywhere(cuts: list[int]) -> None:
    ends = sorted(cuts)
    pieces = [STREAM[start:end] for start, end in zip([0, *ends], [*ends, len(STREAM)], strict=True)]
    assert parse(*pieces) == EVENTS


def test_an_event_comes_out_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b") == [Event("message", "a")]
    assert parser.feed(b"\r\n\r") == [Event("message", "b")]
    assert parser.feed(b"\n") == []
    assert parser.close() is None


@pytest.mark.parametrize("tail", [b"data: x", b"data: x\n", b"data: x\r", b"data: x\r\n", b"data: x\n\n"])
def test_the_last_event_needs_no_blank_line(tail: bytes) -> None:
    assert parse(tail) == [Event("message", "x")]


@pytest.mark.parametrize("endless", [b"x" * (1 << 20), b"data: y\n" * (1 << 17)], ids=["line", "event"])
def test_an_endless_event_is_rejected(endless: bytes) -> None:
    parser = EventParser()
    assert [event for _ in range(16) for event in parser.feed(endless)] == []
    with pytest.raises(ValueError, match="more than 16 MiB"):
        parser.feed(endless)


def test_nothing_gives_nothing() -> None:
    assert parse() == []
    assert parse(b"", b"\n\n\n", b": only comments\n\n") == []
