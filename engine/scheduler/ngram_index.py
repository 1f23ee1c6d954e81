"""Index of the n-grams in a sequence of tokens, which finds earlier places that look like its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

#: Tokens that one call of `extend(...)` indexes at most, so that a long prompt does not delay a step (about 5 ms).
INDEXED_AT_ONCE = 8192
#: Earlier places that are compared with the end of the sequence, the latest ones.
MAX_COMPARED = 8


class Match(NamedTuple):
    """Earlier place in a sequence. The `length` tokens before it equal the last tokens of the sequence."""

    end: int  # number of tokens up to the place
    length: int


class NgramIndex:
    """Index of the places at which each n-gram of `shortest` tokens occurs in a sequence that grows.

    It does not keep the tokens: each call gets all of them, and they must begin with the tokens of the previous call.
    """

    # As in LZ77 compressors, a hash table has the latest place of each n-gram, and `_earlier` chains the places of
    # equal n-grams.

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> number of tokens up to its end
        self._earlier = array("i", [0] * shortest)  # the same for the place before; 0: none
        self.num_indexed = shortest - 1  # n-grams that end within these tokens are indexed

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Index new tokens, except the last one. Return False if some are left for the next call."""
        size, latest, earlier = self._shortest, self._latest, self._earlier
        end = min(len(token_ids) - 1, self.num_indexed + INDEXED_AT_ONCE)
        for place in range(self.num_indexed + 1, end + 1):
            ngram = tuple(token_ids[place - size : place])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = place
        self.num_indexed = max(self.num_indexed, end)
        return self.num_indexed >= len(token_ids) - 1

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the place with the longest match (at most `longest` tokens), the latest among equals, or None."""
        place = self._latest.get(tuple(token_ids[-self._shortest :]), 0)
        best: Match | None = None
        for _ in range(MAX_COMPARED):
            if place == 0:
                break
            length = self._common(token_ids, place)
            if best is None or length > best.length:
                best = Match(place, length)
            if length == self._longest:
                break
            place = self._earlier[place]
        return best

    def _common(self, token_ids: Sequence[int], place: int) -> int:
        length, most = self._shortest, min(self._longest, place)
        while length < most and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length


def continuation(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from index `start` on, as if the tokens from there to the end repeated forever."""
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found
