"""Reasons for prefix cache misses, and detection of prompts that differ at one early token."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llmsched.engine.kv.prefix_tree import PrefixHit, PrefixNode, PrefixTree, encode
from llmsched.engine.request import Request

#: Most evicted nodes that are remembered, with 16 bytes each.
MAX_GHOSTS = 1 << 16
#: Number of other salts that are searched for a prefix.
MAX_SALTS = 64


class MissKind(StrEnum):
    """Reason why a prefix hit is not longer."""

    HIT = "hit"  # all whole blocks that the request may reuse were found
    SKIPPED = "the cache lookup was skipped"
    TOO_SHORT = "shorter than a block"
    COMPUTING = "still being computed"
    EVICTED = "evicted"
    UNSAVED = "no recurrent state is saved there"
    #: For the operator only, because it reveals what another tenant has sent.
    OTHER_SALT = "cached under another salt or for another adapter"
    DIVERGED = "diverged"
    COLD = "no cached prompt matches more of it"


class Miss(NamedTuple):
    """Reason for a miss, after a hit of `position` tokens."""

    kind: MissKind
    position: int
    age: float | None = None  # seconds since the KV was evicted, if that is known


class Misses:
    """Counter of misses by reason, with a detector of prompts that differ at one early token."""

    def __init__(self, prefixes: PrefixTree, *, recurrent: bool = False) -> None:
        self._recurrent = recurrent
        self.counts: Counter[MissKind] = Counter()
        self.watch = PromptWatch()
        self._prefixes = prefixes
        #: Path hashes of evicted nodes, and when they were evicted. The index is the path hash modulo MAX_GHOSTS.
        self._ghosts, self._evicted_at = array("q", bytes(8 * MAX_GHOSTS)), array("d", bytes(8 * MAX_GHOSTS))

    def evicted(self, node: PrefixNode, now: float) -> None:
        """Remember that `node` was evicted at time `now`, and forget the node at the same index."""
        index = node.path_hash % MAX_GHOSTS
        self._ghosts[index], self._evicted_at[index] = node.path_hash, now

    def skipped(self) -> Miss:
        """Count and return the miss of a request that does not use the cache."""
        self.counts[MissKind.SKIPPED] += 1
        return Miss(MissKind.SKIPPED, 0)

    def classify(self, request: Request, hit: PrefixHit, num_coming: int, now: float) -> Miss:
        """Count and return the reason why the hit is not longer, at time `now` of the engine's clock.

        `num_coming` is the number of tokens after the hit whose KV another running request will write.
        """
        miss = self._reason(request, hit, num_coming, now)
        self.counts[miss.kind] += 1
        diverged_at = miss.position if miss.kind is MissKind.DIVERGED else None
        self.watch.add(request.token_ids, diverged_at, private=bool(request.cache_salt))
        return miss

    def _reason(self, request: Request, hit: PrefixHit, num_coming: int, now: float) -> Miss:
        size, salt = self._prefixes.block_size, request.prefix_key
        start, num_whole = len(hit.nodes) * size, (request.num_tokens - 1) // size
        if num_whole == 0 and hit.num_tokens == 0:
            return Miss(MissKind.TOO_SHORT, hit.num_alike)
        if num_whole == len(hit.nodes):
            return Miss(MissKind.HIT, hit.num_tokens)
        if num_coming > 0:
            return Miss(MissKind.COMPUTING, hit.num_tokens)
        if hit.num_alike >= start + size:  # the tree has the tokens, but no recurrent state or sliding-window blocks
            return Miss(MissKind.UNSAVED if self._recurrent else MissKind.EVICTED, hit.num_tokens)
        key = encode(request.token_ids[start : start + size])
        path_hash = self._prefixes.path_hash(hit.node, salt, key)
        if self._ghosts[index := path_hash % MAX_GHOSTS] == path_hash:
            return Miss(MissKind.EVICTED, hit.num_tokens, now - self._evicted_at[index])
        if start == 0 and self._prefixes.in_other_salt(salt, key, MAX_SALTS):
            return Miss(MissKind.OTHER_SALT, hit.num_alike)
        diverged = hit.num_alike > start or (hit.node is not None and len(hit.node.children) > 0)
        return Miss(MissKind.DIVERGED if diverged else MissKind.COLD, hit.num_alike)


#: Number of latest requests that are examined, and how many of them must diverge at the same position.
WINDOW = 50
MIN_AGREEING = WINDOW // 2
#: Divergences less than this many tokens apart count as the same position: two times may begin with equal digits.
SPREAD = 8
#: A divergence counts only if at least this many tokens follow it. This number of tokens is kept for comparison.
MIN_LOST = 128
#: Tokens shown on both sides of a divergence.
AROUND = 16
#: Prompts are similar after a divergence if half of their runs of RUN tokens occur in half of the prompts. Prompts that
#: differ completely from there on are not reported.
RUN = 8


@dataclass(frozen=True, slots=True)
class ChangingPrompts:
    position: int  # of the token at which the prompts differ
    count: int
    window: int  # number of latest prompts that were compared
    start: int
    examples: tuple[tuple[int, ...], tuple[int, ...]]  # token ids of two of these prompts, from token `start` on
    private: bool = False  # True if an example has a cache_salt


class _Divergence(NamedTuple):
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
    """Detector of prompts, among the last WINDOW requests, that differ at one early token but are similar after it."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._recent: deque[_Divergence | None] = deque(maxlen=WINDOW)

    def add(self, prompt: Sequence[int], diverged_at: int | None, *, private: bool = False) -> None:
        """Record the latest prompt, which diverges from cached prompts at token `diverged_at` (None: nowhere)."""
        self.num_seen += 1
        if diverged_at is None or len(prompt) - diverged_at < max(diverged_at, MIN_LOST):
            self._recent.append(None)
            return
        start = max(0, diverged_at - AROUND - SPREAD)
        self._recent.append(_Divergence(diverged_at, list(prompt[start : diverged_at + MIN_LOST]), private))

    def report(self) -> ChangingPrompts | None:
        """Return a report if at least half of the last WINDOW prompts differ at one token but are similar after it."""
        diverged = [d for d in self._recent if d is not None]
        places = ([d for d in diverged if low <= d.position < low + SPREAD] for low in {d.position for d in diverged})
        found = max(places, key=len, default=[])
        runs = [d.runs() for d in found]
        count = Counter(run for each in runs for run in each)
        common = {run for run in count if count[run] >= len(found) / 2}
        alike = [d for d, each in zip(found, runs, strict=True) if len(each & common) >= len(each) / 2]
        if len(alike) < MIN_AGREEING:
            return None
        position = min(d.position for d in alike)
        start = max(0, position - AROUND)
        one, two = (tuple(d.tokens[start - d.start : position + AROUND - d.start]) for d in (alike[0], alike[-1]))
        private = alike[0].private or alike[-1].private
        return ChangingPrompts(position, len(alike), len(self._recent), start, (one, two), private)
