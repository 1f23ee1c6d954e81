"""The engine with its real executor: a request's output does not depend on other requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    BLOCK,
    EOS,
    Collector,
    alone,
    assert_idle,
    generate,
    generate_all,
    make_engine,
    model,
    prompt,
    sampling,
    tokenizer,
)
from tiny_models import VOCAB_SIZE

from llmsched.engine.errors import QueueFullError, RequestError
from llmsched.engine.executor.base import Executor, ObservedExecutor, RowResult, StepPlan, StepResult
from llmsched.engine.request import FinishReason
from llmsched.engine.sampling_params import SamplingParams

# -- preemption -----------------------------------------------------------------------------------------------

#: Two of these need seven blocks each: in a pool of ten one is preempted, with tokens already generated.
CROWDED = {"num_blocks": 10}

HARD_SAMPLINGS = {
    "greedy": sampling(max_tokens=64),
    "seeded": sampling(max_tokens=64, temperature=1.0, seed=42),
    "frequency_penalty": sampling(max_tokens=64, frequency_penalty=1.0),
    "repetition_penalty": sampling(max_tokens=64, repetition_penalty=1.3, presence_penalty=0.5),
    "min_tokens": sampling(max_tokens=64, ignore_eos=False, min_tokens=40, logit_bias={EOS: 100.0}),
    "logprobs": sampling(max_tokens=64, logprobs=2, prompt_logprobs=1),
    "stop": sampling(max_tokens=64, stop=("never to be found",), temperature=0.7, seed=3),
}


SWAP = {"preemption_mode": "swap", "swap_blocks": 12}


@pytest.mark.parametrize("mode", [{}, SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("params", HARD_SAMPLINGS.values(), ids=HARD_SAMPLINGS.keys())
def test_preemption_changes_nothing(params: SamplingParams, caching: bool, mode: dict[str, Any]) -> None:
    prompts = [prompt(48, seed) for seed in (1, 2)]
    engine = make_engine(**CROWDED, enable_prefix_caching=caching, **mode)
    found = generate(engine, *((token_ids, params) for token_ids in prompts))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swapped_out == stats.num_swapped_in == (stats.num_preemptions if mode else 0)
    assert (stats.recomputed_tokens == 0) is bool(mode)
    for token_ids, choice in zip(prompts, found, strict=True):
        solo = alone(token_ids, params)
        assert (choice.tokens, choice.text) == (solo.tokens, solo.text)
        assert choice.finish_reason is solo.finish_reason
        assert choice.num_prompt_tokens == 48
        assert len(choice.logprobs) == len(solo.logprobs)
        assert values(choice.prompt_logprobs) == pytest.approx(values(solo.prompt_logprobs), abs=1e-4)
    if params.min_tokens:
        assert [len(choice.tokens) for choice in found] == [41, 41]
    else:
        assert [len(choice.tokens) for choice in found] == [64, 64]


def values(logprobs: list | None) -> list[float]:
    return [entry.logprob for entry in logprobs or [] if entry is not None]


def test_recomputation_after_preemption_is_not_a_prefix_hit() -> None:
    engine = make_engine(**CROWDED)
    generate(engine, *((prompt(48, seed), sampling(max_tokens=64)) for seed in (1, 2)))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (96, 0)
    assert stats.recomputed_tokens > 0
    assert (stats.prompt_tokens, stats.generation_tokens) == (96, 128)


# -- batch mates ----------------------------------------------------------------------------------------------


def test_rows_without_a_token_in_a_step_sample_nothing() -> None:
    prompts = [prompt(8, seed) for seed in range(14)] + [prompt(400, seed) for seed in (20, 21)]
    engine = make_engine(max_num_batched_tokens=32)
    for token_ids, choice in zip(prompts, generate(engine, *((p, sampling()) for p in prompts)), strict=True):
        assert choice.tokens == alone(token_ids, sampling()).tokens


def test_a_seeded_request_does_not_depend_on_the_batch() -> None:
    seeded = sampling(temperature=0.9, seed=11, max_tokens=20)
    unseeded = sampling(temperature=0.9, max_tokens=20)
    expected = alone(prompt(9), seeded).tokens
    for round_number in range(4):
        mates = [(prompt(9, 1 + mate), unseeded) for mate in range(1 + 2 * round_number)]
        assert generate(make_engine(), (prompt(9), seeded), *mates)[0].tokens == expected
    first, second = (generate(make_engine(), (prompt(9), unseeded))[0].tokens for _ in range(2))
    assert first != second


def test_the_servers_seed_makes_unseeded_requests_repeatable() -> None:
    params = sampling(temperature=1.0)
    runs = [generate(make_engine(seed=5), (prompt(9), params), (prompt(9), params)) for _ in range(2)]
    assert [choice.tokens for choice in runs[0]] == [choice.tokens for choice in runs[1]]
    assert runs[0][0].tokens != runs[0][1].tokens


def test_the_choices_of_a_request_differ() -> None:
    params = sampling(n=6, temperature=1.3, max_tokens=24)
    choices = generate_all(make_engine(), (prompt(9), params))[0]
    assert len({tuple(choice.tokens) for choice in choices}) > 1
    seeded = sampling(n=6, temperature=1.3, max_tokens=24, seed=7)
    engines = [make_engine() for _ in range(2)]
    first, second = ([c.tokens for c in generate_all(engine, (prompt(9), seeded))[0]] for engine in engines)
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 6
    assert first[0] == alone(prompt(9), sampling(temperature=1.3, max_tokens=24, seed=7)).tokens
    stats = engines[0].stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 6 * 24)


def test_greedy_choices_are_equal() -> None:
    choices = generate_all(make_engine(), (prompt(9), sampling(n=3)))[0]
    assert [choice.tokens for choice in choices] == [alone(prompt(9), sampling()).tokens] * 3


# -- where a request ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_exactly_as_many_tokens_as_asked_for(length: int, count: int) -> None:
    engine = make_engine()
    choice = generate(engine, (prompt(length), sampling(max_tokens=count)))[0]
    assert len(choice.tokens) == count
    assert choice.finish_reason is FinishReason.LENGTH
    assert engine.stats().generation_tokens == count


def test_no_blocks_are_needed_for_the_last_token() -> None:
    """A prompt that fills the whole pool can have one output token, but not two."""
    engine = make_engine(num_blocks=2)
    assert len(generate(engine, (prompt(32), sampling(max_tokens=1)))[0].tokens) == 1
    with pytest.raises(RequestError, match="2 KV blocks of 16 tokens"):
        engine.add_request("x", prompt(32), sampling(max_tokens=2))


@pytest.mark.parametrize("length", [16, 32, 48, 15, 17])
def test_a_lone_request_grows_past_a_full_block(length: int) -> None:
    engine = make_engine()
    choice = generate(engine, (prompt(length), sampling(max_tokens=20)))[0]
    assert choice.tokens == greedy_by_transformers(prompt(length), 20)


def greedy_by_transformers(token_ids: list[int], count: int) -> list[int]:
    """Greedy search by full passes of transformers' own attention."""
    plain = model()
    plain.set_attn_implementation("eager")
    tokens = list(token_ids)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(plain(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    plain.set_attn_implementation("llmsched_paged")
    return tokens[len(token_ids) :]


def test_min_tokens_counts_the_output() -> None:
    params = sampling(min_tokens=16, max_tokens=16, ignore_eos=False, logit_bias={EOS: 100.0})
    choice = generate(make_engine(), (prompt(32), params))[0]
    assert len(choice.tokens) == 16
    assert EOS not in choice.tokens
    assert choice.finish_reason is FinishReason.LENGTH
    stopping = sampling(min_tokens=3, ignore_eos=False, logit_bias={EOS: 100.0})
    choice = generate(make_engine(), (prompt(32), stopping))[0]
    assert len(choice.tokens) == 4
    assert choice.tokens[-1] == EOS
    assert choice.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("token", [EOS, VOCAB_SIZE - 1])
def test_ignore_eos_excludes_no_token(token: int) -> None:
    choice = generate(make_engine(), (prompt(32), sampling(logit_bias={token: 100.0})))[0]
    assert choice.tokens == [token] * 16
    assert choice.finish_reason is FinishReason.LENGTH


def test_stop_token_ids_end_a_request() -> None:
    free = alone(prompt(9), sampling(max_tokens=24))
    token = free.tokens[5]
    engine = make_engine()
    choice = generate(engine, (prompt(9), sampling(max_tokens=24, stop_token_ids=(token,))))[0]
    assert choice.tokens == free.tokens[: free.tokens.index(token) + 1]
    assert choice.finish_reason is FinishReason.STOP


# -- log-probabilities ----------------------------------------------------------------------------------------


def reference_logprobs(token_ids: list[int]) -> list[float]:
    """log softmax of every token but the first, by plain transformers."""
    plain = model()
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = plain(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    plain.set_attn_implementation("llmsched_paged")
    found = torch.log_softmax(logits.double(), dim=1)
    return found[range(len(token_ids) - 1), token_ids[1:]].tolist()


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_prompt_logprobs_beside_a_cached_prefix(length: int) -> None:
    engine = make_engine()
    params = sampling(max_tokens=1, prompt_logprobs=1, logprobs=1)
    generate(engine, (prompt(length), sampling()))
    runs = [generate(engine, (prompt(length), params))[0] for _ in range(2)]
    runs.append(generate(make_engine(enable_prefix_caching=False), (prompt(length), params))[0])
    expected = reference_logprobs(prompt(length))
    for run in runs:
        assert run.prompt_logprobs is not None
        assert len(run.prompt_logprobs) == length
        assert run.prompt_logprobs[0] is None
        assert values(run.prompt_logprobs) == pytest.approx(expected, abs=1e-4)
        assert [entry.token_id for entry in run.prompt_logprobs[1:] if entry] == prompt(length)[1:]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("budget", [7, 256])
def test_logprobs_of_prompt_and_output(count: int, budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    choice = generate(engine, (prompt(20), sampling(max_tokens=count, prompt_logprobs=0, logprobs=0)))[0]
    expected = reference_logprobs(prompt(20) + choice.tokens)
    found = values(choice.prompt_logprobs) + values(choice.logprobs)
    assert len(found) == 19 + count
    assert found == pytest.approx(expected, abs=1e-4)
    assert sum(found[19:]) == pytest.approx(sum(expected[19:]), abs=1e-3)


# -- the door -------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_be_served_is_refused() -> None:
    engine = make_engine(max_model_len=64)
    for token_ids, params, message in (
        ([], sampling(), "no tokens"),
        ([VOCAB_SIZE], sampling(), f"{VOCAB_SIZE}; allowed is from 0 to {VOCAB_SIZE - 1}"),
        ([-1], sampling(), "-1"),
        ([5], sampling(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        ([5], sampling(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (prompt(60), sampling(max_tokens=5), "64 tokens; the prompt has 60 tokens and max_tokens is 5"),
        ([VOCAB_SIZE] * 60, sampling(max_tokens=5), "60 tokens"),  # the length is checked before millions of ids are
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("x", token_ids, params)
    assert_idle(engine)
    assert len(generate(engine, (prompt(63), sampling(max_tokens=1)))[0].tokens) == 1


def test_a_full_queue_refuses_with_retry_after() -> None:
    engine = make_engine(max_queue_size=3)
    for name in "abc":
        engine.add_request(name, prompt(4), sampling())
    with pytest.raises(QueueFullError, match="3 requests are waiting; at most 3 may") as caught:
        engine.add_request("d", prompt(4), sampling())
    assert caught.value.retry_after >= 1
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", prompt(4), sampling())
    Collector(engine).run()
    assert_idle(engine)


# -- abort, and everything at once ----------------------------------------------------------------------------


def test_abort_in_every_state() -> None:
    engine = make_engine(num_blocks=10, max_num_batched_tokens=32)
    collector = Collector(engine)
    for name, length in (("decoding", 8), ("prefilling", 100), ("waiting", 100)):
        engine.add_request(name, prompt(length), sampling())
    collector.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
    for name in ("waiting", "prefilling", "decoding", "unknown"):
        collector.take(engine.abort(name))
        engine.check_integrity()
    assert_idle(engine)
    assert {name: c.finish_reason for (name, _), c in collector.choices.items()} == dict.fromkeys(
        ("decoding", "prefilling", "waiting"), FinishReason.ABORT
    )
    assert engine.stats().finished[FinishReason.ABORT] == 3
    assert engine.abort("decoding") == []


def faulty(executor: Executor, chance: random.Random) -> Executor:
    """Return an executor whose rows fail at random."""

    def fail(plan: StepPlan, result: StepResult) -> None:
        result.rows = [RowResult(error="injected") if chance.random() < 0.01 else row for row in result.rows]

    return ObservedExecutor(executor, fail)


def random_params(chance: random.Random) -> SamplingParams:
    """Return random sampling parameters."""
    return SamplingParams(
        n=chance.choice((1, 1, 1, 2)),
        temperature=chance.choice((0.0, 0.8, 1.5)),
        top_p=chance.choice((1.0, 0.9)),
        top_k=chance.choice((0, 20)),
        frequency_penalty=chance.choice((0.0, 0.0, 1.0)),
        seed=chance.randrange(1 << 40),
        max_tokens=chance.choice((0, 1, 8, 24, 40)),
        stop=chance.choice(((), (), ("e", "th"))),
        stop_token_ids=chance.choice(((), (5, 9, 40))),
        logprobs=chance.choice((None, None, 2)),
        prompt_logprobs=chance.choice((None, None, None, 0)),
    )


class Crowd:
    """Random requests with common prefixes in a small pool, with random aborts; checks integrity after each step."""

    def __init__(self, num_requests: int, seed: int, budget: int, *, faults: bool = False, **config: Any) -> None:
        self.engine = make_engine(num_blocks=16, max_num_batched_tokens=budget, max_num_seqs=12, **config)
        chance = random.Random(seed)
        self._late = 0.05 if faults else 0.0  # share of requests whose deadline passes as they arrive
        if faults:
            self.engine.executor = faulty(self.engine.executor, random.Random(seed))
        self.collector = Collector(self.engine)
        self.requests = {
            f"r{number}": (
                prompt(48, chance.randrange(3))[: chance.randint(1, 48)] + prompt(chance.randint(1, 40), number),
                random_params(chance),
            )
            for number in range(num_requests)
        }
        self._run(chance)

    def _run(self, chance: random.Random) -> None:
        arriving = list(self.requests)
        while arriving or self.engine.has_work():
            for _ in range(min(len(arriving), chance.choice((0, 1, 4)))):
                name = arriving.pop()
                late = {"deadline": self.engine.clock()} if self._late and chance.random() < self._late else {}
                self.engine.add_request(name, *self.requests[name], priority=chance.choice((0, 0, 1)), **late)
                if chance.random() < 0.1:
                    self.collector.take(self.engine.abort(name))
            if chance.random() < 0.1:
                self.collector.take(self.engine.abort(chance.choice(list(self.requests))))
            if self.engine.has_work():
                self.collector.step()

    def check(self) -> dict[FinishReason, int]:
        """Check that every request ended exactly once and nothing is left; return the count of each finish reason."""
        choices = self.collector.choices
        assert len(choices) == sum(params.n for _, params in self.requests.values())
        reasons = [choice.finish_reason for choice in choices.values()]
        assert None not in reasons
        counts = {reason: reasons.count(reason) for reason in FinishReason}
        assert counts == self.engine.stats().finished
        explained = (FinishReason.ERROR, FinishReason.DEADLINE)
        assert all((choice.error is not None) == (choice.finish_reason in explained) for choice in choices.values())
        assert_idle(self.engine)
        assert self.engine.stats().num_preemptions > 0
        assert self.engine.stats().prefix_hit_tokens > 0
        return counts


def test_500_random_requests_leave_nothing_behind() -> None:
    crowd = Crowd(500, seed=1, budget=100, faults=True)
    assert all(crowd.check().values())


def test_200_mixed_requests_with_aborts_end_with_all_blocks_free_or_cached() -> None:
    crowd = Crowd(200, seed=2, budget=48)
    counts = crowd.check()
    assert counts[FinishReason.ABORT] > 20
    crowd.engine.prefixes.reset()
    assert crowd.engine.stats().blocks_free == 16


@pytest.mark.parametrize("mode", [{}, SWAP, {"swap_blocks": 5}], ids=["recompute", "swap", "auto"])
def test_crowded_requests_get_the_same_output_as_alone(mode: dict[str, Any]) -> None:
    crowd = Crowd(40, seed=3, budget=17, **mode)
    crowd.check()
    assert crowd.engine.stats().host_blocks_used == 0
    if mode is SWAP:
        assert crowd.engine.stats().num_swapped_in > 0
    compared = 0
    for name, (token_ids, params) in crowd.requests.items():
        choice = crowd.collector.choices[name, 0]
        if choice.finish_reason is not FinishReason.ABORT:
            solo = alone(token_ids, replace(params, n=1))
            assert (choice.tokens, choice.text, choice.finish_reason) == (solo.tokens, solo.text, solo.finish_reason)
            compared += 1
    assert compared > 20


def test_a_long_output_in_small_chunks_leaves_nothing_behind() -> None:
    engine = make_engine(max_num_batched_tokens=4)
    choice = generate(engine, (prompt(3), sampling(max_tokens=200)))[0]
    assert len(choice.tokens) == 200
    assert engine.stats().blocks_cached == (3 + 199) // BLOCK


def test_text_is_the_tokens_decoded() -> None:
    choice = generate(make_engine(), (prompt(9), sampling(max_tokens=60, temperature=1.0, seed=1)))[0]
    assert choice.text == tokenizer().decode(choice.tokens)


def test_on_step_sees_kv_usage_before_blocks_are_freed() -> None:
    """With blocks of 16, a prompt of 20 tokens holds two blocks; the request ends with its third token."""
    engine, seen = make_engine(num_blocks=8), []
    engine.on_step = seen.append
    engine.add_request("a", prompt(20), sampling(max_tokens=3))
    while engine.has_work():
        engine.step()
    assert [(use.held, use.empty, use.total) for use in seen] == [(32, 12, 128), (32, 11, 128), (32, 10, 128)]
    assert engine.scheduler.kv_usage().held == 0


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["fair", "static"])
def test_on_step_agrees_with_kv_usage_after_the_step(arch: str, policy: str) -> None:
    """Holds in every group of layers while no request ends and no block leaves a window in the step."""
    engine, seen = make_engine(arch, block_size=4, max_num_batched_tokens=16, scheduling_policy=policy), []
    engine.on_step = seen.append
    for index in range(4):
        engine.add_request(f"r{index}", prompt(20 + 7 * index, seed=index), sampling(max_tokens=6 + 3 * index))
    compared = 0
    while engine.has_work():
        before = len(engine.scheduler.running)
        engine.step()
        after = engine.scheduler.kv_usage()
        assert 0 <= seen[-1].empty <= seen[-1].held
        if before == len(engine.scheduler.running) and seen[-1].held == after.held:
            assert seen[-1] == after
            compared += 1
    assert compared > 5
