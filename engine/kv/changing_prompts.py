"""Prompts that the cache can never serve, because something early in them changes from request to request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Requests that are looked back on, and how many of them must agree.
WINDOW = 50
MIN_AGREEING = WINDOW // 2
#: Divergences less than this many tokens apart are at one place: values that change may begin with equal digits.
SPREAD = 8
#: A divergence matters if at least this many tokens behind it have to be computed; as many are kept.
MIN_LOST = 128
#: Tokens shown on both sides of it.
AROUND = 16
#: Prompts are alike behind the divergence if half of their runs of RUN tokens are in half of the others too. Where
#: people just say different things they are not, and nothing is wrong.
RUN = 8


@dataclass(frozen=True, slots=True)
class ChangingPrompts:
    """`count` of the last `window` requests diverged from what is cached at token `position` and were alike again
    behind it: something in front of the rest of the prompt changes from request to request (a time, an id).

    `examples` are the token ids of two of them, from token `start` on, AROUND tokens to each side of `position`;
    `private` if one of these was.
    """

    position: int
    count: int
    window: int
    start: int
    examples: tuple[tuple[int, ...], tuple[int, ...]]
    private: bool = False


class _Divergence(NamedTuple):
    """`tokens` are the prompt's from AROUND + SPREAD before the position (or its start) to MIN_LOST behind it."""

    position: int
    tokens: list[int]
    private: bool

    @property
    def start(self) -> int:
        return max(0, self.position - AROUND - SPREAD)

    def runs(self) -> set[tuple[int, ...]]:
        behind = self.tokens[self.position - self.start :]
        return {tuple(behind[i : i + RUN]) for i in range(len(behind) - RUN + 1)}


class PromptWatch:
    """Looks at the last WINDOW requests for prompts that change at one early token and go on alike."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._recent: deque[_Divergence | None] = deque(maxlen=WINDOW)

    def add(self, prompt: Sequence[int], diverged_at: int | None, *, private: bool = False) -> None:
        """Note a request. Only a divergence in the first half of a long prompt counts as early."""
        self.num_seen += 1
        if diverged_at is None or len(prompt) - diverged_at < max(diverged_at, MIN_LOST):
            self._recent.append(None)
            return
        start = max(0, diverged_at - AROUND - SPREAD)
        self._recent.append(_Divergence(diverged_at, list(prompt[start : diverged_at + MIN_LOST]), private))

    def report(self) -> ChangingPrompts | None:
        """What at least half of the last requests suffer from, if there is such a thing. Takes milliseconds."""
        alike = _alike(self._at_one_place())
        if len(alike) < MIN_AGREEING:
            return None
        position = min(d.position for d in alike)
        start = max(0, position - AROUND)
        one, two = (tuple(d.tokens[start - d.start : position + AROUND - d.start]) for d in (alike[0], alike[-1]))
        private = alike[0].private or alike[-1].private
        return ChangingPrompts(position, len(alike), len(self._recent), start, (one, two), private)

    def _at_one_place(self) -> list[_Divergence]:
        """The most divergences that lie less than SPREAD tokens apart, oldest first."""
        found = [d for d in self._recent if d is not None]
        groups = ([d for d in found if low <= d.position < low + SPREAD] for low in {d.position for d in found})
        return max(groups, key=len, default=[])


def _alike(found: list[_Divergence]) -> list[_Divergence]:
    """Those that go on as at least half of all do, wherever in the text behind the divergence that is."""
    runs = [d.runs() for d in found]
    count = Counter(run for each in runs for run in each)
    least = len(found) / 2
    return [d for d, each in zip(found, runs, strict=True) if sum(count[r] >= least for r in each) >= len(each) / 2]
