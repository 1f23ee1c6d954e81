"""The real executor with a step in flight: outputs are those of an engine that waits for each step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engines import (
    SMALL_POOL,
    SWAP,
    Choice,
    Collector,
    Failing,
    assert_idle,
    generate_all,
    make_engine,
    prompt,
    sampling,
    tokenizer,
)
from tiny_models import VOCAB_SIZE

from llmsched.engine.core import Engine
from llmsched.engine.errors import EngineDeadError
from llmsched.engine.executor import torch_executor
from llmsched.engine.request import FinishReason, SamplingParams
from llmsched.engine.service import AsyncEngine

#: Prompts that share their beginning, so that there are prefix hits and copies of blocks.
PROMPTS = [prompt(30) + prompt(length, seed=length) for length in (20, 5, 40, 9, 33, 1, 26, 14)]


@cache
def free_output(index: int) -> tuple[tuple[int, ...], str]:
    """Return the greedy tokens of a prompt, and their text."""
    (choice,) = generate_all(make_engine(), (PROMPTS[index], sampling(max_tokens=24)))[0]
    return tuple(choice.tokens), choice.text


@cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return requests that end in every way, with all that a result can have."""
    stop_id, stop_text = free_output(0)[0][7], free_output(1)[1]
    wanted = [
        {"stop_token_ids": (stop_id,)},
        {"stop": (stop_text[len(stop_text) // 2 :][:3],)},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 4, "n": 3},
        {"frequency_penalty": 1.0, "temperature": 0.7, "seed": 5},
        {"repetition_penalty": 1.2, "max_tokens": 2},
        {"temperature": 1.1, "top_p": 0.9, "seed": 6, "min_tokens": 20, "logit_bias": {2: 4.0}, "ignore_eos": False},
        {"max_tokens": 0, "prompt_logprobs": 0},
    ]
    return [(ids, sampling(**{"max_tokens": 24, **more})) for ids, more in zip(PROMPTS, wanted, strict=True)]


def facts(choice: Choice) -> tuple[Any, ...]:
    return choice.tokens, choice.text, choice.finish_reason, choice.error


def values(choice: Choice) -> list[float]:
    entries = [*(choice.prompt_logprobs or []), *choice.logprobs]
    return [value for entry in entries if entry for value in (entry.logprob, *(logprob for _, logprob in entry.top))]


def assert_same(found: list[list[Choice]], expected: list[list[Choice]]) -> None:
    for choices, others in zip(found, expected, strict=True):
        assert [facts(choice) for choice in choices] == [facts(choice) for choice in others]
        for choice, other in zip(choices, others, strict=True):
            assert values(choice) == pytest.approx(values(other), abs=1e-4)


def launches_of(engine: Engine) -> list[int]:
    """Return a list that gets, for each step of the engine, the number of its rows that end with a pending token."""
    launched: list[int] = []
    launch = engine.executor.launch

    def watched(plan: Any) -> Any:
        launched.append(sum(row.sequence.num_pending_tokens for row in plan.rows))
        return launch(plan)

    engine.executor.launch = watched  # type: ignore[method-assign]
    return launched


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "enough memory": ("llama", {}),
    "chunks": ("llama", {"max_num_batched_tokens": 24}),
    "steps in parts": ("llama", {"max_num_batched_tokens": 100}),
    "recompute": ("llama", SMALL_POOL),
    "swap": ("llama", SMALL_POOL | SWAP | {"num_blocks": 11}),
    "windows": ("gemma2", SMALL_POOL | {"num_blocks": 30}),
    "static": ("llama", {"scheduling_policy": "static", "max_num_seqs": 4, "max_model_len": 128}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, settings = ENGINES[name]
    if name == "steps in parts":
        monkeypatch.setattr(torch_executor, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    expected = generate_all(make_engine(arch, **settings), *requests())
    engine = make_engine(arch, looks_ahead=True, **settings)
    launched = launches_of(engine)
    assert_same(generate_all(engine, *requests()), expected)
    assert sum(launched) > 0
    stats = engine.stats()
    assert (stats.num_preemptions > 0) is (settings.get("num_blocks", 0) > 0)
    assert (stats.num_swapped_in > 0) is (name == "swap")
    if arch == "llama":
        stopped = expected[0][0], expected[1][0]
        assert [choice.finish_reason for choice in stopped] == [FinishReason.STOP] * 2


def test_a_cached_prefix_is_found_behind_a_step_in_flight() -> None:
    engine = make_engine(looks_ahead=True)
    (first,) = generate_all(engine, (PROMPTS[0], sampling(max_tokens=24)))[0]
    (again,) = generate_all(engine, ([*PROMPTS[0], *first.tokens], sampling(max_tokens=4)))[0]
    assert again.num_cached_tokens == (50 + 23) // 16 * 16, "the KV of the last token was never computed"
    (plain,) = generate_all(make_engine(), ([*PROMPTS[0], *first.tokens], sampling(max_tokens=4)))[0]
    assert facts(again) == facts(plain)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_random_moments_change_no_other_output(seed: int) -> None:
    chance = random.Random(seed)
    params = [replace(params, n=1) for _, params in requests()]
    alone = [choices[0] for choices in generate_all(make_engine(), *zip(PROMPTS, params, strict=True))]
    engine = make_engine(looks_ahead=True, **SMALL_POOL)
    collector, waiting, aborted = Collector(engine), [*range(8)] * 3, set()
    chance.shuffle(waiting)
    while waiting or engine.has_work():
        if waiting and chance.random() < 0.5:
            engine.add_request(f"{len(waiting)} {waiting[-1]}", PROMPTS[waiting[-1]], params[waiting.pop()])
        if engine.open_sequences and chance.random() < 0.2:
            gone = chance.choice(list(engine.open_sequences))
            aborted.add(gone)
            collector.take(engine.abort(gone))
            engine.check_integrity()
        if engine.has_work():
            collector.step()
    assert_idle(engine)
    assert len(collector.choices) == 24
    for (name, _), choice in collector.choices.items():
        expected = alone[int(name.split()[1])]
        if name in aborted:
            assert choice.finish_reason is FinishReason.ABORT
            assert choice.tokens == expected.tokens[: len(choice.tokens)]
        else:
            assert facts(choice) == facts(expected)


@pytest.mark.parametrize("part", ["launch", "_forward", "collect"])
@pytest.mark.parametrize("swap", [False, True])
def test_running_out_of_memory_changes_no_output(monkeypatch: pytest.MonkeyPatch, part: str, swap: bool) -> None:
    settings = SMALL_POOL | (SWAP if swap else {})
    expected = generate_all(make_engine(**settings), *requests())
    engine = make_engine(looks_ahead=True, **settings)
    failing = Failing(getattr(engine.executor, part))
    monkeypatch.setattr(engine.executor, part, lambda *arguments, **more: failing(*arguments, **more))
    launched = launches_of(engine)
    assert_same(generate_all(engine, *requests()), expected)
    assert failing.calls > 20
    assert sum(launched) > 0


def test_outputs_come_one_step_at_a_time() -> None:
    """An output says what was known when it was made, not what the step in flight will add."""
    engine = make_engine(looks_ahead=True)
    launched = launches_of(engine)
    engine.add_request("a", PROMPTS[0], sampling(max_tokens=5, logprobs=0))
    tokens, text = free_output(0)
    seen = []
    for number in range(1, 6):
        (output,) = engine.step()
        assert len(launched) == min(number + 1, 5)
        assert output.num_output_tokens == number == engine.stats().generation_tokens
        assert output.finished is (number == 5)
        seen += output.token_ids
        assert output.logprobs is not None
    assert tuple(seen) == tokens[:5]
    assert text.startswith(tokenizer().decode(seen[:3]))
    assert_idle(engine)


def test_a_service_survives_aborts_in_flight_and_stops_in_flight() -> None:
    async def main() -> None:
        service = AsyncEngine(make_engine(looks_ahead=True))
        service.start()
        params = sampling(max_tokens=24)

        async def read(name: str, index: int, limit: int) -> list[int]:
            """Return the tokens of a request, which is aborted after `limit` tokens."""
            tokens: list[int] = []
            async with service.submit(name, PROMPTS[index], params) as stream:
                async for output in stream:
                    tokens += output.token_ids
                    if len(tokens) >= limit:
                        break
            return tokens

        found = await asyncio.gather(*(read(f"{i}", i % 2, 24 if i < 2 else i) for i in range(12)))
        for number, tokens in enumerate(found):
            assert tuple(tokens) == free_output(number % 2)[0][: len(tokens)]
        assert [len(tokens) for tokens in found[:2]] == [24, 24]
        await service.call(lambda core: core.check_integrity())
        assert service.healthy
        stream = service.submit("open", PROMPTS[0], sampling(max_tokens=60))
        await anext(aiter(stream))
        assert await service.stop()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass

    asyncio.run(main())
