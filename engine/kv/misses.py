"""Why a prompt was not served from the cache."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llmsched.engine.kv.prefix_tree import PrefixHit, PrefixNode, PrefixTree, encode
from llmsched.engine.request import Request

#: Evicted blocks that are remembered.
MAX_GHOSTS = 1 << 15
#: Salts that are looked at for a prefix that is known under another one.
MAX_SALTS = 64


class MissKind(StrEnum):
    """HIT: all whole blocks that could be found were. The others say why the hit ended where it did.

    OTHER_SALT is for the operator alone: it tells one tenant what another has sent.
    """

    HIT = "hit"
    SKIPPED = "the cache was not asked"
    TOO_SHORT = "shorter than a block"
    COMPUTING = "still being computed"
    EVICTED = "evicted"
    OTHER_SALT = "known under another salt"
    DIVERGED = "diverged"
    COLD = "nothing like it seen"


class Miss(NamedTuple):
    """`position` is how many leading tokens are known: for DIVERGED the first token that is another one than cached.

    `age` is for EVICTED: seconds since then, None where only layers with a window have lost their part.
    """

    kind: MissKind
    position: int
    age: float | None = None


class Misses:
    """Finds the reason of each miss and counts them; keeps watch for prompts that change at an early token."""

    def __init__(self, prefixes: PrefixTree) -> None:
        self.counts: Counter[MissKind] = Counter()
        self.watch = PromptWatch()
        self._prefixes = prefixes
        self._ghosts: OrderedDict[int, tuple[bytes, float]] = OrderedDict()

    def evicted(self, node: PrefixNode, now: float) -> None:
        """Remember a node that is gone, for as long as it is among the last MAX_GHOSTS."""
        self._ghosts[node.path_hash] = (node.key, now)
        self._ghosts.move_to_end(node.path_hash)
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def skipped(self) -> Miss:
        """Count a request that was not looked up."""
        self.counts[MissKind.SKIPPED] += 1
        return Miss(MissKind.SKIPPED, 0)

    def classify(self, request: Request, hit: PrefixHit, num_coming: int, now: float) -> Miss:
        """Count a request by why its hit ends where it does; running requests will write `num_coming` tokens more."""
        miss = self._reason(request, hit, num_coming, now)
        self.counts[miss.kind] += 1
        diverged_at = miss.position if miss.kind is MissKind.DIVERGED else None
        self.watch.add(request.token_ids, diverged_at, private=bool(request.cache_salt))
        return miss

    def _reason(self, request: Request, hit: PrefixHit, num_coming: int, now: float) -> Miss:
        size, salt = self._prefixes.block_size, request.cache_salt
        start, num_whole = len(hit.nodes) * size, (request.num_tokens - 1) // size
        if num_whole == 0 and hit.num_tokens == 0:
            return Miss(MissKind.TOO_SHORT, hit.num_alike)
        if num_whole == len(hit.nodes):
            return Miss(MissKind.HIT, hit.num_tokens)
        if num_coming > 0:
            return Miss(MissKind.COMPUTING, hit.num_tokens)
        if hit.num_alike >= start + size:  # known, but what a window needs of it is gone
            return Miss(MissKind.EVICTED, hit.num_tokens)
        key = encode(request.token_ids[start : start + size])
        known, at = self._ghosts.get(self._prefixes.path_hash(hit.node, salt, key), (b"", 0.0))
        if known == key:  # the block itself is compared, those before it are vouched for by 64 bits of hash
            return Miss(MissKind.EVICTED, hit.num_tokens, now - at)
        if start == 0 and self._prefixes.in_other_salt(salt, key, MAX_SALTS):
            return Miss(MissKind.OTHER_SALT, hit.num_alike)
        diverged = hit.num_alike > start or (hit.node is not None and len(hit.node.children) > 0)
        return Miss(MissKind.DIVERGED if diverged else MissKind.COLD, hit.num_alike)


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
