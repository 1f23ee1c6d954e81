"""The real executor with drafts of the next tokens: outputs are those of an engine without drafts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from alike import ENGINES, assert_same, facts, requests, serve_with_aborts
from engines import SMALL_POOL, Choice, generate, generate_all, make_engine, prompt, sampling, tokenizer
from tiny_models import VOCAB_SIZE

from llmsched.engine.core import Engine
from llmsched.engine.executor import torch_executor
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler.scheduler import Update

DRAFTS: dict[str, Any] = {"speculative": "ngram", "prompt_lookup_min": 1}
#: Prompts that repeat themselves, so that every step has drafts, and parameters with which some are right.
LOOPS = [prompt(5, seed=seed) * 6 for seed in range(6)]


def likely(index: int, **more: Any) -> SamplingParams:
    """Return parameters with which the output repeats the ids of LOOPS[index], in an order that depends on the seed."""
    bias = dict.fromkeys(LOOPS[index][:3], 9.0)
    return sampling(**{"temperature": 1.0, "seed": index, "logit_bias": bias, "max_tokens": 40, **more})


def accepted(engine: Engine) -> int:
    stats = engine.stats()
    assert 0 < stats.num_drafts <= stats.draft_tokens
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    return stats.accepted_tokens


@cache
def without_drafts(name: str) -> tuple[list[tuple[list[int], SamplingParams]], list[list[Choice]]]:
    """Return requests, and their outputs from an engine of ENGINES."""
    wanted = [*requests(), *((LOOPS[i], likely(i, n=1 + i % 2, logprobs=i % 3)) for i in range(4))]
    arch, settings = ENGINES[name]
    return wanted, generate_all(make_engine(arch, **settings), *wanted)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", sorted({*ENGINES} - {"static"}))
def test_outputs_are_the_same(name: str, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, settings = ENGINES[name]
    if name == "steps in parts":
        monkeypatch.setattr(torch_executor, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    wanted, expected = without_drafts(name)
    engine = make_engine(arch, looks_ahead=looks_ahead, graphs=looks_ahead, **settings, **DRAFTS)
    assert_same(generate_all(engine, *wanted), expected)
    accepted(engine)
    assert (engine.stats().num_preemptions > 0) is (settings.get("num_blocks", 0) > 0)


@pytest.mark.parametrize("seed", range(2))
def test_aborts_and_prefix_hits_change_no_other_output(seed: int) -> None:
    chance = random.Random(seed)
    params = [likely(index) for index in range(6)]
    alone = [generate(make_engine(), pair)[0] for pair in zip(LOOPS, params, strict=True)]
    engine = make_engine(looks_ahead=seed % 2 == 1, **SMALL_POOL, **DRAFTS)
    serve_with_aborts(engine, list(zip(LOOPS, params, strict=True)), alone, chance, 0.1)
    accepted(engine)


class Watched:
    """Engine with drafts that counts what its scheduler does."""

    def __init__(self) -> None:
        self.engine = make_engine(**DRAFTS)
        self.num_sampled = 0  # rows from which a token was sampled
        self.ends: list[FinishReason] = []  # reasons to end that the results of steps gave
        self.lengths: list[int] = []  # outputs of finished requests
        scheduler = self.engine.scheduler
        settle, learn = scheduler.settle, scheduler.predictor.learn

        def settled(plan: StepPlan, result: StepResult) -> list[Update]:
            self.num_sampled += sum(row.sample for row in plan.rows)
            updates = settle(plan, result)
            self.ends += [reason for each in updates if (reason := each.request.finish_reason) is not None]
            return updates

        def learned(request: Request) -> None:
            self.lengths.append(request.num_output_tokens)
            learn(request)

        scheduler.settle = settled  # type: ignore[method-assign]
        scheduler.predictor.learn = learned  # type: ignore[method-assign]

    def check(self, num_tokens: int) -> None:
        """Check the records of an only request that a stop string ended after so many tokens."""
        stats = self.engine.stats()
        assert stats.generation_tokens == num_tokens == self.num_sampled + stats.accepted_tokens
        assert sum(stats.accepted_by_position) == stats.accepted_tokens
        assert self.lengths == [num_tokens]
        (timeline,) = self.engine.explain("0")
        assert timeline.entries[-1].details == {"reason": "stop", "output_tokens": num_tokens}


def test_a_stop_string_drops_the_tokens_of_the_draft_after_it() -> None:
    free = generate(make_engine(), (LOOPS[0], likely(0)))[0]
    ends: set[int] = set()
    for place in range(4, 36, 4):
        stop = "".join(free.text[place : place + 2])
        params = likely(0, stop=(stop,), logprobs=1)
        expected = generate(make_engine(), (LOOPS[0], params))[0]
        watched = Watched()
        (found,) = generate(watched.engine, (LOOPS[0], params))
        assert facts(found) == facts(expected)
        assert len(found.logprobs) == len(found.tokens)
        assert found.finish_reason is FinishReason.STOP
        watched.check(len(found.tokens))
        ends.add(len(found.tokens))
    assert len(ends) > 2


@pytest.mark.parametrize("more", [0, 1, 3, 20])
def test_a_stop_string_counts_even_if_the_draft_after_it_reaches_max_tokens(more: int) -> None:
    watched = Watched()
    (token_id,) = tokenizer().encode("a", add_special_tokens=False)
    params = sampling(logit_bias={token_id: 100.0}, stop=("a" * 7,), max_tokens=7 + more)
    (found,) = generate(watched.engine, ([token_id] * 3, params))
    assert (found.text, found.tokens, found.finish_reason) == ("", [token_id] * 7, FinishReason.STOP)
    assert (FinishReason.LENGTH in watched.ends) is (more < 20)
    watched.check(7)


def test_the_first_choice_does_not_depend_on_n() -> None:
    engine = make_engine(**DRAFTS)
    (choices,) = generate_all(engine, (LOOPS[1], likely(1, n=3)))
    accepted(engine)
    (alone,) = generate(make_engine(), (LOOPS[1], likely(1)))
    assert choices[0].tokens == alone.tokens
    assert len({tuple(choice.tokens) for choice in choices}) == 3


def test_tokens_of_one_step_share_its_gap() -> None:
    now = 0.0
    engine = make_engine(**DRAFTS, clock=lambda: now)
    engine.add_request("a", LOOPS[0], likely(0))
    gaps: list[float] = []
    sizes = []
    observe = engine.metrics.observe

    def watched(name: str, value: float) -> None:
        if name == "inter_token_latency_seconds":
            gaps.append(value)
        observe(name, value)

    engine.metrics.observe = watched  # type: ignore[method-assign]
    while engine.has_work():
        now += 1.0
        sizes += [len(output.token_ids) for output in engine.step()]
    assert gaps == [1 / size for size in sizes[1:] for _ in range(size)]
    assert max(sizes) > 1
    assert sum(sizes) == 40


def test_requests_with_penalties_get_no_drafts_and_their_neighbours_do() -> None:
    wanted = [(LOOPS[0], likely(0, repetition_penalty=1.3)), (LOOPS[1], likely(1))]
    engine = make_engine(**DRAFTS)
    assert_same(generate_all(engine, *wanted), generate_all(make_engine(), *wanted))
    drafted = [[entry for entry in engine.explain(name)[0].entries if entry.what == "drafted"] for name in "01"]
    assert not drafted[0]
    assert drafted[1][-1].details == {"accepted": accepted(engine), "of": engine.stats().draft_tokens}
