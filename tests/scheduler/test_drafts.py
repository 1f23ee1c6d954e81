"""Drafts of speculative decoding: where they come from, when they pay, and that they change no output."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import BLOCK, Harness, assert_right, make_request, next_token, reference, repeating_token, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.engine.executor.base import StepPlan
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.scheduler import ngram_index
from llmsched.engine.scheduler.drafts import Proposal, best_counts
from llmsched.engine.scheduler.ngram_index import Match, NgramIndex, continuation
from llmsched.engine.scheduler.token_budget import DraftCosts

#: Prompt whose continuation by `repeating_token` is right three times of four from the first token on.
LOOP = tokens(7) * 4


class Drafting(Harness):
    """Harness with a model that repeats itself. It records the lengths of the drafts of each step."""

    def __init__(self, num_blocks: int = 100, speculative: str = "ngram", **settings: Any) -> None:
        super().__init__(num_blocks, speculative=speculative, **settings)
        self.executor.model = repeating_token
        self.drafts: list[list[int]] = []
        launch = self.executor.launch

        def watched(plan: StepPlan) -> Any:
            self.drafts.append([len(row.draft) for row in plan.rows])
            return launch(plan)

        self.executor.launch = watched  # type: ignore[method-assign]

    @property
    def longest(self) -> int:
        return max(itertools.chain.from_iterable(self.drafts))


def longest_match(token_ids: list[int], shortest: int, longest: int) -> Match | None:
    """Return what NgramIndex.find returns if it compares all places."""
    for length in range(longest, shortest - 1, -1):
        suffix = token_ids[len(token_ids) - length :]
        ends = [end for end in range(length, len(token_ids)) if token_ids[end - length : end] == suffix]
        if ends:
            votes = Counter(token_ids[end] for end in ends)
            end = max(ends, key=lambda end: (votes[token_ids[end]], end))
            return Match(end, length, len(votes) > 1)
    return None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_the_longest_match_is_found_as_tokens_come(
    token_ids: list[int], shortest: int, more: int, at_once: int
) -> None:
    index, known = NgramIndex(shortest, shortest + more), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "MAX_COMPARED", 100)
        patch.setattr(ngram_index, "INDEXED_AT_ONCE", at_once)
        for known in range(0, len(token_ids), 3):
            while not index.extend(token_ids[:known]):
                pass
            assert index.find(token_ids[:known]) == longest_match(token_ids[:known], shortest, shortest + more)


def test_a_continuation_that_reaches_the_end_repeats() -> None:
    assert continuation([9, 1, 2, 3], 1, 2) == [1, 2]
    assert continuation([9, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 6),
    st.floats(1.0, 3.0),
    st.floats(0.0, 1.0),
)
def test_the_counts_make_the_most_tokens_per_second(
    shares: list[list[float]], others: int, room: int, base: float, per_token: float
) -> None:
    proposals = [
        Proposal(make_request("r", [1]), [0] * len(s), list(itertools.accumulate(s, float.__mul__))) for s in shares
    ]
    num_decodes, costs = len(proposals) + others, DraftCosts(1.0, base, per_token, room)

    def rate(counts: tuple[int, ...]) -> float:
        gain = sum(sum(each.chances[:count]) for each, count in zip(proposals, counts, strict=True))
        return (num_decodes + gain) / (base + per_token * sum(counts))

    choices = itertools.product(*(range(len(each.draft) + 1) for each in proposals))
    allowed = [c for c in choices if sum(c) <= room]
    best = max(allowed, key=rate)
    counts = tuple(best_counts(proposals, num_decodes, room, costs, 1.1))
    assert counts in allowed
    if any(counts):
        assert rate(counts) == pytest.approx(rate(best))
        assert rate(counts) >= 1.1 * num_decodes * (1 - 1e-9)
    else:
        assert rate(best) <= 1.1 * num_decodes * (1 + 1e-9)


@pytest.mark.parametrize("speculative", ["ngram", "auto"])
def test_a_draft_saves_steps_and_changes_no_token(speculative: str) -> None:
    it = Drafting(speculative=speculative)
    requests = [it.add(make_request(f"r{i}", tokens(7, seed=i) * 3, 60)) for i in range(3)]
    assert it.run() < 45
    assert_right(*requests, model=repeating_token)
    counters = it.scheduler.counters
    assert counters.draft_tokens == sum(itertools.chain.from_iterable(it.drafts))
    assert counters.accepted_tokens + sum(row.sample for plan in it.executor.plans for row in plan.rows) == 3 * 60
    assert counters.num_drafts == sum(map(bool, itertools.chain.from_iterable(it.drafts)))
    last = it.scheduler.ledger.entries("r0")[-2]
    assert last.what == "drafted"
    assert 20 < int(last.details["accepted"]) < int(last.details["of"])


def test_nothing_is_drafted_without_a_match() -> None:
    it = Drafting()
    it.executor.model = lambda token_ids: len(token_ids)
    it.add(make_request("r", tokens(10), 30))
    assert it.run() == 30
    assert it.longest == 0


@pytest.mark.parametrize(("max_tokens", "most"), [(0, 0), (1, 0), (2, 1), (5, 4), (40, 8)])
def test_a_draft_ends_before_max_tokens(max_tokens: int, most: int) -> None:
    it = Drafting(budget=27)  # so that the last token of the prompt is computed alone
    request = it.add(make_request("r", LOOP, max_tokens))
    it.run()
    assert_right(request, model=repeating_token)
    assert it.drafts[1:2] == ([[most]] if max_tokens else [[0]])


def test_a_draft_ends_at_a_stop_id_and_the_tokens_after_it_are_dropped() -> None:
    it = Drafting()
    output = reference(LOOP, 60, repeating_token)
    request = make_request("r", LOOP, 60)
    request.stop_ids = frozenset({output[5]})
    it.add(request)
    it.run()
    assert request.token_ids[28:] == output[: output.index(output[5]) + 1]
    assert request.finish_reason is FinishReason.STOP
    assert it.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty"])
def test_requests_that_depend_on_their_tokens_get_no_drafts(penalty: str) -> None:
    it = Drafting()
    request = make_request("r", LOOP, 20)
    request.sampling = replace(request.sampling, **{penalty: 1.5})
    it.add(request)
    it.run()
    assert it.longest == 0
    assert_right(request, model=repeating_token)


@pytest.mark.parametrize("layout", [KVLayout(BLOCK), KVLayout(BLOCK, 1, 2, 9), KVLayout(BLOCK, 0, 1, 40)])
def test_drafts_take_only_blocks_that_nothing_else_needs(layout: KVLayout) -> None:
    """Without drafts, these requests fill the pool without a preemption."""
    blocks = layout.num_blocks(28 + 35) + layout.num_blocks(28 + 36)
    it = Drafting(num_blocks=blocks, layout=layout, headroom=0.0, num_speculative_tokens=15)
    requests = [it.add(make_request(f"r{i}", tokens(7, seed=i) * 4, 37)) for i in range(2)]
    it.run()
    assert_right(*requests, model=repeating_token)
    assert it.scheduler.counters.num_preemptions == 0
    assert it.longest > 8


def test_a_rejected_draft_leaves_no_trace_in_the_prefix_cache() -> None:
    it = Drafting(num_speculative_tokens=15)
    first = it.add(make_request("first", LOOP, 60))
    it.run()
    assert 0 < it.scheduler.counters.accepted_tokens < it.scheduler.counters.draft_tokens
    again = it.add(make_request("again", [*first.token_ids, 5], 4))
    it.run()
    assert again.num_cached_tokens >= (len(first.token_ids) - 1) // BLOCK * BLOCK
    assert_right(first, again, model=repeating_token)


def test_prefills_come_first() -> None:
    """Draft tokens count in the token budget, and prefills take theirs before."""
    it = Drafting(budget=16, max_num_seqs=2)
    it.add(make_request("short", LOOP[:14], 60))
    it.step()
    it.add(make_request("long", tokens(100, seed=3), 4))
    while it.has_work():
        it.step()
    steps = it.executor.plans[1:]
    assert all(plan.num_tokens <= 16 for plan in steps)
    chunks = [plan for plan in steps if plan.rows[-1].sequence.request_id == "long" and plan.rows[-1].num_tokens == 15]
    assert chunks
    assert not any(plan.num_draft_tokens for plan in chunks)
    assert it.longest > 0


class Timed(Drafting):
    """Harness on a machine whose step takes `seconds(decodes, draft tokens)`. It adds up the times."""

    def __init__(self, seconds: Callable[[int, int], float], speculative: str = "auto", **settings: Any) -> None:
        super().__init__(speculative=speculative, **settings)
        self.total = 0.0
        collect = self.executor.collect

        def timed(step: Any) -> Any:
            result = collect(step)
            drafted = step.plan.num_draft_tokens
            result.elapsed = seconds(step.plan.num_tokens - drafted, drafted)
            self.total += result.elapsed
            return result

        self.executor.collect = timed  # type: ignore[method-assign]


#: Machines on which a draft token takes as long as a decode, and almost no time in a step without a CUDA graph.
MACHINES: dict[str, Callable[[int, int], float]] = {
    "CPU": lambda decodes, drafted: 0.3 + 0.1 * (decodes + drafted),
    "GPU": lambda decodes, drafted: 1.0 + 0.003 * (decodes + drafted) + 0.4 * (drafted > 0),
}
#: Texts: one that repeats itself, one that does so every second time, one that never does, and one of few words, in
#: which what followed before hardly ever follows again.
TEXTS: dict[str, Callable[[list[int]], int]] = {
    "repeats": lambda ids: repeating_token(ids) if len(ids) % 40 < 2 else ids[-7],
    "half": lambda ids: ids[-7] if next_token(ids) % 2 else next_token(ids),
    "new": next_token,
    "misleads": lambda ids: next_token(ids) % 30,
}


def time_of(machine: str, clients: int, text: str, speculative: str) -> float:
    it = Timed(MACHINES[machine], speculative, num_blocks=400)
    it.executor.model = TEXTS[text]
    requests = [it.add(make_request(f"r{i}", tokens(14, seed=i), 300)) for i in range(clients)]
    it.run()
    assert_right(*requests, model=TEXTS[text])
    return it.total


@pytest.mark.parametrize("clients", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_gains_where_text_repeats_and_never_loses(machine: str, clients: int) -> None:
    gains = {text: time_of(machine, clients, text, "off") / time_of(machine, clients, text, "auto") for text in TEXTS}
    assert min(gains.values()) > 0.97, gains
    assert gains["repeats"] > {("CPU", 1): 1.9, ("CPU", 8): 1.05, ("GPU", 1): 4.0, ("GPU", 8): 3.0}[machine, clients]


def serve(it: Harness) -> Request:
    request = it.add(make_request("r", LOOP, 400))
    it.run()
    assert_right(request, model=repeating_token)
    return request


def test_auto_drafts_less_the_more_a_token_costs() -> None:
    drafted = []
    for per_token in (0.001, 0.3, 3.0):
        it = Timed(lambda decodes, drafted, per_token=per_token: 1.0 + per_token * drafted)
        serve(it)
        drafted.append(it.scheduler.counters.draft_tokens)
    assert drafted[0] > 1.5 * drafted[1] > 0
    assert drafted[2] < 0.02 * drafted[0]


def test_auto_stops_where_guesses_are_wrong_and_starts_again_where_they_are_right() -> None:
    """At first, 5 6 is followed by a new token each time."""
    it, right = Timed(lambda _, drafted: 1.0 + 0.1 * drafted, prompt_lookup_min=2), False
    it.executor.model = lambda ids: repeating_token(ids) if right else (5, 6, len(ids))[len(ids) % 3]
    it.add(make_request("r", [5, 6, 999], 1400))
    for _ in range(300):
        it.step()
    wrong = it.scheduler.counters.draft_tokens
    assert 0 < wrong < 30
    right = True
    for _ in range(300):
        it.step()
    assert it.scheduler.counters.accepted_tokens > 100


def test_auto_keeps_the_target_for_the_gap_between_tokens() -> None:
    it = Timed(lambda _, drafted: 1.0 + 0.1 * drafted, target_itl=1.35)
    serve(it)
    assert 0 < it.longest <= 3


@pytest.mark.parametrize("speculative", ["ngram", "auto"])
def test_looking_ahead_waits_only_for_tokens_that_drafts_need(speculative: str) -> None:
    it = Drafting(speculative=speculative, looks_ahead=True)
    plain = it.add(make_request("plain", tokens(40, seed=1), 20))
    it.executor.model = lambda ids: len(ids)
    it.run()
    assert it.run() == 0
    assert len(it.drafts) == 20
    ahead = sum(row.start + row.num_tokens > 40 and not row.draft for plan in it.executor.plans for row in plan.rows)
    assert ahead == 19
    assert plain.finish_reason is FinishReason.LENGTH
    it.executor.model = repeating_token
    serve(it)
    assert it.longest > 0
