"""Steps of the real executor that run out of memory: outputs stay those of an engine with enough."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engines import SMALL_POOL, SWAP, Choice, Failing, assert_idle, generate, make_engine, prompt, sampling

from llmsched.engine.core import Engine
from llmsched.engine.errors import is_out_of_memory
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.step_loop import StepLoop

#: Enough shared tokens for copies of blocks, and more tokens than the small pool holds.
REQUESTS = [
    (prompt(30) + prompt(length, seed=length), sampling(max_tokens=24, temperature=temperature, seed=length, **more))
    for length, temperature, more in (
        (20, 0.0, {}),
        (5, 0.9, {"frequency_penalty": 1.0}),
        (40, 0.0, {"logprobs": 2}),
        (9, 0.7, {"stop": ("never to be seen",)}),
        (
            33,
            0.8,
            {"grammar": make_engine().grammars.compile(GrammarSpec("regex", "[a-z]{2,4}( [a-z]{2,4})*"), "test")},
        ),
    )
]


def part_of(executor: Any, name: str) -> tuple[Any, str]:
    """Return the owner and the name of a function that a step calls."""
    return {
        "forward": (executor, "_forward"),
        "sample": (executor._sampler, "enqueue"),
        "copy": (type(executor._cache), "copy_blocks"),
        "swap_out": (executor._host, "swap_out"),
        "swap_in": (executor._host, "swap_in"),
    }[name]


def texts(choices: list[Choice]) -> list[tuple[list[int], str]]:
    return [(choice.tokens, choice.text) for choice in choices]


@pytest.mark.parametrize(
    ("part", "arch"),
    [
        *((part, arch) for part in ("forward", "sample", "copy") for arch in ("llama", "gemma2")),
        *((part, "llama") for part in ("swap_out", "swap_in")),
    ],
)
def test_outputs_stay_the_same(monkeypatch: pytest.MonkeyPatch, part: str, arch: str) -> None:
    more = SWAP if part.startswith("swap") else {}
    pool = SMALL_POOL if arch == "llama" else {**SMALL_POOL, "num_blocks": 30}
    expected = generate(make_engine(arch, **pool, **more), *REQUESTS)
    engine = make_engine(arch, **pool, **more)
    owner, name = part_of(engine.executor, part)
    failing = Failing(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *arguments, **more: failing(*arguments, **more))
    found = generate(engine, *REQUESTS)
    assert texts(found) == texts(expected)
    assert failing.calls > 0


def exhausted(engine: Engine, times: int, error: BaseException) -> None:
    """Let the next `times` steps run out of memory."""
    right, left = engine.executor.launch, iter(range(times))

    def launch(plan: Any) -> Any:
        if next(left, None) is not None:
            raise error
        return right(plan)

    engine.executor.launch = launch  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no words that could be recognised"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_one_failure_is_logged_and_costs_nothing(caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    engine = make_engine()
    exhausted(engine, 1, error)
    with caplog.at_level(logging.INFO):
        found = generate(engine, *REQUESTS)
    assert texts(found) == texts(generate(make_engine(), *REQUESTS))
    (record,) = (record for record in caplog.records if "out of memory in a step" in record.message)
    assert "steps have at most 25 tokens now; 0 requests were preempted" in record.message
    assert_idle(engine)


def test_repeated_failures_end_the_engine() -> None:
    engine = make_engine()
    exhausted(engine, StepLoop.max_attempts - 1, MemoryError("once more"))
    engine.add_request("a", prompt(100), sampling(max_tokens=2))
    engine.step()
    assert engine.scheduler.pacer.limit == 100 >> (StepLoop.max_attempts - 1)
    exhausted(engine, StepLoop.max_attempts, MemoryError("once more"))
    with pytest.raises(MemoryError, match="once more"):
        engine.step()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), AssertionError("memory")])
def test_other_errors_are_not_tried_again(error: BaseException) -> None:
    engine = make_engine()
    exhausted(engine, 1, error)
    engine.add_request("a", prompt(10), sampling())
    with pytest.raises(type(error)):
        engine.step()
    assert not is_out_of_memory(error)
