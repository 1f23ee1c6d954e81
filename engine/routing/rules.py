"""Rules that choose a replica without its state: random, round-robin, least-loaded, and Ray Serve's prefix affinity."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from llmsched.engine.routing.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """Prompt to be routed. `hashes` identify its prefixes of `span` tokens, 2 x `span` tokens and so on."""

    num_tokens: int
    hashes: Sequence[bytes]
    span: int

    def lengths(self) -> dict[bytes, int]:
        """Return the length in tokens of the prefix with each hash."""
        return {prefix: count * self.span for count, prefix in enumerate(self.hashes, start=1)}


def num_cached(lengths: dict[bytes, int], *known: Set[bytes]) -> int:
    """Return the length in tokens of the longest prefix whose hash is in one of the sets `known`.

    `lengths` are those of the prompt's prefixes, by hash.
    """
    found = [each for each in known if not each.isdisjoint(lengths)]  # the loop below is slow
    return max((length for prefix, length in lengths.items() for each in found if prefix in each), default=0)


class Choice(NamedTuple):
    """Replica chosen for a request, and why."""

    replica: str
    reason: str
    cached_tokens: int = 0  # tokens of the prompt that the replica is expected to have cached
    expected_ttft: float | None = None  # seconds
    seconds: float = 0.0  # expected seconds of prefill


class Rule(Protocol):
    """Interface of rules that choose a replica for each request."""

    def choose(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        """Choose one of `replicas`, which must not be empty, and count the request as sent to it."""

    def update(self, replica: str, state: ReplicaState) -> None:
        """Take the latest published state of a replica."""

    def ended(self, choice: Choice) -> None:
        """Count a request as ended."""

    def remove(self, replica: str) -> None:
        """Forget a replica that is gone."""


class OpenRequests:
    """Base of rules: counts the requests that are open at each replica."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.num_open: Counter[str] = Counter()

    def choose(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        choice = self.pick(replicas, prompt)
        self.num_open[choice.replica] += 1
        return choice

    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        raise NotImplementedError

    def update(self, replica: str, state: ReplicaState) -> None: ...

    def ended(self, choice: Choice) -> None:
        if self.num_open[choice.replica] > 0:
            self.num_open[choice.replica] -= 1

    def remove(self, replica: str) -> None:
        del self.num_open[replica]

    def less_loaded_of_two(self, replicas: Sequence[str]) -> str:
        """Choose two replicas at random, and return the one with fewer open requests (Mitzenmacher 2001)."""
        two = self.random.sample(replicas, min(2, len(replicas)))
        return min(two, key=self.num_open.__getitem__)

    def least_loaded(self, replicas: Sequence[str]) -> str:
        least = min(self.num_open[replica] for replica in replicas)
        return self.random.choice([replica for replica in replicas if self.num_open[replica] == least])


class RandomRule(OpenRequests):
    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        return Choice(self.random.choice(replicas), "random")


class RoundRobinRule(OpenRequests):
    _next = 0

    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        self._next += 1
        return Choice(replicas[(self._next - 1) % len(replicas)], "round-robin")


class LeastLoadedRule(OpenRequests):
    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        return Choice(self.least_loaded(replicas), "fewest open requests")


class AffinityRule(OpenRequests):
    """Published rule of Ray Serve's PrefixCacheAffinityRouter, for comparison.

    If the numbers of open requests differ by at most `imbalanced_threshold`, the rule chooses the replica that received
    the longest prefix of the prompt, or, if less than `match_rate_threshold` of the prompt matches, the replica that
    received the fewest prefixes. Otherwise it chooses the less loaded of two. Source: Ray Serve's documentation,
    "PrefixCacheAffinityRouter for LLM inference optimization".
    """

    def __init__(
        self,
        random: Random,
        *,
        imbalanced_threshold: float = 10,
        match_rate_threshold: float = 0.1,
        max_prefixes: int = 4096,
    ) -> None:
        super().__init__(random)
        self._imbalanced, self._match_rate = imbalanced_threshold, match_rate_threshold
        self._max_prefixes = max_prefixes
        self._received: dict[str, OrderedDict[bytes, float]] = {}

    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        choice = self._choice(replicas, prompt)
        received = self._received.setdefault(choice.replica, OrderedDict())
        for prefix in reversed(prompt.hashes):  # so that the longest prefix is the first to be dropped
            received[prefix] = 0.0
            received.move_to_end(prefix)
        while len(received) > self._max_prefixes:
            received.popitem(last=False)
        return choice

    def _choice(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        loads = [self.num_open[replica] for replica in replicas]
        if max(loads) - min(loads) > self._imbalanced:
            return Choice(self.less_loaded_of_two(replicas), "imbalanced")
        nothing: OrderedDict[bytes, float] = OrderedDict()
        lengths = prompt.lengths()
        matched = {replica: num_cached(lengths, self._received.get(replica, nothing).keys()) for replica in replicas}
        longest = max(matched.values())
        if longest >= self._match_rate * prompt.num_tokens:
            best = [replica for replica in replicas if matched[replica] == longest]
            return Choice(self.least_loaded(best), "prefix", longest)
        sizes = {replica: len(self._received.get(replica, nothing)) for replica in replicas}
        smallest = [replica for replica in replicas if sizes[replica] == min(sizes.values())]
        return Choice(self.random.choice(smallest), "fewest prefixes")

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._received.pop(replica, None)


#: Class of each rule, by the rule's name. PrefixRouter is in router.py.
SIMPLE_RULES: dict[str, Callable[[Random], Rule]] = {
    "random": RandomRule,
    "round-robin": RoundRobinRule,
    "least-loaded": LeastLoadedRule,
    "affinity": AffinityRule,
}
