"""Router: sends each request to the replica with the lowest expected time to first token."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from llmsched.engine.routing.replica_state import PrefillSpeed, ReplicaState
from llmsched.engine.routing.rules import SIMPLE_RULES, Choice, OpenRequests, RoutedPrompt, Rule, num_cached

#: Age in seconds from which a state is too old to be used.
MAX_AGE = 10.0
#: Weight of the seconds of prefill that a request adds to a replica, beyond their part in its own time to first token:
#: they delay later requests too. Chosen on the Mooncake traces (tests/bench/bench_routing.py).
PREFILL_WEIGHT = 3.0
#: Replicas with equal hits whose costs differ by less than this many seconds are equal.
TIE_SECONDS = 0.05
#: Seconds, beyond the expected time to first token, for which a replica counts as having the prefixes of a prompt that
#: was sent to it. By then it has published them.
_EXPECT_SECONDS = MAX_AGE
#: Most prefixes expected at a replica, beyond those that it published.
_MAX_EXPECTED = 4096


@dataclass(slots=True)
class _Replica:
    """Latest state of a replica, and the requests sent to it since."""

    state: ReplicaState | None = None
    backlog: float = 0.0  # seconds of prefill not yet computed at `backlog_time`
    backlog_time: float = -math.inf
    sent: list[tuple[float, float]] = field(default_factory=list)  # (time, seconds of prefill) since the state
    expected: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # prefix -> time when it expires

    def update(self, state: ReplicaState) -> None:
        if self.state is not None and state.time < self.state.time:  # overtaken on its way
            return
        self.state = state
        self.sent = [each for each in self.sent if each[0] > state.time]
        self.backlog, self.backlog_time = state.backlog_seconds, state.time
        for time, seconds in self.sent:
            self.backlog = self.backlog_at(time) + seconds
            self.backlog_time = time

    def backlog_at(self, now: float) -> float:
        return max(0.0, self.backlog - max(0.0, now - self.backlog_time))

    def is_fresh(self, now: float) -> bool:
        return self.state is not None and now - self.state.time <= MAX_AGE

    def expect(self, prefixes: Sequence[bytes], now: float, ttft: float) -> None:
        for prefix in reversed(prefixes):  # so that the longest prefix is the first to be dropped
            self.expected[prefix] = now + ttft + _EXPECT_SECONDS
            self.expected.move_to_end(prefix)
        while len(self.expected) > _MAX_EXPECTED:
            self.expected.popitem(last=False)

    def forget_expired(self, now: float) -> None:
        while self.expected and next(iter(self.expected.values())) < now:
            self.expected.popitem(last=False)

    def send(self, choice: Choice, prompt: RoutedPrompt, now: float) -> None:
        self.backlog, self.backlog_time = self.backlog_at(now) + choice.seconds, now
        self.sent.append((now, choice.seconds))
        self.expect(prompt.hashes, now, choice.expected_ttft or 0.0)


class PrefixRouter(OpenRequests):
    """Rule that chooses the replica with the lowest expected time to first token.

    The prefill of the request counts PREFILL_WEIGHT times more, because it also delays later requests. Among equal
    replicas, the rule chooses the one with the fewest cached prefixes, so that the caches fill evenly. Further ties are
    broken at random.

    The expected time is the wait until the replica admits the request, plus a step and the prefill of the part of the
    prompt that the replica has not cached. The wait is the longer of the replica's backlog of prefills and the time
    until enough requests have ended. It is computed from the state that the replica published, and from what this
    router has sent to it since. If k of n replicas have no state from the last MAX_AGE seconds, a share k / n
    of the requests goes to the less loaded of two random replicas instead.
    """

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        super().__init__(random)
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._median: PrefillSpeed | None = None
        self._prompt: RoutedPrompt | None = None  # the latest, whose prefixes have the lengths `_lengths`
        self._lengths: dict[bytes, int] = {}

    def update(self, replica: str, state: ReplicaState) -> None:
        self._median = None
        self._replicas.setdefault(replica, _Replica()).update(state)

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._replicas.pop(replica, None)
        self._median = None

    def pick(self, replicas: Sequence[str], prompt: RoutedPrompt) -> Choice:
        now = self._clock()
        fresh = [name for name in replicas if name in self._replicas and self._replicas[name].is_fresh(now)]
        if self.random.random() * len(replicas) >= len(fresh):
            chosen, reason = self.less_loaded_of_two(replicas), "no fresh state: less loaded of two"
            if chosen not in fresh:
                return Choice(chosen, reason)
            choice = self.expected(chosen, prompt, now)._replace(reason=reason)
            self._replicas[chosen].send(choice, prompt, now)
            return choice
        choices = [self.expected(name, prompt, now) for name in fresh]
        best = min(choices, key=_cost)
        equal = [c for c in choices if _cost(c) <= _cost(best) + TIE_SECONDS and c.cached_tokens >= best.cached_tokens]
        self.random.shuffle(equal)
        choice = min(equal, key=self._num_prefixes)
        self._replicas[choice.replica].send(choice, prompt, now)
        return choice

    def _num_prefixes(self, choice: Choice) -> int:
        replica = self._replicas[choice.replica]
        return len(replica.expected) + (0 if replica.state is None else len(replica.state.prefixes))

    def expected(self, name: str, prompt: RoutedPrompt, now: float) -> Choice:
        """Return the choice of the replica `name`, which must have a state, with the expected time to first token."""
        replica = self._replicas[name]
        state = replica.state
        assert state is not None
        replica.forget_expired(now)
        if prompt is not self._prompt:
            self._prompt, self._lengths = prompt, prompt.lengths()
        cached = num_cached(self._lengths, state.prefixes, replica.expected.keys())
        prefill = self._speed().seconds(cached, prompt.num_tokens)
        wait = max(replica.backlog_at(now), state.seconds_to_admission(state.num_waiting + len(replica.sent)))
        reason = "cached prefix" if cached else "shortest wait"
        return Choice(name, reason, cached, wait + prefill + state.step_seconds, prefill)

    def _speed(self) -> PrefillSpeed:
        """Return the median of the speeds that replicas have published. It counts for all of them."""
        # Replicas have the same model and the same kind of GPU. Their estimates differ because each has learned from a
        # few steps of its own.
        if self._median is None:
            known = [each.state.prefill for each in self._replicas.values() if each.state is not None]
            self._median = PrefillSpeed(*(median_low(values) for values in zip(*known, strict=True)))
        return self._median


def _cost(choice: Choice) -> float:
    return (choice.expected_ttft or 0.0) + PREFILL_WEIGHT * choice.seconds


#: Names of all rules.
RULES = ("prefix", *SIMPLE_RULES)


def make_rule(name: str, seed: int, clock: Callable[[], float]) -> Rule:
    """Return a new rule. `clock` returns the time in seconds of the clock on which replicas publish their states."""
    random = Random(seed)
    return PrefixRouter(random, clock) if name == "prefix" else SIMPLE_RULES[name](random)
