"""Each miss has its reason; prompts that change at the same early token are noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes import make_request, tokens
from kv_driver import KVDriver

from llmsched.engine.kv import misses
from llmsched.engine.kv.misses import AROUND, MIN_AGREEING, MIN_LOST, WINDOW, Miss, MissKind, PromptWatch


def classify(driver: KVDriver, prompt: list[int], salt: str = "") -> Miss:
    request = make_request("probe", prompt, cache_salt=salt)
    return driver.kv.prefix_cache.classify(request, driver.kv.prefix_cache.find(request))


def test_everything_that_could_be_found_was() -> None:
    driver = KVDriver(32)
    driver.serve(tokens(48))
    for length, position in ((48, 47), (49, 48), (33, 32), (10, 9)):
        assert classify(driver, tokens(length)) == Miss(MissKind.HIT, position)
    assert classify(driver, [*tokens(32), 5, 6]) == Miss(MissKind.HIT, 32), "what is new is less than a block"


def test_cold_prompt() -> None:
    driver = KVDriver(32)
    assert classify(driver, tokens(40)) == Miss(MissKind.COLD, 0)
    driver.serve(tokens(32))
    assert classify(driver, tokens(40, seed=1)) == Miss(MissKind.COLD, 0)
    assert classify(driver, tokens(32) + tokens(40, seed=1)) == Miss(MissKind.COLD, 32)


@pytest.mark.parametrize("position", [1, 3, 15, 17, 31, 32, 33, 47])
def test_diverged_at_exactly_this_token(position: int) -> None:
    driver = KVDriver(32)
    driver.serve(tokens(96))
    driver.serve([*tokens(position), 1001, *tokens(95)[position + 1 :]])
    prompt = [*tokens(position), 1002, *tokens(95)[position + 1 :]]
    assert classify(driver, prompt) == Miss(MissKind.DIVERGED, position)


def test_shorter_than_a_block() -> None:
    driver = KVDriver(32)
    driver.serve(tokens(16))
    assert classify(driver, tokens(16, seed=1)) == Miss(MissKind.TOO_SHORT, 0)
    assert classify(driver, tokens(1)) == Miss(MissKind.TOO_SHORT, 1)
    assert classify(driver, tokens(16)) == Miss(MissKind.HIT, 15)


def test_evicted_some_time_ago() -> None:
    driver = KVDriver(6)
    driver.serve(tokens(64))
    driver.kv.expire(100.0)
    driver.serve(tokens(64, seed=1))
    driver.kv.expire(130.0)
    assert classify(driver, tokens(65)) == Miss(MissKind.EVICTED, 32, 30.0)
    driver.serve(tokens(96, seed=2))
    driver.kv.expire(135.0)
    assert classify(driver, tokens(65)) == Miss(MissKind.EVICTED, 0, 5.0)
    assert classify(driver, [1, *tokens(64)]) == Miss(MissKind.COLD, 0)
    assert classify(driver, tokens(65), salt="other") == Miss(MissKind.COLD, 0)


def test_a_bounded_number_of_evicted_nodes_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_GHOSTS", 1)
    driver = KVDriver(1)
    for seed in range(10):
        driver.serve(tokens(16, seed=seed))
    kinds = [classify(driver, tokens(17, seed=seed)).kind for seed in range(10)]
    assert kinds == [MissKind.COLD] * 8 + [MissKind.EVICTED, MissKind.HIT]


def test_known_under_another_salt() -> None:
    driver = KVDriver(32)
    driver.serve(tokens(48), salt="a")
    driver.serve(tokens(48, seed=1), salt="b")
    assert classify(driver, tokens(48), salt="b") == Miss(MissKind.OTHER_SALT, 0)
    assert classify(driver, tokens(48)) == Miss(MissKind.OTHER_SALT, 0)
    assert classify(driver, tokens(48, seed=2), salt="b") == Miss(MissKind.COLD, 0)


def test_still_being_computed() -> None:
    driver = KVDriver(32)
    writer = driver.come(tokens(100))
    driver.step({writer: 40})
    assert classify(driver, tokens(100)) == Miss(MissKind.COMPUTING, 40)
    assert classify(driver, tokens(40) + tokens(60, seed=1)) == Miss(MissKind.COLD, 32)


def test_prompts_with_logprobs_are_counted_as_skipped() -> None:
    driver = KVDriver(32)
    driver.serve(tokens(48))
    request = make_request("probe", tokens(48))
    request.sampling = replace(request.sampling, prompt_logprobs=1)
    assert driver.kv.prefix_cache.classify(request, driver.kv.prefix_cache.find(request)) == Miss(MissKind.SKIPPED, 0)


def test_kinds_are_counted() -> None:
    driver = KVDriver(32)
    classify(driver, tokens(40))
    classify(driver, tokens(40))
    driver.serve(tokens(40))
    classify(driver, tokens(40))
    assert driver.kv.prefix_cache.misses.counts == {MissKind.COLD: 2, MissKind.HIT: 1}


def test_prompts_that_change_are_seen_from_what_the_cache_missed() -> None:
    driver = KVDriver(200)
    for i in range(50):
        prompt = [*tokens(37), 2000 + i, *tokens(300, seed=5)]
        classify(driver, prompt)
        driver.serve(prompt)
    report = driver.kv.prefix_cache.misses.watch.report()
    assert (report.position, report.count) == (37, 49)


REST = tokens(400, seed=3)


def words(seed: int, count: int = 300) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def watching(prompt: Callable[[int], list[int]], diverged_at: int = 40) -> PromptWatch:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add(prompt(i), diverged_at)
    return watch


def timed(i: int) -> list[int]:
    return [*tokens(40), 5000 + i, *REST]


def test_a_time_in_the_system_prompt() -> None:
    report = watching(timed).report()
    assert (report.position, report.count, report.window, report.start) == (40, WINDOW, WINDOW, 40 - AROUND)
    for i, example in zip((0, WINDOW - 1), report.examples, strict=True):
        assert list(example) == [*tokens(40)[-AROUND:], 5000 + i, *REST[: AROUND - 1]]


def test_values_of_different_length_that_begin_with_equal_digits() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        same = i % 4
        watch.add([*tokens(20), *[7] * same, 5000 + i, *words(i, i % 3), *REST], 20 + same)
    report = watch.report()
    assert (report.position, report.count, report.start) == (20, WINDOW, 4)
    assert list(report.examples[1][:17]) == [*tokens(20)[4:], 7]


def test_different_questions_behind_the_same_system_prompt_are_not_reported() -> None:
    assert watching(lambda i: [*tokens(40), *words(i)]).report() is None


def test_half_must_agree() -> None:
    watch = PromptWatch()
    for i in range(WINDOW):
        watch.add(timed(i), 40 if i < MIN_AGREEING - 1 else None)
    assert watch.report() is None
    for i in range(MIN_AGREEING):
        watch.add(timed(1000 + i), 40)
    assert watch.report().count == MIN_AGREEING


def test_late_divergences_and_short_rests_do_not_matter() -> None:
    assert watching(lambda i: [*words(0, 402), 5000 + i, *REST], 402).report() is None
    assert watching(lambda i: [*tokens(10), 5000 + i, *REST[: MIN_LOST - 2]], 10).report() is None


def test_a_different_prompt_in_between_hides_nothing() -> None:
    report = watching(lambda i: [*tokens(40), *words(i)] if i % 5 == 0 else timed(i)).report()
    assert report.count == WINDOW * 4 // 5
    assert all(example[-1] == REST[AROUND - 2] for example in report.examples)


def test_old_requests_are_forgotten() -> None:
    watch = watching(timed)
    for _ in range(MIN_AGREEING):
        assert watch.report() is not None
        watch.add(REST, None)
    watch.add(REST, None)
    assert watch.report() is None
