"""The router sends requests where they begin soonest, and neither starves nor floods a replica."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.kv.cache_summary import prefix_hashes
from llmsched.engine.kv.prefix_tree import encode
from llmsched.engine.routing import router as router_module
from llmsched.engine.routing.replica_state import ReplicaState
from llmsched.engine.routing.router import MAX_AGE, PREFILL_WEIGHT, RULES, PrefixRouter, make_rule
from llmsched.engine.routing.rules import AffinityRule, RoutedPrompt

SPAN = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(time: float = 0.0, **fields: Any) -> ReplicaState:
    """Return the state of an idle replica that computes a token in a millisecond."""
    idle = {"backlog_seconds": 0.0, "num_waiting": 0, "num_admissible": 64, "admission_seconds": 0.0}
    return ReplicaState(
        time=time, **{**idle, "token_seconds": 1e-3, "pair_seconds": 0.0, "step_seconds": 0.02, **fields}
    )


def prompt(length: int, first: int = 0) -> RoutedPrompt:
    tokens = encode(range(first, first + length))
    return RoutedPrompt(length, prefix_hashes(tokens, "", SPAN), SPAN)


def make_router(names: str, clock: Clock | None = None, **states: ReplicaState) -> PrefixRouter:
    router = PrefixRouter(Random(0), clock or Clock())
    for name in names:
        router.update(name, states.get(name, state()))
    return router


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    cached = state(prefixes=frozenset(prompt(100).hashes))
    router = make_router("abc", b=cached)
    choice = router.choose("abc", prompt(101))
    assert (choice.replica, choice.cached_tokens, choice.reason) == ("b", 96, "cached prefix")
    assert choice.expected_ttft == pytest.approx(0.02 + 5e-3)


def test_a_longer_queue_outweighs_a_cached_prefix() -> None:
    cached = {"prefixes": frozenset(prompt(100).hashes)}
    # A miss costs 96 ms of prefill, which count once for this request and PREFILL_WEIGHT times for later ones.
    most = 0.096 * (1 + PREFILL_WEIGHT)
    assert make_router("ab", b=state(**cached, backlog_seconds=most - 0.06)).choose("ab", prompt(101)).replica == "b"
    assert make_router("ab", b=state(**cached, backlog_seconds=most + 0.06)).choose("ab", prompt(101)).replica == "a"


def test_prefixes_that_a_replica_never_published_are_forgotten() -> None:
    clock = Clock()
    router = make_router("ab", clock)
    first = router.choose("ab", prompt(1000)).replica
    clock.now = 3 * MAX_AGE
    for name in "ab":
        router.update(name, state(clock.now))
    assert router.expected(first, prompt(1000), clock.now).cached_tokens == 0


def test_a_full_record_of_expected_prefixes_keeps_the_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_MAX_EXPECTED", 10)
    router = make_router("a")
    router.choose("a", prompt(100))
    assert router.expected("a", prompt(100), 0.0).cached_tokens == 10 * SPAN
    assert len(router._replicas["a"].expected) == 10


def test_a_state_that_was_overtaken_is_ignored() -> None:
    router = make_router("a", a=state(2.0, backlog_seconds=1.0))
    router.update("a", state(1.0))
    assert router.expected("a", prompt(10), 2.0).expected_ttft == pytest.approx(1.03)


def test_what_is_sent_without_fresh_states_of_others_counts() -> None:
    router = make_router("a")
    reasons = Counter(
        choice.reason for index in range(20) if (choice := router.choose("ab", prompt(9, 10 * index))).replica == "a"
    )
    assert len(reasons) == 2, "replica b has no state, so half of the requests are not sent by the states"
    assert len(router._replicas["a"].sent) == reasons.total() == router.num_open["a"]


def test_waiting_for_admission_counts() -> None:
    full = state(num_admissible=0, admission_seconds=0.3)
    choice = make_router("ab", a=full, b=state(backlog_seconds=0.1)).choose("ab", prompt(10))
    assert choice.replica == "b"
    assert make_router("a", a=full).choose("a", prompt(10)).expected_ttft == pytest.approx(0.3 + 0.02 + 0.01)


def test_requests_sent_since_the_state_count_until_they_are_computed() -> None:
    clock = Clock()
    router = make_router("a", clock)
    assert router.choose("a", prompt(1000)).expected_ttft == pytest.approx(1.02)
    assert router.choose("a", prompt(1000, 5000)).expected_ttft == pytest.approx(2.02)
    clock.now = 1.5
    assert router.choose("a", prompt(1000, 10_000)).expected_ttft == pytest.approx(0.5 + 1.02)
    # A state from before the last request does not hide it, one from after it does.
    router.update("a", state(1.2))
    assert router.choose("a", prompt(1000, 15_000)).expected_ttft == pytest.approx(1.0 + 1.02)
    clock.now = 1.6
    router.update("a", state(1.6))
    assert router.choose("a", prompt(1000, 20_000)).expected_ttft == pytest.approx(1.02)


def test_a_second_turn_follows_the_first_before_the_replica_publishes_it() -> None:
    for seed in range(20):
        router = PrefixRouter(Random(seed), Clock())
        for name in "abcd":
            router.update(name, state())
        first = router.choose("abcd", prompt(400))
        router.ended(first)
        for name in "abcd":
            router.update(name, state())
        assert router.choose("abcd", prompt(420)).replica == first.replica


def test_expected_prefixes_expire_and_are_bounded() -> None:
    clock = Clock()
    router = make_router("a", clock)
    router.choose("a", prompt(40))
    clock.now = 1000.0
    router.update("a", state(1000.0))
    router.choose("a", prompt(40_000, 100))
    router.choose("a", prompt(4, 50))
    assert len(router._replicas["a"].expected) <= 10_000
    assert router.expected("a", prompt(40), clock.now).cached_tokens == 0


@pytest.mark.parametrize("age", [0.0, 5.0])
def test_equal_requests_at_once_spread_over_replicas_with_old_states(age: float) -> None:
    """No herd: a burst does not flood the replica that looked best when the states were published."""
    clock = Clock()
    clock.now = age
    router = make_router("abcdefgh", clock, a=state(), **{name: state(backlog_seconds=0.01) for name in "bcdefgh"})
    sent = Counter(router.choose("abcdefgh", prompt(200, 1000 * index)).replica for index in range(160))
    assert set(sent) == set("abcdefgh")
    assert max(sent.values()) <= 2 * 160 / 8


def test_a_shared_prefix_spreads_when_its_replica_is_busy() -> None:
    router = make_router("abcd", a=state(prefixes=frozenset(prompt(100).hashes)))
    sent = Counter(router.choose("abcd", prompt(140)).replica for _ in range(800))
    assert set(sent) == set("abcd")
    assert max(sent.values()) < 400


def test_stale_and_missing_states_degrade_to_the_less_loaded_of_two() -> None:
    clock = Clock()
    router = make_router("abcd", clock)
    clock.now = MAX_AGE + 1
    choices = [router.choose("abcd", prompt(10)) for _ in range(400)]
    assert {choice.reason for choice in choices} == {"no fresh state: less loaded of two"}
    counts = Counter(choice.replica for choice in choices)
    assert max(counts.values()) - min(counts.values()) <= 4  # random choice alone: about 25


def test_one_replica_without_a_state_gets_requests_and_the_others_keep_their_prefixes() -> None:
    router = make_router("abc", c=state(prefixes=frozenset(prompt(2000).hashes)))
    choices = [router.choose("abcd", prompt(2001)) for _ in range(40)]
    counts = Counter(choice.replica for choice in choices)
    assert counts["d"] > 0
    assert sum(choice.reason == "cached prefix" for choice in choices) > 15


def test_a_removed_replica_is_forgotten() -> None:
    router = make_router("ab")
    choice = router.choose("a", prompt(100))
    router.remove("a")
    router.ended(choice)
    assert router.num_open["a"] == 0
    assert router.choose("ab", prompt(100)).replica in "ab"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5), st.floats(0, 2)), min_size=1, max_size=60),
    st.sampled_from(RULES),
    st.integers(0, 5),
)
def test_every_rule_chooses_a_given_replica_and_counts_to_zero(
    count: int, requests: list[tuple[int, int, float]], name: str, seed: int
) -> None:
    clock = Clock()
    rule = make_rule(name, seed, clock)
    replicas = [f"r{index}" for index in range(count)]
    choices = []
    for length, first, pause in requests:
        clock.now += pause
        rule.update(replicas[first % count], state(clock.now, backlog_seconds=length / 1000))
        choices.append(rule.choose(replicas, prompt(length, first)))
        assert choices[-1].replica in replicas
    for choice in choices:
        rule.ended(choice)
    assert not any(rule.num_open.values())  # type: ignore[attr-defined]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=2, max_size=8), st.integers(0, 100))
def test_no_replica_starves(queues: list[int], seed: int) -> None:
    """Under steady load, every replica gets requests, whatever their first states were."""
    clock = Clock()
    router = PrefixRouter(Random(seed), clock)
    names = [f"r{index}" for index in range(len(queues))]
    for name, tokens in zip(names, queues, strict=True):
        router.update(name, state(backlog_seconds=tokens / 1000))
    sent: Counter[str] = Counter()
    for index in range(60 * len(names)):
        clock.now += 0.1 / len(names)  # one replica alone computes ten such prompts in a second
        sent[router.choose(names, prompt(200, 1000 * index)).replica] += 1
    assert all(sent[name] > 0 for name in names)


def test_affinity_follows_prefixes_while_loads_are_balanced() -> None:
    rule = AffinityRule(Random(1), imbalanced_threshold=3)
    first = rule.choose("abcd", prompt(100)).replica
    assert [rule.choose("abcd", prompt(110)).replica for _ in range(3)] == [first] * 3
    assert rule.choose("abcd", prompt(110)).reason == "imbalanced"


def test_affinity_sends_new_prompts_to_the_replica_with_the_fewest_prefixes() -> None:
    rule = AffinityRule(Random(1))
    sent = [rule.choose("abc", prompt(100, 1000 * index)).replica for index in range(3)]
    assert sorted(sent) == ["a", "b", "c"]
