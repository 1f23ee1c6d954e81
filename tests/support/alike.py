"""Requests that use every feature, engines of many kinds to serve them, and a comparison of the outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from engines import SMALL_POOL, SWAP, Choice, Collector, assert_idle, generate_all, make_engine, prompt, sampling

from llmsched.engine.core import Engine
from llmsched.engine.request import FinishReason
from llmsched.engine.sampling_params import SamplingParams

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
    "latent attention": ("deepseek_v2", SMALL_POOL),
    "windows": ("gemma2", SMALL_POOL | {"num_blocks": 30}),
    "static": ("llama", {"scheduling_policy": "static", "max_num_seqs": 4, "max_model_len": 128}),
}


def serve_with_aborts(
    engine: Engine,
    requests: Sequence[tuple[list[int], SamplingParams]],
    expected: Sequence[Choice],
    chance: random.Random,
    share: float,
) -> int:
    """Serve each request three times and abort some. Return the number of choices.

    Requests arrive at random moments. Before each step, one is aborted with the probability `share`. The others must
    have the `expected` outputs, and those that are aborted must have the beginning of theirs.
    """
    collector, waiting, aborted = Collector(engine), [*range(len(requests))] * 3, set()
    chance.shuffle(waiting)
    while waiting or engine.has_work():
        if waiting and chance.random() < 0.5:
            engine.add_request(f"{len(waiting)} {waiting[-1]}", *requests[waiting.pop()])
        if engine.open_sequences and chance.random() < share:
            gone = chance.choice(list(engine.open_sequences))
            aborted.add(gone)
            collector.take(engine.abort(gone))
            engine.check_integrity()
        if engine.has_work():
            collector.step()
    assert_idle(engine)
    for (name, _), choice in collector.choices.items():
        whole = expected[int(name.split()[1])]
        if name in aborted:
            assert choice.finish_reason is FinishReason.ABORT
            assert choice.tokens == whole.tokens[: len(choice.tokens)]
        else:
            assert facts(choice) == facts(whole)
    return len(collector.choices)
