"""Sampler against plain formulas for one row."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmsched.engine.executor import sampler
from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.penalties import LogitEditor
from llmsched.engine.executor.rng import keys
from llmsched.engine.executor.sampler import Sampler
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels.reference import race

VOCAB = 500


def make_sequence(
    prompt: list[int],
    output: list[int] | None = None,
    *,
    name: str = "a",
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    **sampling: object,
) -> Sequence:
    tokens = prompt + (output or [])
    return Sequence(name, tokens, len(prompt), SamplingParams(**{"max_tokens": 100, **sampling}), seed, stop)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[RowResult]:
    return Sampler().enqueue(logits, sequences).collect()


def edited(logits: list[float], sequence: Sequence) -> list[float]:
    """Return the logits after bias, min_tokens and penalties by the formulas."""
    sampling, counts = sequence.sampling, Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    result = list(logits)
    for token, bias in sampling.logit_bias.items():
        result[token] += bias
    if sequence.num_output_tokens < sampling.min_tokens:
        for token in sequence.stop_ids:
            result[token] = -math.inf
    for token in set(sequence.token_ids):
        penalty = sampling.repetition_penalty
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token, count in counts.items():
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return result


def edit(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    result = logits.clone()
    LogitEditor().edit(result, sequences)
    return result


def test_repetition_penalty_form() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    sequence = make_sequence([0, 1, 0], [0], repetition_penalty=2.0)
    assert edit(logits, [sequence]).tolist() == [[1.0, -4.0, 1.0]]


def test_presence_and_frequency_count_output_only() -> None:
    logits = torch.zeros(1, 4)
    sequence = make_sequence([0, 1, 1], [1, 2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert edit(logits, [sequence]).tolist() == [[0.0, -0.75, -1.25, 0.0]]


def test_edits_equal_the_formulas() -> None:
    sequences = [
        make_sequence([1, 2, 3], [3, 3, 9], repetition_penalty=1.7, presence_penalty=-1.0, frequency_penalty=2.0),
        make_sequence([5], [], name="b"),
        make_sequence([5, 6], [6], name="c", logit_bias={6: 3.5, 499: -100.0}, repetition_penalty=0.5),
        make_sequence([5, 6], [8], name="d", min_tokens=2, stop=frozenset({0, 7, 499})),
        make_sequence([5, 6], [8, 8], name="e", min_tokens=2, stop=frozenset({0, 7}), frequency_penalty=-2.0),
        make_sequence(
            [5], [8], name="f", min_tokens=9, stop=frozenset({5, 8}), logit_bias={5: 9}, repetition_penalty=2
        ),
    ]
    logits = random_logits(len(sequences))
    expected = [edited(row, sequence) for row, sequence in zip(logits.tolist(), sequences, strict=True)]
    torch.testing.assert_close(edit(logits, sequences), torch.tensor(expected), rtol=0, atol=1e-5)


def test_stop_ids_beyond_the_vocabulary_are_no_trouble() -> None:
    sequence = make_sequence([1], min_tokens=5, temperature=0, stop=frozenset({VOCAB, 10**9, -3, 7}))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5, 4
    assert sample(logits, [sequence])[0].token_id == 8


def test_min_tokens_counts_output_only() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 100.0
    logits[:, 3] = 1.0
    stop = frozenset({7})
    short = make_sequence(list(range(32)), [1] * 15, min_tokens=16, temperature=0, stop=stop)
    enough = make_sequence(list(range(32)), [1] * 16, name="b", min_tokens=16, temperature=0, stop=stop)
    assert [result.token_id for result in sample(logits, [short, enough])] == [3, 7]


def test_last_id_of_the_vocabulary_is_as_free_as_any() -> None:
    sequence = make_sequence([1], min_tokens=5, logit_bias={VOCAB - 1: 100.0}, logprobs=2)
    assert sample(torch.zeros(1, VOCAB), [sequence])[0].token_id == VOCAB - 1


def test_greedy_takes_the_best_of_the_edited_logits() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 9]] = torch.tensor([3.0, 2.5])
    sampling = {"temperature": 0, "top_p": 0.1, "top_k": 3, "min_p": 0.5, "frequency_penalty": 1.0}
    assert sample(logits.clone(), [make_sequence([4], [], **sampling)])[0].token_id == 4
    assert sample(logits.clone(), [make_sequence([4], [4], **sampling)])[0].token_id == 9


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "top_p": 0},
        {"temperature": 1, "top_p": 0},
        {"temperature": 2, "top_p": 1e-9},
        {"temperature": 2, "min_p": 1},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1e-30},
        {"temperature": 1e-4},
        {"temperature": 0, "min_p": 0, "top_p": 1.0},
    ],
    ids=str,
)
def test_best_token_alone_survives(sampling: dict[str, float]) -> None:
    sequences = [make_sequence([1], name=str(row), seed=row, **sampling) for row in range(64)]
    logits = random_logits(1).expand(64, -1)
    best = int(logits[0].argmax())
    assert [result.token_id for result in sample(logits.clone(), sequences)] == [best] * 64


def test_draw_is_the_race_under_the_key_of_seed_and_position() -> None:
    generator = torch.Generator().manual_seed(9)
    sequences = [
        make_sequence([1, 2], [3] * (row % 5), name=str(row), seed=row * 77 - 9, temperature=0.5 + row / 20)
        for row in range(30)
    ]
    logits = torch.randn(30, VOCAB, generator=generator)
    results = sample(logits.clone(), sequences)
    for row, (sequence, result) in enumerate(zip(sequences, results, strict=True)):
        weights = torch.zeros(1, 512)
        weights[0, :VOCAB] = torch.softmax(logits[row].double() / sequence.sampling.temperature, 0)
        key = torch.tensor(keys([sequence.seed], [row % 5]).astype("int64")).T
        assert [result.token_id] == race(weights, key).tolist()


SAMPLINGS = [
    {"temperature": 0.9},
    {"temperature": 0},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 2.0},
    {"temperature": 0.7, "min_p": 0.2, "presence_penalty": -1.0, "logit_bias": {3: 4.0}},
    {"temperature": 1.2, "min_tokens": 50, "logprobs": 3},
]


def test_row_does_not_depend_on_its_neighbours() -> None:
    rows = [
        make_sequence([1, 2, 3], [4, 5], name=str(row), seed=11, stop=frozenset({4}), **sampling)
        for row, sampling in enumerate(SAMPLINGS)
    ]
    logits = random_logits(len(rows), seed=2)
    together = sample(logits.clone(), rows)
    reverse = sample(logits.flip(0), rows[::-1])
    alone = [sample(logits[row : row + 1].clone(), rows[row : row + 1])[0] for row in range(len(rows))]
    assert [result.token_id for result in together] == [result.token_id for result in alone]
    assert together == reverse[::-1]
    assert together == alone


def extend(sampler: Sampler, sequence: Sequence, steps: int) -> list[int]:
    """Sample from logits that change only every third token, so that penalties show."""
    for _ in range(steps):
        logits = random_logits(1, seed=sequence.num_output_tokens // 3)
        result = sampler.enqueue(logits, [sequence]).collect()[0]
        assert result.token_id is not None
        sequence.token_ids.append(result.token_id)
    return sequence.token_ids


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "frequency_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "presence_penalty": 1.0, "top_p": 0.9},
        {"temperature": 0, "min_tokens": 40, "logit_bias": {7: 30.0}},
    ],
    ids=str,
)
def test_what_is_kept_between_steps_changes_nothing(sampling: dict[str, object], forgets: bool) -> None:
    whole = make_sequence([1, 2, 3], stop=frozenset({7}), seed=5, **sampling)
    extend(Sampler(), whole, 60)
    again = make_sequence([1, 2, 3], stop=frozenset({7}), seed=5, **sampling)
    sampler = Sampler()
    for _ in range(6):
        if forgets:
            sampler.forget([again.request_id])
        extend(sampler, again, 10)
    assert again.token_ids == whole.token_ids
    assert len(set(again.token_ids[3:])) > 1


def test_a_new_sequence_of_the_same_name_starts_afresh() -> None:
    sampler = Sampler()
    sampling = {"temperature": 0, "frequency_penalty": 2.0}
    extend(sampler, make_sequence([1], **sampling), 20)
    fresh = extend(sampler, make_sequence([1], **sampling), 20)
    assert fresh == extend(Sampler(), make_sequence([1], **sampling), 20)


def test_seeds_give_different_choices_and_repeat() -> None:
    logits = random_logits(1).expand(8, -1)

    def choices(first_seed: int) -> list[int | None]:
        rows = [make_sequence([1], name=str(i), seed=first_seed + i, temperature=2.0) for i in range(8)]
        return [result.token_id for result in sample(logits.clone(), rows)]

    assert len(set(choices(0))) > 3
    assert choices(0) == choices(0) != choices(1000)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(3)
    sequences = [
        make_sequence([1], name="a", temperature=0.2, logprobs=4, logit_bias={8: 50.0}, top_k=3),
        make_sequence([1], name="b", temperature=0),
        make_sequence([1], name="c", temperature=0, logprobs=0, repetition_penalty=9.0),
    ]
    results = sample(logits.clone(), sequences)
    raw = torch.log_softmax(logits.double(), 1)
    assert results[0].token_id == 8
    assert results[1].logprob is None
    for row in (0, 2):
        found = results[row].logprob
        assert found is not None
        assert found.token_id == results[row].token_id
        assert found.logprob == pytest.approx(float(raw[row, found.token_id]), abs=1e-5)
    best = raw[0].topk(4)
    top = results[0].logprob.top
    assert [token for token, _ in top] == best.indices.tolist()
    assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert results[2].logprob.top == ()


def test_a_row_without_usable_logits_fails_alone() -> None:
    logits = random_logits(5)
    best = logits.argmax(1).tolist()
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 100] = float("nan")
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}):
        rows = [make_sequence([1], name=str(row), **sampling) for row in range(5)]
        results = sample(logits.clone(), rows)
        assert [result.error is not None for result in results] == [False, True, True, True, False]
        assert [result.token_id is None for result in results] == [False, True, True, True, False]
        assert all("logits" in result.error for result in results[1:4])
    assert [results.token_id for results in sample(logits, [make_sequence([1], temperature=0)] * 5)][::4] == [
        best[0],
        best[4],
    ]


def test_min_tokens_that_bars_everything_is_an_error_of_the_row() -> None:
    sequence = make_sequence([1], min_tokens=2, stop=frozenset(range(VOCAB)))
    result = sample(random_logits(1), [sequence])[0]
    assert result.token_id is None
    assert "min_tokens" in (result.error or "")


def test_bfloat16_logits() -> None:
    logits = random_logits(2).bfloat16()
    rows = [make_sequence([1], name=str(seed), seed=seed, top_p=0.5) for seed in range(2)]
    assert sample(logits, rows) == sample(logits.float(), rows)


class WithoutWaiting(TorchDispatchMode):
    """Mode that fails for operations for which the host would wait for a GPU."""

    WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.name() not in self.WAITING
        if "index" in function.name() and len(args) > 1 and isinstance(args[1], list):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), function.name()
        return function(*args, **(kwargs or {}))


def test_enqueue_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself is left out; on a GPU it is one launch."""
    monkeypatch.setattr(sampler, "sample", lambda logits, parameters: logits.argmax(dim=1))
    rows = [
        make_sequence([1, 2, 3], [4, 5], name=str(row), stop=frozenset({4}), **sampling)
        for row, sampling in enumerate([*SAMPLINGS, {"logprobs": 2, "repetition_penalty": 2.0, "logit_bias": {1: 3.0}}])
    ]
    for some in (rows[:2], rows):
        logits = random_logits(len(some))
        with WithoutWaiting():
            pending = Sampler(rows_at_once=3).enqueue(logits, some)
        assert pending.token_ids.tolist() == [result.token_id for result in pending.collect()]
