"""Why a prompt was not served from the cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum
from typing import NamedTuple

from llmsched.engine.kv.changing_prompts import PromptWatch
from llmsched.engine.kv.finder import PrefixHit
from llmsched.engine.kv.prefix import PrefixNode, PrefixTree, encode
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
