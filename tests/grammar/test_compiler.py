"""Grammars that cannot be compiled, or that would cost too much."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from engines import EOS, tokenizer
from tiny_models import VOCAB_SIZE

from llmsched.engine.errors import QueueFullError, RequestError
from llmsched.engine.grammar import compiler as module
from llmsched.engine.grammar.compiler import MAX_BYTES, Grammar, GrammarCompiler, Vocabulary, token_masks
from llmsched.engine.grammar.schema_check import check_values
from llmsched.engine.grammar.spec import JSON_OBJECT, GrammarSpec

VOCABULARY = Vocabulary(tokenizer(), VOCAB_SIZE, frozenset({EOS}))


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, lambda seconds: None)


def error_of(spec: GrammarSpec) -> str:
    with pytest.raises(RequestError) as caught:
        make_compiler().compile(spec, "response_format")
    assert caught.value.param == "response_format"
    assert str(caught.value).startswith("response_format")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def attempt(spec: GrammarSpec) -> Grammar | str:
    """Return the compiled grammar, or the message of the error."""
    try:
        return make_compiler().compile(spec, "test")
    except RequestError as error:
        return str(error)


def nested(keyword: str, value: Any) -> dict[str, Any]:
    """Return a schema whose definition `leaf` has a keyword."""
    return {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}, "b": {"type": "integer"}},
        "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "string"}}, keyword: value}},
    }


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {}),
        ("if", {}),
        ("uniqueItems", True),
        ("contains", {}),
        ("minContains", 1),
        ("propertyNames", {}),
        ("dependentRequired", {}),
        ("dependentSchemas", {}),
        ("dependencies", {}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("$dynamicRef", "#a"),
        ("$recursiveRef", "#"),
    ],
)
def test_an_unsupported_keyword_is_named_with_its_place(keyword: str, value: Any) -> None:
    message = error_of(GrammarSpec.json_schema(nested(keyword, value)))
    assert f'"{keyword}"' in message
    assert "at #/$defs/leaf:" in message


@pytest.mark.parametrize(
    ("schema", "place", "message"),
    [
        ({"type": "object", "properties": {"a": {"type": "file"}}}, "#/properties/a", "file"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "format": "iri"}]}, "#/anyOf/1", "format: iri"),
        ({"properties": {"p": {"pattern": "(?=a)"}}}, "#/properties/p", "look-around"),
        ({"items": {"pattern": "(a"}}, "#/items", "unclosed"),
        ({"$ref": "https://example.com/s.json"}, "#", "https://example.com/s.json"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/properties/a", "/$defs/none"),
        (
            {"type": "array", "minItems": 2, "prefixItems": [{}, {"minimum": 3, "maximum": 2, "type": "integer"}]},
            "#",
            "minItems",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#", "oneOf"),
        (False, "#", "false"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "#", "property 'a' is unsatisfiable"),
        ({"properties": {"o": {"minProperties": 2}}}, "#/properties/o", "minProperties is 2"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "#", "x-guidance"),
        ({"properties": 5}, "#", "properties must be an object"),
        ({"items": {"const": {"a": ["b\0c"]}}}, "#/items/const", "control characters"),
        ({"enum": ["a", "\x7f"]}, "#/enum", "control characters"),
        ({"items": {"pattern": "^(?x) a b #c\n c$"}}, "#/items", "flag x"),
        ({"type": "string", "pattern": r"^a\x01b$"}, "#", "control character"),
        ({"type": "object", "patternProperties": {"^a\x01$": {}}}, "#", "control character"),
        ({"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}}, "#", "min/maxProperties"),
    ],
)
def test_a_schema_that_cannot_be_enforced(schema: Any, place: str, message: str) -> None:
    text = error_of(GrammarSpec.json_schema(schema))
    assert f"at {place}" in text
    assert message in text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec("regex", "a(?=b)"), "look-around"),
        (GrammarSpec("regex", "(a"), "unclosed group"),
        (GrammarSpec("regex", "a\\"), "ends with a backslash"),
        *((GrammarSpec("regex", text), "flag x") for text in ("(?x)a b", "a(?ix-s: b)", "[[](?x)")),
        (GrammarSpec.json_schema({"$ref": "#"}), "no output can match it"),
        (GrammarSpec("regex", r"(a)\1"), "backreferences are not supported"),
        (GrammarSpec("grammar", "start: missing"), "missing"),
        (GrammarSpec("grammar", 'start: "a'), "1"),
        (GrammarSpec("grammar", 'start: x\nx: "a" <[999999]>'), "at 2("),
        (GrammarSpec("grammar", 'start: %json {"not": {}}'), "not"),
        (GrammarSpec("grammar", 'start: %json{"multipleOf": 99999989}'), "at #: multipleOf is 99999989"),
        (GrammarSpec("grammar", "start: %json {"), "key must be"),
        (GrammarSpec("grammar", "root ::= [a"), "GBNF"),
        (GrammarSpec("grammar", ""), "neither in Lark"),
        (GrammarSpec("grammar", r'root ::= "\u0041bc"'), r"it has the escape \u0041bc; in GBNF"),
        (GrammarSpec("grammar", 'start: a\na: a "x"'), "no"),
    ],
)
def test_a_grammar_that_is_not_valid(spec: GrammarSpec, message: str) -> None:
    text = error_of(spec)
    assert message in text
    assert "llguidance" not in text


def chain(kind: str, length: int) -> GrammarSpec:
    """Return a grammar whose compilation recurses `length` times."""
    if kind == "properties":
        leaves: dict[str, Any] = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
        return GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": leaves | {f"d{length}": {"type": "null"}}})
    if kind == "allOf":
        leaves = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
        return GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": leaves | {f"d{length}": {"type": "null"}}})
    letter = "r" if kind == "rules" else "R"
    rules = [f"{letter}{i}:{letter}{i + 1}" for i in range(length)]
    return GrammarSpec("grammar", "\n".join([f"start:{letter}0", *rules, f'{letter}{length}:"a"']))


@pytest.mark.parametrize("kind", ["properties", "allOf", "rules", "terminals"])
def test_long_chains_do_not_end_the_process(kind: str) -> None:
    """Each needs more than the 8 MiB of stack that a thread usually has, or comes near it."""
    spec = chain(kind, 1200 if kind in ("rules", "terminals") else 2200)
    assert len(spec.text) < MAX_BYTES[spec.kind]
    found = attempt(spec)
    assert "items" in found if isinstance(found, str) else token_masks([found.matcher()]).any()


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "a" * (MAX_BYTES["regex"] + 1)),
        GrammarSpec("regex", "é" * (MAX_BYTES["regex"] // 2 + 1)),
        GrammarSpec("grammar", 'start: "' + "a" * MAX_BYTES["grammar"] + '"'),
        GrammarSpec.json_schema({"enum": ["x" * MAX_BYTES["json_schema"]]}),
        GrammarSpec.choice(["x" * MAX_BYTES["choice"]]),
    ],
)
def test_a_text_that_is_too_long(spec: GrammarSpec) -> None:
    assert f"at most {MAX_BYTES[spec.kind]}" in error_of(spec)


@pytest.mark.parametrize(
    "text",
    [
        "(((a{1,1000}){1,1000}){1,1000})",
        "(a|b)*a(a|b){30}",
        "(.*a.*b.*c.*d.*){20}",
        r"\p{L}{1000}",
        "(?:a|ab|abc|abcd){1,500}[a-z]{1,400}",
        "(" * 120 + "a" + ")*" * 120,
        "a?" * 8000,
    ],
)
def test_hostile_regexes_are_refused_or_cost_little(text: str) -> None:
    grammar = attempt(GrammarSpec("regex", text))
    if isinstance(grammar, str):
        assert "not valid" in grammar
        return
    matcher = grammar.matcher()
    for _ in range(50):
        ids = token_masks([matcher])
        if matcher.error is not None or matcher.finished:
            break
        assert ids.any()
        first = next(byte * 8 + bit for byte in range(len(ids[0])) for bit in range(8) if ids[0][byte] >> bit & 1)
        matcher.accept(first)
    assert grammar.matcher().error is None


def test_exponential_schemas_are_refused_or_shared() -> None:
    doubled: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    doubled["d40"] = {"type": "object"}
    make_compiler().compile(GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": doubled}), "test")
    options = [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for i in range(12) for j in range(4)]
    product = {"allOf": [{"anyOf": options[4 * i : 4 * i + 4]} for i in range(12)]}
    assert "too large" in error_of(GrammarSpec.json_schema(product))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}},
        {"properties": {"a": {"type": "number", "multipleOf": 0.99999989}}},
        {"properties": {"a": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (83, 89, 97)]}}},
    ],
)
def test_multiples_that_would_take_much_memory_are_refused(schema: dict[str, Any]) -> None:
    text = error_of(GrammarSpec.json_schema(schema))
    assert "at #/properties/a" in text
    assert "multipleOf" in text
    make_compiler().compile(GrammarSpec.json_schema({"type": "number", "multipleOf": 0.25}), "test")


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def lark(spec: GrammarSpec) -> str:
        begun.release()
        gate.wait()
        return "start: /a/"

    monkeypatch.setattr(module, "MAX_COMPILE_S", 0.01)
    monkeypatch.setattr(module, "_lark", lark)
    monkeypatch.setattr(module, "MAX_COMPILATIONS", 2)
    compiler = make_compiler()
    for text in "ab":
        with pytest.raises(RequestError, match=r"not compiled within 0\.01 s"):
            compiler.compile(GrammarSpec("regex", text), "test")
        begun.acquire()
    with pytest.raises(QueueFullError, match="2 grammars are being compiled"):
        compiler.compile(GrammarSpec("regex", "c"), "test")
    monkeypatch.setattr(module, "MAX_COMPILE_S", 10)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "llmsched-grammar":
            thread.join()
    compiler.compile(GrammarSpec("regex", "c"), "test")


def test_compiled_grammars_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    compiler = GrammarCompiler(VOCABULARY, seconds.append)
    monkeypatch.setattr(module, "MAX_GRAMMARS", 3)
    specs = [GrammarSpec.json_schema({"const": i}) for i in range(3)]
    first = [compiler.compile(spec, "test") for spec in specs]
    assert [compiler.compile(spec, "test") for spec in specs] == first
    assert len(seconds) == 3
    compiler.compile(specs[0], "test")
    compiler.compile(JSON_OBJECT, "test")
    assert [compiler.has(spec) for spec in (*specs, JSON_OBJECT)] == [True, False, True, True]
    with pytest.raises(RequestError):
        compiler.compile(GrammarSpec("regex", "("), "test")
    assert not compiler.has(GrammarSpec("regex", "("))


def test_the_bytes_of_grammars_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept grammars are dropped first. Those of open requests stay, so then the next one has to wait."""
    monkeypatch.setattr(module, "_BYTES_PER_SECOND", 0.0)
    compiler = make_compiler()
    specs = [GrammarSpec.json_schema({"const": i}) for i in range(5)]
    open_ones = [compiler.compile(spec, "test") for spec in specs[:2]]
    compiler.compile(specs[2], "test")
    size = open_ones[0].num_bytes
    monkeypatch.setattr(module, "MAX_GRAMMAR_BYTES", 3 * size)
    compiler.compile(specs[3], "test")
    assert [compiler.has(spec) for spec in specs] == [False, False, False, True, False]
    open_ones.append(compiler.compile(specs[3], "test"))
    with pytest.raises(QueueFullError, match="grammars of the requests that are open"):
        compiler.compile(specs[4], "test")
    open_ones.pop(0)
    compiler.compile(specs[4], "test")


def test_a_longer_compilation_makes_a_larger_grammar() -> None:
    large = {"properties": {f"p{i}": {"type": "integer", "minimum": i, "maximum": 9 * i + 5} for i in range(300)}}
    grammars = [make_compiler().compile(GrammarSpec.json_schema(schema), "test") for schema in ({}, large)]
    assert grammars[0].num_bytes < grammars[1].num_bytes < module.MAX_GRAMMAR_BYTES


@pytest.mark.parametrize("text", ["[" * 100_000, "[\\" * 40_000, "[" * 100_000 + "\\", "(?" + "x" * 100_000])
def test_patterns_are_read_once(text: str) -> None:
    """A search from each character to the end would take minutes, during which no other thread could run."""
    assert check_values({"pattern": text}) is None
    assert "flag x" not in str(attempt(GrammarSpec("regex", text[: MAX_BYTES["regex"]])))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": "\b\f\n\r\t/"}, "\b\f\n\r\t/"),
        ({"const": {"a\x01": 1}}, {"a\x01": 1}),
        ({"type": "string", "pattern": r"^[^\x00-\x1f]\\x00\[$"}, r"a\x00["),
        ({"type": "string", "pattern": r"^[\x20-\x7f]+$"}, "a~"),
    ],
)
def test_control_characters_that_are_supported(schema: dict[str, Any], value: Any) -> None:
    matcher = make_compiler().compile(GrammarSpec.json_schema(schema), "test").matcher()
    ids = tokenizer().encode(json.dumps(value, separators=(",", ":")), add_special_tokens=False)
    assert [matcher.accept(token) for token in ids] == [None] * len(ids)
    assert matcher.finished or matcher.state.is_accepting()


def test_the_order_of_properties_is_that_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    for text, right in (('{"b":1,"a":2}', True), ('{"a":2,"b":1}', False)):
        matcher = make_compiler().compile(GrammarSpec.json_schema(schema), "test").matcher()
        ids = tokenizer().encode(text, add_special_tokens=False)
        assert all(matcher.accept(token) is None for token in ids) is right
        assert json.loads(text) == {"a": 2, "b": 1}


def test_a_grammar_may_begin_after_a_token() -> None:
    marker, other = (tokenizer().encode(text, add_special_tokens=False)[0] for text in "xy")
    matcher = make_compiler().compile(GrammarSpec.choice(["y"]), "test").matcher(after=marker)

    def allowed() -> set[int]:
        bits = np.unpackbits(token_masks([matcher])[0], bitorder="little")[:VOCAB_SIZE]
        return {int(token_id) for token_id in np.flatnonzero(bits)}

    for token_id in (other, 5, other):
        assert allowed() == {*range(VOCAB_SIZE)} - {EOS}
        assert matcher.accept(token_id) is None
    assert matcher.accept(marker) is None
    assert allowed() == {other}
    assert not matcher.finished
    assert matcher.accept(other) is None
    assert matcher.finished
