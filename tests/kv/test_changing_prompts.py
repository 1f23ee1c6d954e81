"""Prompts that change at the same early token are noticed; people who say different things are not."""

from __future__ import annotations

import random

from fakes import tokens

from llmsched.engine.kv.changing_prompts import AROUND, MIN_AGREEING, MIN_LOST, WINDOW, PromptWatch

REST = tokens(400, seed=3)


def words(seed: int, count: int = 300) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def test_a_time_in_the_system_prompt() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*tokens(40), 5000 + i, *REST], 40)
    report = watch.report()
    assert report is not None
    assert (report.position, report.count, report.window, report.start) == (40, WINDOW, WINDOW, 40 - AROUND)
    for i, example in zip((0, WINDOW - 1), report.examples, strict=True):
        assert list(example) == [*tokens(40)[-AROUND:], 5000 + i, *REST[: AROUND - 1]]


def test_values_of_different_length_that_begin_with_equal_digits() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        same = i % 4
        watch.add([*tokens(20), *[7] * same, 5000 + i, *words(i, i % 3), *REST], 20 + same)
    report = watch.report()
    assert report is not None
    assert (report.position, report.count, report.start) == (20, WINDOW, 4)
    assert list(report.examples[1][:17]) == [*tokens(20)[4:], 7]


def test_different_questions_behind_the_same_system_prompt_are_none_of_it() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*tokens(40), *words(i)], 40)
    assert watch.report() is None


def test_half_must_agree() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*tokens(40), 5000 + i, *REST], 40 if i < MIN_AGREEING - 1 else None)
    assert watch.report() is None
    for i in range(MIN_AGREEING):
        watch.add([*tokens(40), 6000 + i, *REST], 40)
    report = watch.report()
    assert report is not None
    assert report.count == MIN_AGREEING


def test_late_divergences_and_short_rests_do_not_matter() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*words(0, 402), 5000 + i, *REST], 402)
    assert watch.report() is None
    for i in range(WINDOW):
        watch.add([*tokens(10), 5000 + i, *REST[: MIN_LOST - 2]], 10)
    assert watch.report() is None


def test_a_stranger_among_them_does_not_hide_the_others() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*tokens(40), *words(i)] if i % 5 == 0 else [*tokens(40), 5000 + i, *REST], 40)
    report = watch.report()
    assert report is not None
    assert report.count == WINDOW * 4 // 5
    assert all(example[-1] == REST[AROUND - 2] for example in report.examples)


def test_old_requests_are_forgotten() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add([*tokens(40), 5000 + i, *REST], 40)
    for _ in range(MIN_AGREEING):
        assert watch.report() is not None
        watch.add(REST, None)
    watch.add(REST, None)
    assert watch.report() is None
