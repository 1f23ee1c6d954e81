"""Stop strings: matched wherever the text is cut into pieces, and nothing is held back that need not be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.text.stop import StopMatcher

LETTERS = st.sampled_from("ab")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4).map(tuple)


def run(pieces: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[list[str], str | None]:
    """Return what each push and the final flush emitted, and the stop string found."""
    matcher, emitted = StopMatcher(stops, include), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
    return [*emitted, matcher.flush()], None


def first_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Specify the result: the stop string complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(met, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(derandomize=True, max_examples=500)
@given(pieces=st.lists(st.text(LETTERS, max_size=4), max_size=8), stops=STOPS, include=st.booleans())
def test_equals_the_specification_however_the_text_is_cut(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    emitted, stop = run(pieces, stops, include)
    assert ("".join(emitted), stop) == first_stop("".join(pieces), stops, include)


@settings(derandomize=True, max_examples=500)
@given(text=st.text(LETTERS, max_size=16), stops=STOPS)
def test_holds_exactly_the_longest_tail_that_may_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    matcher, out = StopMatcher(stops, False), ""
    for char in text:
        emitted, stop = matcher.push(char)
        out += emitted
        if stop is not None:
            return
        seen = out + matcher.held
        tails = [len(tail) for s in stops for k in range(1, len(s)) if seen.endswith(tail := s[:k])]
        assert len(matcher.held) == max(tails, default=0)


def test_the_beginning_of_a_stop_string_is_never_sent() -> None:
    assert run(["QR", "S", "TU", "V"], ("QRSTUV",)) == (["", "", "", ""], "QRSTUV")
    assert run(["QR", "S", "TX"], ("QRSTUV",)) == (["", "", "QRSTX", ""], None)


def test_a_stop_string_that_never_begins_delays_nothing() -> None:
    assert run(["ab", "cd"], ("Z" * 60,)) == (["ab", "cd", ""], None)
