"""The fit finds the coefficients that made the times, none below zero, and reports its error."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmsched.engine.calibration.fit import KNEES, MeasuredStep, fit, non_negative
from llmsched.engine.calibration.timing import (
    Rows,
    ServingOverhead,
    StepLimits,
    choose_steps,
    describe,
    while_serving,
)
from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.cost import LINEAR, FittedCost, StepShape, shape_of, terms
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams

LIMITS = StepLimits(max_num_batched_tokens=256, max_num_seqs=64, max_model_len=8192, kv_tokens=1 << 18)
COST = FittedCost(
    knee=16.0,
    step=5e-3,
    token=6e-4,
    row=1e-4,
    decode=2e-4,
    decode_kv=1e-7,
    prefill_pair=3e-8,
    prefill_kv=2e-7,
)


def shape(rows: Rows, window: int | None = None) -> StepShape:
    sequence = Sequence("s", [], 0, SamplingParams(), 0, frozenset())
    table = np.zeros(1, dtype=np.int32)
    return shape_of(StepPlan([ScheduledRow(sequence, start, count, table, True) for start, count in rows]), window)


def samples(cost: FittedCost, noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(1)
    found = []
    for rows in choose_steps(LIMITS).values():
        measured = shape(rows, cost.window)
        found.append(MeasuredStep(measured, cost.seconds(measured) * (1 + noise * rng.uniform(-1, 1))))
    return found


def test_the_coefficients_behind_the_times_are_found() -> None:
    found = fit(samples(COST))
    assert found.cost.knee == COST.knee
    assert found.error < 1e-6
    for rows in (((0, 200),), ((700, 1),) * 9, ((3000, 100), (50, 1), (60, 1))):
        assert found.cost.seconds(shape(rows)) == pytest.approx(COST.seconds(shape(rows)), rel=1e-5)


def test_windowed_layers_have_terms_of_their_own() -> None:
    cost = COST._replace(window=128, window_decode_kv=5e-7, window_prefill_pair=4e-8)
    found = fit(samples(cost), window=128)
    assert found.error < 1e-6
    long = shape(((5000, 1),) * 20, 128)
    assert found.cost.seconds(long) == pytest.approx(cost.seconds(long), rel=1e-5)
    assert found.cost.window == 128


def test_noise_shows_in_the_error() -> None:
    quiet, loud = fit(samples(COST, noise=0.02)), fit(samples(COST, noise=0.2))
    assert 0.002 < quiet.error < 0.03 < loud.error < 0.3
    assert len(loud.errors) == len(loud.left_out) == len(samples(COST))
    # A step that is fitted to is never further off, on the whole, than one that is not.
    assert sum(map(abs, loud.errors)) < sum(map(abs, loud.left_out))


def test_no_coefficient_is_negative_whatever_the_times_are() -> None:
    rng = random.Random(2)
    found = fit([MeasuredStep(sample.shape, rng.uniform(1e-3, 1.0)) for sample in samples(COST)])
    assert min(getattr(found.cost, name) for name in LINEAR) >= 0
    assert found.cost.knee in KNEES


def test_the_non_negative_solution_is_the_best_there_is() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        matrix = rng.normal(size=(12, 4))
        found = non_negative(matrix)
        assert found.min() >= 0
        best = float(np.sum((matrix @ found - 1) ** 2))
        for _ in range(200):
            near = np.maximum(0, found + rng.normal(scale=rng.choice([0.01, 0.1, 1.0]), size=4))
            assert np.sum((matrix @ near - 1) ** 2) >= best - 1e-9


def test_columns_of_zeros_and_equal_ones_do_no_harm() -> None:
    one = np.linspace(1, 2, 8)
    found = non_negative(np.stack([one, np.zeros(8), one], axis=1))
    assert found[1] == 0
    assert found[0] + found[2] == pytest.approx(float(one.sum() / (one @ one)))


def test_terms_add_up_to_the_seconds() -> None:
    cost = COST._replace(window=100, window_decode_kv=5e-7, window_prefill_pair=4e-8, window_prefill_kv=1e-7)
    step = shape(((3000, 60), (700, 1), (20, 1)), 100)
    by_name = [getattr(cost, name) for name in LINEAR]
    assert cost.seconds(step) == pytest.approx(
        sum(a * b for a, b in zip(by_name, terms(step, 16.0, True), strict=True))
    )
    assert len(terms(step, 16.0, False)) == 7


def test_a_cost_survives_as_a_mapping() -> None:
    kept = {name: value for name, value in COST._asdict().items() if name != "window"}
    assert FittedCost(**kept) == COST
    with pytest.raises(TypeError, match="per_moon"):
        FittedCost(**kept, per_moon=1.0)


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        StepLimits(2048, 256, 131072, 400_000),
        StepLimits(64, 4, 512, 2048),
        StepLimits(16, 16, 128, 320),
        StepLimits(1, 1, 16, 16),
    ],
)
def test_steps_are_within_the_limits(limits: StepLimits) -> None:
    steps = choose_steps(limits)
    for name, rows in steps.items():
        assert describe(rows) == name
        assert len(rows) <= limits.max_num_seqs
        assert sum(tokens for _, tokens in rows) <= limits.max_num_batched_tokens
        assert max(context + tokens for context, tokens in rows) <= limits.max_model_len
        assert sum(context + tokens for context, tokens in rows) <= limits.kv_tokens


def test_steps_cover_what_an_engine_plans() -> None:
    steps = choose_steps(LIMITS)
    assert 18 <= len(steps) <= 30
    assert any(len(rows) == LIMITS.max_num_seqs for rows in steps.values())
    assert ((0, 256),) in steps.values()
    kinds = {(any(t == 1 for _, t in rows), any(t > 1 for _, t in rows)) for rows in steps.values()}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert "4 decodes of 512 + prefill of 124 after 0" in steps
    assert "4 x prefill of 64 after 0" in steps
    assert "1 decode of 64" in steps


def test_serving_slows_steps_down_and_comes_between_them() -> None:
    found = while_serving(
        COST, [ServingOverhead(1, 1.1e-3, 1.02), ServingOverhead(8, 1.8e-3, 1.1), ServingOverhead(32, 4.2e-3, 1.3)]
    )
    for count in (1, 20):
        step = shape(((100, 1),) * count)
        assert found.seconds(step) == pytest.approx(1.1 * COST.seconds(step) + 1e-3 + 1e-4 * count)
    assert found.knee == COST.knee


def test_serving_never_makes_steps_faster() -> None:
    found = while_serving(COST, [ServingOverhead(1, 1e-3, 0.9), ServingOverhead(8, 1e-3, 0.8)])
    step = shape(((100, 1),) * 4)
    assert found.seconds(step) == pytest.approx(COST.seconds(step) + 1e-3)
