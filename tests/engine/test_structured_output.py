"""Requests with grammars in the real engine, together with everything else that a request can ask for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from alike import ENGINES, PROMPTS, assert_same, launches_of
from engines import (
    EOS,
    SMALL_POOL,
    SWAP,
    Choice,
    Collector,
    assert_idle,
    generate_all,
    make_engine,
    sampling,
    tokenizer,
)
from llguidance import LLParserLimits
from tiny_models import VOCAB_SIZE

from llmsched.engine.core import Engine
from llmsched.engine.executor import torch_executor
from llmsched.engine.grammar import compiler
from llmsched.engine.grammar.compiler import Grammar
from llmsched.engine.grammar.spec import JSON_OBJECT, GrammarSpec
from llmsched.engine.request import FinishReason
from llmsched.engine.sampling_params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@cache
def grammar(spec: GrammarSpec) -> Grammar:
    """Return a grammar that all engines can use, because they have the same vocabulary."""
    return make_engine().grammars.compile(spec, "test")


@cache
def blanks() -> dict[int, float]:
    """Return biases that forbid tokens of blanks, on which a random model spends most of a JSON text."""
    return {i: -100.0 for i in range(VOCAB_SIZE) if (text := tokenizer().token_bytes(i)) and not text.strip()}


def constrained(spec: GrammarSpec, **fields: Any) -> SamplingParams:
    return sampling(**{"ignore_eos": False, "max_tokens": 58, "grammar": grammar(spec), **fields})


@cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return requests with grammars, with all that a result can have, and two without."""
    schema, digits = GrammarSpec.json_schema(SCHEMA), GrammarSpec("regex", "[0-9]+( [0-9]+)*")
    wanted = [
        constrained(schema, temperature=1.0, seed=1, n=3, logit_bias=blanks()),
        constrained(schema, temperature=0.8, seed=2, top_p=0.9, min_p=0.01, logprobs=2, logit_bias=blanks()),
        constrained(digits, temperature=1.0, seed=3, min_tokens=20, max_tokens=40),
        constrained(digits, temperature=1.0, seed=4, stop=(" 1",)),
        constrained(schema, temperature=1.2, seed=5, repetition_penalty=1.2, frequency_penalty=0.5, top_k=40),
        constrained(digits, logit_bias={ids("7")[0]: 3.0}, max_tokens=24, ignore_eos=True),
        sampling(temperature=1.0, seed=7, max_tokens=72),
        constrained(GrammarSpec.choice(["yes", "no", "maybe"]), prompt_logprobs=1),
    ]
    return list(zip(PROMPTS, wanted, strict=True))


@cache
def expected(arch: str = "llama") -> list[list[Choice]]:
    return generate_all(make_engine(arch), *requests())


def test_outputs_match_their_grammars() -> None:
    objects, logged, long, stopped, penalised, endless, free, choice = expected()
    for each in (*objects, *logged, *penalised):
        if each.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(each.text), SCHEMA)
        else:
            assert each.finish_reason is FinishReason.LENGTH
    assert sum(each.finish_reason is FinishReason.STOP for each in (*objects, *logged, *penalised)) >= 2
    assert len({each.text for each in objects}) == 3
    assert len(long[0].tokens) >= 20
    assert re.fullmatch("[0-9]+( [0-9]*)*", long[0].text)
    assert re.fullmatch("[0-9]+( [0-9]*)*", stopped[0].text)
    assert " 1" not in stopped[0].text
    assert (endless[0].finish_reason, len(endless[0].tokens)) == (FinishReason.LENGTH, 24)
    assert "7" in endless[0].text
    assert len(free[0].tokens) == 72
    assert (choice[0].finish_reason, choice[0].error) == (FinishReason.STOP, None)
    assert choice[0].text in ("yes", "no", "maybe")


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "windows"])
def test_outputs_depend_on_nothing_else(name: str, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on chunks, preemption, batch mates, parts of steps or a step in flight."""
    arch, settings = ENGINES[name]
    if name == "steps in parts":
        monkeypatch.setattr(torch_executor, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    if name == "swap":
        settings = settings | {"num_blocks": 14}
    engine = make_engine(arch, looks_ahead=looks_ahead, graphs=looks_ahead, **settings)
    launched = launches_of(engine)
    assert_same(generate_all(engine, *requests()), expected(arch))
    stats = engine.stats()
    assert (stats.num_preemptions > 0) is ("num_blocks" in settings)
    assert (stats.num_swapped_in > 0) is (name == "swap")
    assert (sum(launched) > 0) is looks_ahead, "rows without a grammar are launched ahead when they are alone"


def test_alone_and_after_a_prefix_hit() -> None:
    engine = make_engine()
    for (token_ids, params), together in zip(requests(), expected(), strict=True):
        for _ in range(2):
            assert_same(generate_all(engine, (token_ids, params)), [together])


def test_a_grammar_alone_never_launches_ahead_of_its_tokens() -> None:
    engine = make_engine(looks_ahead=True)
    launched = launches_of(engine)
    params = replace(requests()[0][1], n=1)
    assert_same(generate_all(engine, (PROMPTS[0], params)), [expected()[0][:1]])
    assert sum(launched) == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    params = constrained(GrammarSpec.choice(["the end"]), logprobs=3)
    (choice,) = generate_all(make_engine(), (PROMPTS[0], params))[0]
    (free,) = generate_all(make_engine(), (PROMPTS[0], sampling(max_tokens=1, logprobs=3)))[0]
    assert choice.text == "the end"
    assert dict(choice.logprobs[0].top) == pytest.approx(dict(free.logprobs[0].top), abs=1e-4)
    assert choice.logprobs[0].token_id == choice.tokens[0] != free.tokens[0]
    assert choice.logprobs[0].logprob < free.logprobs[0].logprob


def one(engine: Engine | None = None, **fields: Any) -> Choice:
    spec = fields.pop("spec")
    return generate_all(engine or make_engine(), (PROMPTS[0], constrained(spec, **fields)))[0][0]


def test_an_output_ends_with_its_grammar() -> None:
    """No end-of-sequence token is needed, and ignore_eos does not prolong the output."""
    for ignore_eos in (False, True):
        choice = one(spec=GrammarSpec("regex", "a{3}"), ignore_eos=ignore_eos)
        assert (choice.text, choice.finish_reason) == ("aaa", FinishReason.STOP)
        assert EOS not in choice.tokens


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_output_may_be_empty(ignore_eos: bool) -> None:
    choice = one(spec=GrammarSpec.choice([""]), ignore_eos=ignore_eos)
    assert (choice.text, choice.tokens, choice.finish_reason) == ("", [EOS], FinishReason.STOP)


def test_ignore_eos_forbids_the_end_while_the_grammar_can_go_on() -> None:
    spec = GrammarSpec("regex", "[ab]*")
    bias = {EOS: 100.0}
    ended = one(spec=spec, logit_bias=bias)
    assert (ended.text, ended.tokens, ended.finish_reason) == ("", [EOS], FinishReason.STOP)
    longest = one(spec=spec, logit_bias=bias, ignore_eos=True, max_tokens=9)
    assert (len(longest.tokens), longest.finish_reason) == (9, FinishReason.LENGTH)
    later = one(spec=spec, logit_bias=bias, min_tokens=5)
    assert (later.tokens[5:], later.finish_reason) == ([EOS], FinishReason.STOP)


def test_max_tokens_cuts_the_output() -> None:
    cut = one(spec=GrammarSpec("regex", "a{300}"), max_tokens=4)
    assert (cut.finish_reason, cut.text) == (FinishReason.LENGTH, "a" * len(cut.text))
    exact = one(spec=GrammarSpec("regex", "a{3}"), max_tokens=len(one(spec=GrammarSpec("regex", "a{3}")).tokens))
    assert (exact.text, exact.finish_reason) == ("aaa", FinishReason.STOP)


def test_a_stop_string_and_a_stop_token_end_the_output() -> None:
    spec = GrammarSpec("regex", "[ab]*,[ab]*,")
    bias = {ids(",")[0]: 50.0}
    assert (found := one(spec=spec, logit_bias=bias, stop=(",",))).finish_reason is FinishReason.STOP
    assert found.text == ""
    by_id = one(spec=spec, logit_bias=bias, stop_token_ids=(ids(",")[0],))
    assert (by_id.text, by_id.finish_reason) == ("", FinishReason.STOP)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_delays_the_end_only_while_the_grammar_can_go_on(ignore_eos: bool) -> None:
    complete = one(spec=GrammarSpec("regex", "a{3}"), min_tokens=20, ignore_eos=ignore_eos)
    assert (complete.text, complete.finish_reason, complete.error) == ("aaa", FinishReason.STOP, None)
    empty = one(spec=GrammarSpec.choice([""]), min_tokens=20, ignore_eos=ignore_eos)
    assert (empty.text, empty.tokens, empty.finish_reason) == ("", [EOS], FinishReason.STOP)
    comma, dot = ids(","), ids(".")
    assert len(comma) == len(dot) == 1
    stops = {"stop_token_ids": (comma[0], dot[0]), "logit_bias": {comma[0]: 50.0, dot[0]: 40.0}}
    forced = one(spec=GrammarSpec("regex", ",{9}"), min_tokens=4, ignore_eos=ignore_eos, **stops)
    assert (forced.text, forced.finish_reason) == (",,,,", FinishReason.STOP), "stop tokens before min_tokens go on"
    other = one(spec=GrammarSpec("regex", "[a-z,]+[.]"), min_tokens=4, ignore_eos=ignore_eos, **stops)
    assert other.tokens[4:] == comma
    assert not {*comma, *dot} & {*other.tokens[:4]}


def test_a_grammar_that_needs_too_much_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_LIMITS", LLParserLimits(max_items_in_row=100, verbose_errors=False))
    schema = {"type": "object", "properties": {f"p{i}": {"const": i} for i in range(200)}}
    engine = make_engine()
    slow = engine.grammars.compile(GrammarSpec.json_schema(schema), "test")
    check_error(engine, sampling(grammar=slow, ignore_eos=False), "Current row has")


def check_error(engine: Engine, params: SamplingParams, message: str) -> None:
    """Assert that the request fails with `message`, and another request beside it does not."""
    failed, good = generate_all(engine, (PROMPTS[0], params), requests()[1])
    assert failed[0].finish_reason is FinishReason.ERROR
    assert message in str(failed[0].error)
    assert_same([good], [expected()[1]])
    assert engine.num_bad_rows == 0


def test_a_token_that_the_grammar_does_not_allow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot come from the sampler, but a fault must not spoil the text."""
    engine = make_engine()
    collect = engine.executor.collect

    def wrong(pending: Any) -> Any:
        result = collect(pending)
        for row in result.rows:
            if row.token_id is not None:
                row.token_id = ids("x")[0]
        return result

    monkeypatch.setattr(engine.executor, "collect", wrong)
    choice = one(engine, spec=GrammarSpec("regex", "a{3}"))
    assert (choice.text, choice.tokens, choice.finish_reason) == ("", [], FinishReason.ERROR)
    assert "doesn't satisfy the grammar" in str(choice.error)


def test_an_abort_frees_the_matcher() -> None:
    import gc
    import weakref

    for settings in ({}, SMALL_POOL, SMALL_POOL | SWAP | {"num_blocks": 14}):
        engine = make_engine(looks_ahead=True, **settings)
        collector = Collector(engine)
        for index, (token_ids, params) in enumerate(requests()):
            engine.add_request(str(index), token_ids, replace(params, n=1))
        held = [weakref.ref(stream.request.matcher) for stream in engine._streams.values() if stream.request.matcher]
        assert len(held) == 7
        for _ in range(12):
            collector.step()
        for index in range(len(requests())):
            collector.take(engine.abort(str(index)))
            engine.check_integrity()
        collector.run()
        assert_idle(engine)
        generate_all(engine, (PROMPTS[0], sampling(max_tokens=2)))  # the executor keeps the sequences of the last step
        gc.collect()
        assert [each() for each in held] == [None] * 7


def test_json_objects_of_a_random_model() -> None:
    bias = blanks() | {ids(mark)[0]: 4.0 for mark in '"}]:,'}
    params = constrained(JSON_OBJECT, temperature=1.0, seed=0, n=20, logit_bias=bias, max_tokens=120)
    choices = generate_all(make_engine(num_blocks=400), (PROMPTS[0], params))[0]
    ended = [choice for choice in choices if choice.finish_reason is FinishReason.STOP]
    assert len(ended) >= 10
    for choice in ended:
        assert isinstance(json.loads(choice.text), dict)
