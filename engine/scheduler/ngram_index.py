"""Index of the n-grams in a sequence of tokens. It finds earlier places that look like the end of the sequence."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Tokens that one call of `extend(...)` indexes at most, so that a long prompt does not delay a step (about 8 ms).
INDEXED_AT_ONCE = 8192
#: Earlier places that are compared with the end of the sequence, the latest ones.
MAX_COMPARED = 8


class Match(NamedTuple):
    """Earlier place in a sequence. The `length` tokens before it equal the last tokens of the sequence."""

    end: int  # number of tokens up to the place
    length: int
    disputed: bool  # True if another token follows at a place with an equally long match


class NgramIndex:
    """Index of the places at which n-grams occur in a sequence that grows.

    It does not keep the tokens: each call gets all of them, and they must begin with those of the previous call.
    Matches have at least `shortest` tokens. They are compared up to `longest` tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        # A short n-gram has many places, of which the latest are seldom the best. So longer ones are looked up first.
        sizes = sorted({shortest, min(2 * shortest, longest)}, reverse=True)
        self._chains = [_Chain(size) for size in sizes]
        self._longest = longest
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Index new tokens, except the last one. Return False if some are left for the next call."""
        end = min(len(token_ids) - 1, self._num_indexed + INDEXED_AT_ONCE)
        for chain in self._chains:
            chain.extend(token_ids, end)
        self._num_indexed = max(self._num_indexed, end)
        return self._num_indexed >= len(token_ids) - 1

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the place with the longest match, or None if no place matches.

        Of places with equally long matches, the token that follows most often decides, and then the latest place.
        """
        for chain in self._chains:
            places = chain.places(token_ids)
            if places:
                lengths = [self._common(token_ids, place, chain.size) for place in places]
                length = max(lengths)
                best = [place for place, found in zip(places, lengths, strict=True) if found == length]
                votes = Counter(token_ids[place] for place in best)  # equal numbers of votes: the latest comes first
                winner = votes.most_common(1)[0][0]
                place = next(place for place in best if token_ids[place] == winner)
                return Match(place, length, len(votes) > 1)
        return None

    def _common(self, token_ids: Sequence[int], place: int, length: int) -> int:
        most = min(self._longest, place)
        while length < most and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length


class _Chain:
    """Places at which each n-gram of `size` tokens occurs. A place is the number of tokens up to its end."""

    # As in LZ77 compressors, a hash table has the latest place of each n-gram, and `_earlier` chains the places of
    # equal n-grams.

    def __init__(self, size: int) -> None:
        self.size = size
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("i", [0] * size)  # the same for the place before; 0: none

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Add the n-grams that end within the first `end` tokens."""
        size, latest, earlier = self.size, self._latest, self._earlier
        for place in range(len(earlier), end + 1):
            ngram = tuple(token_ids[place - size : place])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = place

    def places(self, token_ids: Sequence[int]) -> list[int]:
        """Return the latest places of the n-gram at the end of the sequence, at most MAX_COMPARED, latest first."""
        found: list[int] = []
        place = self._latest.get(tuple(token_ids[-self.size :]), 0)
        while place and len(found) < MAX_COMPARED:
            found.append(place)
            place = self._earlier[place]
        return found


def continuation(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from index `start` on, as if the tokens from there to the end repeated forever."""
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found
