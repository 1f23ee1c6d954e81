"""Ranking of settings on a machine whose speed drifts."""

from __future__ import annotations

import math
import random

import pytest
from simulated_machine import made_run

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.noise_ranking import NOISE_CEILING, NOISE_FLOOR, Ranking
from llmsched.cli.tune.trial_runs import TrialRun

A, B, C = (Setting(tokens, 8) for tokens in (32, 64, 128))


def rate(run: TrialRun) -> float | None:
    return run.tokens_per_s


def test_the_effect_of_a_round_is_removed() -> None:
    """The machine is half as fast in the round without B; plain means would put A behind."""
    runs = [made_run(A, 10, 0, 100.0), made_run(B, 10, 0, 90.0), made_run(A, 10, 1, 50.0), made_run(C, 10, 1, 49.0)]
    table = Ranking(runs, rate)
    assert table.share(B, A) == pytest.approx(0.9)
    assert table.share(C, A) == pytest.approx(0.98)
    assert table.ranked([B, C, A]) == [A, C, B]


def test_long_runs_count_more_than_short_ones() -> None:
    """90 requests favour B by 1 %, 10 requests favour A by 9 %."""
    runs = [made_run(A, 90, 0, 100.0), made_run(B, 90, 0, 101.0), made_run(A, 10, 1, 100.0), made_run(B, 10, 1, 91.0)]
    expected = (0.9 * math.log(1.01) + 0.1 * math.log(0.91)) / 1.0
    assert math.log(Ranking(runs, rate).share(B, A)) == pytest.approx(expected)


def test_preference_decides_between_equal_settings_only() -> None:
    runs = [made_run(s, 10, n, value) for n in range(3) for s, value in ((A, 100.0), (B, 101.5), (C, 110.0))]
    table = Ranking(runs, rate)
    assert table.noise(A, B) == NOISE_FLOOR
    assert table.best([A, B]) == A
    assert table.best([B, A]) == B
    assert table.best([A, B, C]) == C


def test_without_repeats_nothing_is_settled() -> None:
    table = Ranking([made_run(A, 10, 0, 100.0), made_run(B, 10, 0, 50.0)], rate)
    assert not table.settled([A, B])
    assert table.noise(A, B) == NOISE_CEILING
    assert table.settled([A])


def test_only_repeats_that_agree_settle_the_ranking() -> None:
    agree = [made_run(s, 10, n, v) for n in range(3) for s, v in ((A, 100.0), (B, 80.0))]
    assert Ranking(agree, rate).settled([A, B])
    differ = [made_run(s, 10, n, v) for n, b in enumerate((80.0, 130.0, 95.0)) for s, v in ((A, 100.0), (B, b))]
    assert not Ranking(differ, rate).settled([A, B])


def test_repeats_settle_a_tie() -> None:
    """It suffices that no setting can be far ahead of the chosen one."""
    runs = [made_run(s, 10, n, v) for n in range(4) for s, v in ((A, 100.0), (B, 100.5))]
    assert Ranking(runs, rate).settled([A, B])


def test_a_score_of_zero_is_last_and_leaves_the_others_alone() -> None:
    table = Ranking(
        [made_run(A, 10, 0, 100.0), made_run(B, 10, 0, 1.0, tokens_per_s=0.0), made_run(C, 10, 0, 90.0)], rate
    )
    assert table.ranked([B, C, A]) == [A, C, B]
    assert table.share(B, A) == 0.0
    assert Ranking([], rate).best([B, A]) == B


def test_settled_is_seldom_wrong() -> None:
    """The chosen setting is 6 % behind: the ranking settles on it on few of many noisy machines."""
    wrong = 0
    for seed in range(300):
        dice = random.Random(seed)
        runs = [
            made_run(s, 10, n, value * math.exp(dice.gauss(0, 0.03)))
            for n in range(3)
            for s, value in ((A, 94.0), (B, 100.0), (C, 80.0))
        ]
        table = Ranking(runs, rate)
        wrong += table.settled([A, B, C]) and table.best([A, B, C]) == A
    assert wrong <= 6
