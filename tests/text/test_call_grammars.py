"""Grammars of calls: whatever a model samples from them is parsed into calls with valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, build_tokenizer
from tokenizers import AddedToken

from llmsched.engine.grammar.compiler import Grammar, GrammarCompiler, Vocabulary, token_masks
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.text.parsers.call_grammars import calls_or_json, forced_calls, forced_notation, strict_calls
from llmsched.engine.text.parsers.notation import TOOL_CALL_PARSERS
from llmsched.engine.text.parsers.output_parser import Functions, OutputParser
from llmsched.engine.text.parsers.parts import Kind
from llmsched.engine.text.parsers.python_calls import PythonicParser
from llmsched.engine.text.tokenizer import Tokenizer

EOS = 2
FUNCTIONS: dict[str, Any] = {
    "paint": {
        "properties": {"color": {"$ref": "#/$defs/color"}, "coats": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["color"],
        "$defs": {"color": {"enum": ["red", "blue"]}},
    },
    "wait": {"type": "object", "additionalProperties": False},
}
#: Notation -> texts that are special tokens of the model.
SPECIAL = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "harmony": ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>"),
    "deepseek_v3": TOOL_CALL_PARSERS["deepseek_v3"].markers,
    "deepseek_v31": TOOL_CALL_PARSERS["deepseek_v31"].markers,
}
#: Texts with which a call begins.
BEGINS = {name: marks[0] for name, marks in SPECIAL.items()} | {
    "llama3_json": "{",
    "pythonic": "[",
    "qwen3_coder": "<tool_call>",
}


class Model:
    """Model that samples at random among the allowed tokens. It likes to end, and to write the text `liked`."""

    def __init__(self, *special: str) -> None:
        fast = build_tokenizer()
        fast.backend_tokenizer.add_special_tokens([AddedToken(text) for text in special])
        self.tokenizer = Tokenizer(fast)
        self.special_ids = {text: fast.convert_tokens_to_ids(text) for text in special}
        vocabulary = Vocabulary(self.tokenizer, VOCAB_SIZE, frozenset({EOS}))
        self.compiler = GrammarCompiler(vocabulary, lambda seconds: None)

    def grammar(self, spec: GrammarSpec) -> Grammar:
        return self.compiler.compile(spec, "tools")

    def sample(self, spec: GrammarSpec, seed: int, liked: str = "", most: int = 400) -> str | None:
        """Return an output that ended by itself, or None if it has `most` tokens without an end."""
        matcher, chance, ids = self.grammar(spec).matcher(), random.Random(seed), list[int]()
        planned: list[int] = []
        while not matcher.finished and len(ids) < most:
            mask = np.unpackbits(token_masks([matcher])[0], bitorder="little")
            allowed = [int(each) for each in np.flatnonzero(mask)]
            if EOS in allowed and not planned and chance.random() < 0.2:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            if not planned and chance.random() < 0.2:
                planned = self.tokenizer.encode(liked)
            token_id = planned.pop(0) if planned else EOS
            if token_id not in allowed or token_id == EOS:
                planned, token_id = [], chance.choice(allowed)
            if token_id == EOS:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert matcher.accept(token_id) is None
            ids.append(token_id)
        return self.tokenizer.decode(ids, skip_special_tokens=False) if matcher.finished else None


def parsed(
    parser_type: type[OutputParser], text: str, functions: Functions = FUNCTIONS
) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls and the content of an output."""
    parser = parser_type(functions)
    calls: list[tuple[str, str]] = []
    content = ""
    for kind, piece in [*parser.push(text), *parser.finish()]:
        if kind is Kind.CALL:
            calls.append((piece, ""))
        elif kind is Kind.ARGUMENTS:
            calls[-1] = calls[-1][0], calls[-1][1] + piece
        else:
            content += piece
    return [(name, json.loads(arguments)) for name, arguments in calls], content


def check(name: str, arguments: Any) -> None:
    """Check arguments against FUNCTIONS."""
    if name == "wait":
        assert arguments == {}
        return
    assert name == "paint"
    assert arguments.keys() - {"coats"} == {"color"}
    assert arguments["color"] in ("red", "blue")
    assert 0 <= arguments.get("coats", 0) <= 99
    assert isinstance(arguments.get("coats", 0), int)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_forced_outputs_are_calls(name: str, many: bool, is_special: bool) -> None:
    model = Model(*SPECIAL.get(name, ()) if is_special else ())
    parser_type = forced_notation(TOOL_CALL_PARSERS[name])
    spec = forced_calls(parser_type, FUNCTIONS, model.special_ids, many=many)
    numbers = set()
    for seed in range(40):
        text = model.sample(spec, seed)
        if text is None:
            continue
        calls, content = parsed(parser_type, text)
        assert not content.strip(), text
        assert calls
        for each in calls:
            check(*each)
        numbers.add(len(calls))
    assert 1 in numbers
    assert (max(numbers) > 1) == (many and name != "harmony")


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_strict_outputs_are_text_and_valid_calls(name: str, is_special: bool) -> None:
    model = Model(*SPECIAL.get(name, ()) if is_special else ())
    parser_type, begin = forced_notation(TOOL_CALL_PARSERS[name]), BEGINS[name]
    spec = strict_calls(parser_type, FUNCTIONS, model.special_ids, many=True)
    if name == "harmony" and not is_special:
        assert spec is None
        return
    assert spec is not None
    liked = begin + "commentary to=" * (name == "harmony")
    texts = [text for seed in range(60) if (text := model.sample(spec, seed, liked=liked)) is not None]
    results = [parsed(parser_type, text) for text in texts]
    for text, (calls, content) in zip(texts, results, strict=True):
        for each in calls:
            check(*each)
        assert calls or name == "harmony" or content == text
        assert begin not in content if len(begin) > 1 else not content.startswith(begin)
    assert any(calls for calls, _ in results)
    assert any(content for _, content in results)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "pythonic", "deepseek_v31"])
def test_outputs_are_calls_or_json(name: str) -> None:
    model = Model(*SPECIAL.get(name, ()))
    schema = {"properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"], "additionalProperties": False}
    calls_spec = forced_calls(TOOL_CALL_PARSERS[name], FUNCTIONS, model.special_ids, many=True)
    spec = calls_or_json(calls_spec, json.dumps({"type": "object", **schema}))
    results = []
    for seed in range(60):
        text = model.sample(spec, seed, liked='{"answer' if seed % 2 else BEGINS[name])
        if text is not None:
            calls, content = parsed(TOOL_CALL_PARSERS[name], text)
            assert bool(calls) != bool(content.strip())
            assert calls or json.loads(content)["answer"] in ("yes", "no")
            results.append(bool(calls))
    assert set(results) == {True, False}


KEYWORDS = {"a": {"const": 1}, "b": {"enum": ["x", 'y")]']}, "c": {"type": "boolean"}, "d": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"properties": KEYWORDS}, "f("),
        ({"properties": KEYWORDS, "required": ["b", "d"]}, "f("),
        ({"properties": KEYWORDS, "required": ["a"]}, "f(a="),
        ({"properties": {**KEYWORDS, "from": {"const": 2}}}, "f(**{"),
        ({"properties": KEYWORDS, "patternProperties": {"^e$": {"const": 3}}, "additionalProperties": False}, "f(**{"),
        ({"properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}}, "f(**{"),
    ],
)
def test_python_calls_have_keywords_if_they_can(schema: dict[str, Any], written: str) -> None:
    model, functions = Model(), {"f": {"type": "object", **schema}}
    spec = forced_calls(PythonicParser, functions, {}, many=False)
    seen: set[str] = set()
    for seed in range(40):
        if (text := model.sample(spec, seed)) is None:
            continue
        assert text.startswith(f"[{written}")
        ((name, arguments),) = parsed(PythonicParser, text, functions)[0]
        assert name == "f"
        jsonschema.validate(arguments, schema)
        seen |= arguments.keys()
    assert seen >= schema["properties"].keys()
