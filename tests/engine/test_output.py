"""Output of sampled tokens: stop strings, recorded latencies, and errors that end only one request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from configs import resolved
from engines import EOS, assert_idle, generate, make_engine, prompt, sampling, tokenizer
from exposition import samples
from scripted import Script, ScriptedExecutor
from tiny_models import VOCAB_SIZE

from llmsched.engine.core import Engine
from llmsched.engine.executor.simulated_executor import VirtualClock
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.request import FinishReason

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def scripted(clock: Callable[[], float] | None = None) -> Engine:
    """Return an engine whose model writes the alphabet, one letter per token."""
    letters = [tokenizer().encode(letter, add_special_tokens=False)[0] for letter in ALPHABET]
    config = resolved(max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4)
    info = ModelInfo("scripted", "llama", VOCAB_SIZE, 512, frozenset({EOS}))
    executor = ScriptedExecutor(Script(letters))
    return Engine(config, info, tokenizer(), executor, make_kv(config, 64), clock=clock or VirtualClock())


# -- stop strings and min_tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        ("c", 0, "ab"),
        ("c", 2, "ab"),  # two are there: the third may be the end
        ("c", 3, ALPHABET + "ab"),  # the third may not, so it stays in the text
        ("bc", 1, "a"),
        ("bc", 2, ALPHABET + "a"),  # what came before min_tokens is no part of a stop string
        ("zz", 30, ALPHABET + "abcdefghijklmn"),
    ],
)
def test_stop_strings_count_only_after_min_tokens(stop: str, min_tokens: int, text: str) -> None:
    params = sampling(stop=(stop,), min_tokens=min_tokens, max_tokens=40)
    (choice,) = generate(scripted(), (prompt(5), params))
    assert choice.text == text
    assert choice.finish_reason is (FinishReason.LENGTH if stop == "zz" else FinishReason.STOP)


@pytest.mark.parametrize("min_tokens", [3, 4])
def test_a_stop_string_is_ignored_if_min_tokens_equals_max_tokens(min_tokens: int) -> None:
    params = sampling(stop=(ALPHABET[min_tokens - 1],), min_tokens=min_tokens, max_tokens=min_tokens)
    (choice,) = generate(scripted(), (prompt(5), params))
    assert (choice.text, choice.finish_reason) == (ALPHABET[:min_tokens], FinishReason.LENGTH)


# -- what is booked -------------------------------------------------------------------------------------------


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    engine = scripted()
    engine.add_request("a", prompt(9), sampling(n=3, max_tokens=2))
    engine.add_request("b", prompt(5, 1), sampling(max_tokens=2))
    while engine.has_work():
        engine.step()
    found = samples(engine.metrics)
    assert found["llmsched:request_prompt_tokens_count"] == 2
    assert found["llmsched:request_prompt_tokens_sum"] == 14
    assert found["llmsched:prompt_tokens_total"] == 14
    assert found["llmsched:request_generation_tokens_count"] == 4


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_times_count_from_arrival(max_tokens: int) -> None:
    """The request arrives at 1 s, is scheduled at 5 s, and its first step ends at 7 s; each further step takes 2 s."""
    clock = VirtualClock()
    engine = scripted(clock)
    clock.now = 5.0
    engine.add_request("a", prompt(9), sampling(max_tokens=max_tokens), arrival_time=1.0)
    execute = engine.executor.execute

    def slow(plan):  # type: ignore[no-untyped-def]
        clock.now += 2.0
        return execute(plan)

    engine.executor.execute = slow  # type: ignore[method-assign]
    while engine.has_work():
        engine.step()
    found = samples(engine.metrics)
    tokens = min(1, max_tokens)
    assert found["llmsched:request_queue_time_seconds_count"] == 1
    assert found["llmsched:request_queue_time_seconds_sum"] == 4
    assert found["llmsched:time_to_first_token_seconds_count"] == tokens
    assert found["llmsched:time_to_first_token_seconds_sum"] == 6 * tokens
    assert found["llmsched:e2e_request_latency_seconds_sum"] == 6 + 2 * max(0, max_tokens - 1)


def test_a_request_that_was_never_scheduled_has_no_queue_time() -> None:
    engine = scripted()
    engine.add_request("a", prompt(9), sampling())
    engine.abort("a")
    assert samples(engine.metrics)["llmsched:request_queue_time_seconds_count"] == 0


# -- faults ---------------------------------------------------------------------------------------------------


def test_an_error_in_the_text_of_one_output_ends_only_that_output(caplog: pytest.LogCaptureFixture) -> None:
    alone = generate(make_engine(), (prompt(9), sampling()))[0]
    engine = make_engine()
    engine.add_request("good", prompt(9), sampling())
    engine.add_request("bad", prompt(9, 1), sampling(n=2))

    def fail(token_id: int) -> str:
        raise ValueError("not a text")

    engine.step()
    engine._streams["bad/1"]._detokenizer.push = fail  # type: ignore[method-assign]
    outputs = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    (last,) = [output for output in outputs if (output.request_id, output.index) == ("bad", 1)]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "its output failed with ValueError; the log has more"
    assert [o.finish_reason for o in outputs if o.finished and o is not last] == [FinishReason.LENGTH] * 2
    assert [t for o in outputs if o.request_id == "good" for t in o.token_ids] == alone.tokens[1:]
    assert "request bad, choice 1" in caplog.text
    assert "not a text" in caplog.text
    assert engine.stats().finished[FinishReason.ERROR] == 1
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_an_error_in_the_last_text_is_reported(caching: bool) -> None:
    engine = make_engine(enable_prefix_caching=caching)
    engine.add_request("bad", prompt(9), sampling(max_tokens=1))

    def fail() -> str:
        raise ValueError("not a text")

    engine._streams["bad/0"]._detokenizer.flush = fail  # type: ignore[method-assign]
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    assert_idle(engine)
