"""TorchExecutor as the engine uses it: plans in, results out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import VOCAB_SIZE, build_model
from torch.utils._python_dispatch import TorchDispatchMode

from llmsched.engine.executor import sampler, torch_executor
from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.activation_memory import LOGITS_BYTES
from llmsched.engine.request import TokenLogprob
from llmsched.kernels.dispatch import ENVIRONMENT_VARIABLE

aten = torch.ops.aten

PROMPT = [(7 * index + 4) % (VOCAB_SIZE - 4) + 4 for index in range(33)]


def make_executor(
    arch: str = "llama",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    logits_bytes: int = LOGITS_BYTES,
    **overrides: Any,
) -> TorchExecutor:
    return TorchExecutor(
        build_model(arch, seed=5, **overrides),
        num_blocks=num_blocks,
        block_size=block_size,
        device="cpu",
        kv_dtype=torch.float32,
        logits_bytes=logits_bytes,
    )


def raw_logprobs(tokens: list[int]) -> torch.Tensor:
    """Return in row i the distribution of token i + 1, from plain transformers."""
    with torch.inference_mode():
        return torch.log_softmax(build_model("llama", seed=5)(input_ids=torch.tensor([tokens])).logits[0].double(), -1)


@pytest.mark.parametrize("chunks", [(1000,), (1,), (7,), (16,)], ids=str)
def test_prompt_logprobs(chunks: tuple[int, ...]) -> None:
    sequences = [
        make_sequence("a", PROMPT, prompt_logprobs=3),
        make_sequence("b", PROMPT[:9], prompt_logprobs=0, logprobs=2),
        make_sequence("c", PROMPT),
        make_sequence("d", PROMPT[:1], prompt_logprobs=1),
    ]
    stepper = Stepper(make_executor(), sequences, 40)
    stepper.generate(2, chunks)
    expected = raw_logprobs(PROMPT)
    for length, found in ((33, stepper.prompt_logprobs[0]), (9, stepper.prompt_logprobs[1])):
        assert [entry.token_id for entry in found] == PROMPT[1:length]
        values = [float(expected[index, token]) for index, token in enumerate(PROMPT[1:length])]
        assert [entry.logprob for entry in found] == pytest.approx(values, abs=1e-4)
    best = expected[4].topk(3)
    assert [token for token, _ in stepper.prompt_logprobs[0][4].top] == best.indices.tolist()
    assert [value for _, value in stepper.prompt_logprobs[0][4].top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(entry.top == () for entry in stepper.prompt_logprobs[1])
    assert stepper.prompt_logprobs[2] == stepper.prompt_logprobs[3] == []


def test_prompt_logprobs_from_the_middle() -> None:  # after a prefix hit only the rest is computed
    stepper = Stepper(make_executor(), [make_sequence("a", PROMPT)], 40)
    stepper.step((16,))
    stepper.sequences[0] = make_sequence("a", PROMPT, prompt_logprobs=0)
    stepper.step((1000,))
    assert [entry.token_id for entry in stepper.prompt_logprobs[0]] == PROMPT[17:]


def test_many_prompt_logprobs_are_computed_in_parts() -> None:
    def run(logits_bytes: int) -> tuple[list[list[TokenLogprob]], list[list[int]]]:
        sequences = [
            make_sequence(str(i), PROMPT[i:], prompt_logprobs=2, temperature=0.8, seed=i, logprobs=1) for i in range(4)
        ]
        stepper = Stepper(make_executor(logits_bytes=logits_bytes), sequences, 40)
        outputs = stepper.generate(3, (20, 1000))
        return stepper.prompt_logprobs, outputs

    whole, tokens = run(1 << 30)
    parts, tokens_in_parts = run(4 * VOCAB_SIZE * 3)
    assert tokens_in_parts == tokens
    for one, other in zip(whole, parts, strict=True):
        assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
        assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-5)


def test_logprobs_of_generated_tokens() -> None:
    stepper = Stepper(make_executor(), [make_sequence("a", PROMPT, logprobs=5, temperature=0.7, seed=3)], 48)
    output = stepper.generate(8)[0]
    expected = raw_logprobs(PROMPT + output)
    for index, (token, result) in enumerate(zip(output, stepper.results[0], strict=True)):
        assert result.logprob is not None
        assert result.logprob.token_id == token
        assert result.logprob.logprob == pytest.approx(float(expected[32 + index, token]), abs=1e-4)
        assert len(result.logprob.top) == 5


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.3, "top_p": 0.9, "seed": -4},
    {"temperature": 1.0, "top_k": 20, "frequency_penalty": 1.0, "seed": 2},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "min_tokens": 20, "logit_bias": {2: 50.0}, "stop": [2]},
]


def some_sequences() -> list[Any]:
    return [make_sequence(str(i), PROMPT[i : 20 + 2 * i], **sampling) for i, sampling in enumerate(SAMPLINGS)]


def test_sampling_is_the_same_alone_mixed_and_chunked() -> None:
    executor = make_executor()
    mixed = Stepper(executor, some_sequences(), 48).generate(16)
    assert Stepper(executor, some_sequences(), 48, seed=1).generate(16, (3, 1, 1000)) == mixed
    alone = [Stepper(executor, [sequence], 48, seed=2).generate(16)[0] for sequence in some_sequences()]
    assert alone == mixed
    assert len({tuple(output) for output in mixed}) == len(mixed)


def test_preemption_changes_nothing() -> None:
    executor = make_executor()
    undisturbed = Stepper(executor, some_sequences(), 48).generate(20)
    stepper = Stepper(executor, some_sequences(), 48, seed=3)
    for length in (5, 11, 20):
        stepper.generate(length)
        stepper.tables = stepper.tables[::-1].copy()  # other blocks, and everything computed anew
        stepper.computed = [0] * len(stepper.computed)
        executor.execute(StepPlan([], finished=["0", "2"]))
    assert [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in stepper.sequences] == undisturbed


def test_shared_prefix_blocks_are_read_by_several() -> None:
    executor = make_executor()
    first = Stepper(executor, [make_sequence("a", PROMPT)], 48)
    expected = first.generate(4)
    second = Stepper(executor, [make_sequence("b", PROMPT), make_sequence("c", [*PROMPT[:16], 5, 6])], 48, seed=9)
    second.tables[:, :, :4] = first.tables[0, :, :4]
    second.computed = [16, 16]
    outputs = second.generate(4)
    assert outputs[0] == expected[0]
    assert outputs[1] == Stepper(executor, [make_sequence("d", [*PROMPT[:16], 5, 6])], 48, seed=4).generate(4)[0]


def test_rows_that_sample_nothing_do_not_reach_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()

    def never(*_: Any) -> None:
        raise AssertionError("nothing was to be sampled")

    monkeypatch.setattr(executor._sampler, "enqueue", never)
    stepper = Stepper(executor, [make_sequence("a", PROMPT, prompt_logprobs=1), make_sequence("b", PROMPT)], 48)
    stepper.step((16,))
    assert [results[0].token_id for results in stepper.results] == [None, None]


class FakeEvent:
    """CUDA event that tells what is done with it. The device takes 5 ms from one event to the next."""

    told: list[str] = []  # noqa: RUF012

    def __init__(self, **_: bool) -> None: ...

    def record(self, stream: str) -> None:
        self.told.append(f"mark {stream}")

    def synchronize(self) -> None:
        self.told.append("wait")

    def elapsed_time(self, end: Any) -> float:
        return 5.0


@pytest.mark.parametrize("sample", [True, False])
def test_a_step_on_a_gpu_is_over_when_it_is_computed(monkeypatch: pytest.MonkeyPatch, sample: bool) -> None:
    """A step whose rows sample nothing copies nothing to the host, which alone would not wait for the GPU.

    Its time is the device's, and `launch` does not wait.
    """
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    executor = make_executor()
    told: list[str] = []
    monkeypatch.setattr(FakeEvent, "told", told)
    forward = executor._forward

    def compute(*args: Any, **settings: Any) -> torch.Tensor:
        told.append("compute")
        return forward(*args, **settings)

    monkeypatch.setattr(executor, "_forward", compute)
    monkeypatch.setattr(torch_executor, "to_device", lambda array, _: torch.from_numpy(array))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    executor.device = torch.device("cuda", 0)
    row = ScheduledRow(make_sequence("a", PROMPT), 0, 16, np.arange(8, dtype=np.int32)[None], sample=sample)
    launched = executor.launch(StepPlan([row]))
    assert told == ["mark stream of cuda:0", "compute", "mark stream of cuda:0"]
    assert executor.collect(launched).elapsed == 0.005
    assert told[3:] == ["wait"]


class NoWaiting(TorchDispatchMode):
    """Mode in which operations fail whose result a program on a GPU would have to wait for."""

    waits = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_a_launch_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are launched before the first is collected. The second takes its tokens from the first.

    Kernels are left out: those of the CPU read memory at once.
    """
    monkeypatch.setattr(sampler, "sample", lambda logits, parameters: logits.argmax(dim=1))
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"logit_bias": {7: 2.0}, "min_tokens": 4, "stop": [5]},
    ]
    sequences = [make_sequence(str(i), PROMPT[i : 12 + i], **more) for i, more in enumerate(samplings)]
    expected = Stepper(make_executor(), sequences, 20).generate(2)
    sequences = [make_sequence(str(i), PROMPT[i : 12 + i], **more) for i, more in enumerate(samplings)]
    stepper = Stepper(make_executor(), sequences, 20)

    def waits(*_: Any) -> None:
        raise AssertionError("the device's memory was read")

    with NoWaiting(), monkeypatch.context() as patch:
        for name in ("tolist", "item"):
            patch.setattr(torch.Tensor, name, waits)
        launched = [stepper.executor.launch(StepPlan([row for _, row in stepper.rows([1000])]))]
        for index, sequence in enumerate(sequences):
            sequence.num_pending_tokens, stepper.computed[index] = 1, sequence.num_prompt_tokens
        launched.append(stepper.executor.launch(StepPlan([row for _, row in stepper.rows([1])])))
    results = [stepper.executor.collect(step).rows for step in launched]
    assert [[one.token_id, two.token_id] for one, two in zip(*results, strict=True)] == expected
    assert results[0][2].prompt_logprobs
    assert results[1][2].logprob is not None


def test_empty_plan() -> None:
    result = make_executor().execute(StepPlan([], finished=["nobody"]))
    assert result.rows == []
    assert result.elapsed >= 0


def poisoned(tokens: set[int]) -> TorchExecutor:
    """Set the embeddings of these tokens to NaN, so that sequences with one have NaN logits."""
    executor = make_executor(tie_word_embeddings=False)
    with torch.no_grad():
        executor._model._parts.embed.weight[sorted(tokens)] = float("nan")
    return executor


def test_a_sequence_without_numbers_fails_alone() -> None:
    sequences = [
        make_sequence("good", PROMPT[:8]),
        make_sequence("bad", [*PROMPT[:8], 319], temperature=1.0, logprobs=2),
        make_sequence("bad prompt", [319, *PROMPT[:4]], prompt_logprobs=1),
        make_sequence("good too", PROMPT[3:9], temperature=1.0),
    ]
    stepper = Stepper(poisoned({319}), sequences, 16)
    stepper.step((1000,))
    results = [results[0] for results in stepper.results]
    assert [result.error is None for result in results] == [True, False, False, True]
    assert [result.token_id is None for result in results] == [False, True, True, False]


def test_a_failing_forward_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(executor._model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        Stepper(executor, [make_sequence("a", PROMPT)], 48).step((1000,))


def test_padded_ids_of_the_vocabulary_can_be_sampled_and_fed_back() -> None:
    sequence = make_sequence("a", PROMPT, logit_bias={VOCAB_SIZE - 1: 100.0}, temperature=1.0, logprobs=2)
    assert Stepper(make_executor(), [sequence], 48).generate(5) == [[VOCAB_SIZE - 1] * 5]


def test_cache_size() -> None:
    executor = make_executor("qwen3", num_blocks=10, block_size=16)
    assert executor.kv_cache_bytes == 10 * 16 * 3 * 2 * (32 + 32) * 4
    assert executor.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(64, 8, 512), (300, 2, 100), (7, 128, 512), (5, 1, 512)])
def test_warmup_stays_within_the_model_and_the_cache(tokens: int, seqs: int, length: int) -> None:
    executor = make_executor("gpt2", num_blocks=3)
    seen: list[StepPlan] = []
    execute = executor.execute

    def watched(plan: StepPlan) -> Any:
        seen.append(plan)
        return execute(plan)

    executor.execute = watched  # type: ignore[method-assign]
    told: list[tuple[str, int, int]] = []
    assert executor.warmup(tokens, seqs, length, lambda *now: told.append(now)) is None
    prefill, decode, *alone = seen
    stages = (
        f"warming up: prefill of {prefill.num_tokens} tokens",
        f"warming up: decode of {len(decode.rows)} sequences",
        *("warming up: short decode", "warming up: short prefill"),
    )
    assert told == [(stage, done, 1) for stage in stages for done in (0, 1)]
    assert [(step.rows[0].start, step.rows[0].num_tokens) for step in alone] == [(0, 1), (0, 2)]
    assert prefill.num_tokens == min(tokens, seqs * length)
    assert len(decode.rows) == decode.num_tokens == min(tokens, seqs)
    for row in [row for step in seen for row in step.rows]:
        assert row.start + row.num_tokens <= length
        assert row.block_table.max() < 3
    assert Stepper(make_executor("gpt2"), [make_sequence("0", PROMPT)], 48).generate(3)


def test_a_step_copies_no_cache() -> None:
    executor = make_executor(num_blocks=64)
    before = [tensor.data_ptr() for tensor in (*executor._cache.keys, *executor._cache.values)]
    untouched = np.array([60, 61], dtype=np.int32)
    executor._cache.keys[0][untouched] = 7.0
    row = ScheduledRow(make_sequence("a", PROMPT[:8]), 0, 8, np.array([[0, 1]], dtype=np.int32), sample=True)
    executor.execute(StepPlan([row]))
    assert [tensor.data_ptr() for tensor in (*executor._cache.keys, *executor._cache.values)] == before
    assert bool((executor._cache.keys[0][untouched] == 7.0).all())
    assert bool(executor._cache.keys[0][:2].any())


def test_close_releases() -> None:
    executor = make_executor()
    executor.close()
    assert not hasattr(executor, "_cache")
