"""Warnings about prompts that change at one early token: log, metric and API."""

from __future__ import annotations

import logging

import pytest
from engines import generate, make_engine, sampling, tokenizer

from llmsched.engine.core import Engine
from llmsched.engine.kv.misses import WINDOW
from llmsched.engine.prompt_changes import CHECK_EVERY

SYSTEM = "You are a helpful assistant. The time is "
REST = " Answer the question of the user in plain words, be short, and say so when you do not know the answer. " * 2


def ask(engine: Engine, count: int, *, cache_salt: str = "") -> None:
    """Serve `count` requests whose prompts differ in one token, as a time would."""
    before, behind = tokenizer().encode(SYSTEM), tokenizer().encode(REST)
    for number in range(count):
        engine.add_request(
            f"r{number}", [*before, 150 + number, *behind], sampling(max_tokens=1), priority=0, cache_salt=cache_salt
        )
        while engine.has_work():
            engine.step()


def gauge(engine: Engine, name: str) -> list[float]:
    """Return the values of the metrics whose lines begin with `name`."""
    lines = engine.metrics.render().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"llmsched:{name}")]


@pytest.mark.parametrize("quotes", [False, True])
def test_a_time_in_the_system_prompt_is_logged_once_with_the_text_around_it_on_request(
    caplog: pytest.LogCaptureFixture, quotes: bool
) -> None:
    engine = make_engine()
    engine.prefixes.changes.quote_prompts = quotes
    with caplog.at_level(logging.WARNING, logger="llmsched"):
        ask(engine, 2 * WINDOW)
    (line,) = [record.getMessage() for record in caplog.records]
    position = len(tokenizer().encode(SYSTEM))
    assert line.startswith(f"prompts change at token {position}: ")
    change = engine.prefixes.changes.check()
    assert change is not None
    assert (change.position, change.window, change.private) == (position, WINDOW, False)
    assert change.count >= WINDOW - 1
    assert ("Answer" in line) == quotes == (change.examples is not None)
    for example in change.examples or ():
        assert SYSTEM.endswith(example.before)
        assert len(example.before) > 8
        assert " Answer" in example.after
    if change.examples is not None:
        assert change.examples[0].after != change.examples[1].after
    assert gauge(engine, "prefix_cache_changing_prompts{") == [change.count / WINDOW]


def test_only_a_new_position_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    with caplog.at_level(logging.WARNING, logger="llmsched"):
        ask(engine, CHECK_EVERY + 5)
        assert caplog.records == [], "too few had come when it looked"
        for _ in range(3):
            assert engine.prefixes.changes.check() is not None
    assert len(caplog.records) == 1


def test_equal_prompts_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    with caplog.at_level(logging.WARNING, logger="llmsched"):
        for _ in range(WINDOW):
            generate(engine, (tokenizer().encode(SYSTEM + REST), sampling(max_tokens=1)))
    assert engine.prefixes.changes.check() is None
    assert caplog.records == []


def test_misses_are_counted_by_kind() -> None:
    engine = make_engine()
    ask(engine, 2)
    stats = {kind.name: count for kind, count in engine.stats().prefix_misses.items() if count}
    assert stats == {"COLD": 1, "DIVERGED": 1}
    assert gauge(engine, 'prefix_cache_misses_total{engine="0",kind="diverged"') == [1]
    assert sum(gauge(engine, "prefix_cache_misses_total{")) == 2
    assert gauge(engine, 'prefix_cache_misses_total{engine="0",kind="hit"') == []
