"""Search for stop strings in an output."""

from __future__ import annotations


class StopMatcher:
    """Matcher that ends a text at the first stop string. The text arrives in pieces of any size.

    The stop string that ends first counts. If several stop strings end at the same character, the longest one counts.
    """

    # Each stop string has a Knuth-Morris-Pratt automaton, so the cost per character does not depend on the lengths of
    # the stop strings.

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the text that can be output now, and the stop string that ends the output, if any."""
        if not self._stops:
            return text, None
        buffer = self.held + text
        for end, char in enumerate(text, len(self.held) + 1):
            if stop := self._advance(char):
                self.held = ""
                return buffer[: end if self._include_stop else end - len(stop)], stop
        certain = len(buffer) - max(self._matched)
        self.held = buffer[certain:]
        return buffer[:certain], None

    def flush(self) -> str:
        """Return the text that `push(...)` still holds back; "" if a stop string has ended the output."""
        held, self.held = self.held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Match one more character against every stop string. Return the longest stop string now complete, or None."""
        met = ""
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop):
                met = max(met, stop, key=len)
        return met or None


def _borders(pattern: str) -> list[int]:
    """Return the Knuth-Morris-Pratt table of a pattern."""
    # For each prefix, this is the length of its longest proper prefix that is also its suffix.
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
