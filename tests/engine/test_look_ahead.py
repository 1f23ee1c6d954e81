"""The real executor with a step in flight: outputs are those of an engine that waits for each step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from alike import ENGINES, PROMPTS, assert_same, facts, free_output, launches_of, requests, serve_with_aborts
from engines import (
    SMALL_POOL,
    SWAP,
    Failing,
    assert_idle,
    generate_all,
    make_engine,
    sampling,
    tokenizer,
)
from tiny_models import VOCAB_SIZE

from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.errors import EngineDeadError
from llmsched.engine.executor import torch_executor
from llmsched.engine.request import FinishReason


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


@pytest.mark.parametrize("graphs", [False, True])
def test_a_cached_prefix_is_found_behind_a_step_in_flight(graphs: bool) -> None:
    engine = make_engine(looks_ahead=True, graphs=graphs)
    (first,) = generate_all(engine, (PROMPTS[0], sampling(max_tokens=24)))[0]
    (again,) = generate_all(engine, ([*PROMPTS[0], *first.tokens], sampling(max_tokens=4)))[0]
    assert again.num_cached_tokens == (50 + 23) // 16 * 16, "the KV of the last token was never computed"
    (plain,) = generate_all(make_engine(), ([*PROMPTS[0], *first.tokens], sampling(max_tokens=4)))[0]
    assert facts(again) == facts(plain)


@pytest.mark.parametrize(("seed", "graphs"), [(0, False), (1, True), (2, False), (3, True)])
def test_aborts_at_random_moments_change_no_other_output(seed: int, graphs: bool) -> None:
    chance = random.Random(seed)
    params = [replace(params, n=1) for _, params in requests()]
    alone = [choices[0] for choices in generate_all(make_engine(), *zip(PROMPTS, params, strict=True))]
    engine = make_engine(looks_ahead=True, graphs=graphs, **SMALL_POOL)
    assert serve_with_aborts(engine, list(zip(PROMPTS, params, strict=True)), alone, chance, 0.2) == 24


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
