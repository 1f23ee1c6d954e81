"""Parsers of tool calls and reasoning: what they find, and that pieces of any size give the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsched.engine.text.parsers.notation import TOOL_CALL_PARSERS
from llmsched.engine.text.parsers.output_parser import OutputParser
from llmsched.engine.text.parsers.parts import Kind
from llmsched.engine.text.parsers.python_calls import PythonicParser

FUNCTIONS = {
    "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "null"]}}},
    "g": {},
}
THINK = ("<think>", "</think>")

Found = list[tuple[str, str]]


def parsed(parser: OutputParser, pieces: Iterable[str]) -> Found:
    """Return the parts that a parser finds, with those that belong together joined."""
    found: Found = []
    for kind, text in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        assert text
        if found and found[-1][0] == kind and kind is not Kind.CALL:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def c(text: str) -> tuple[str, str]:
    return "content", text


def call(name: str, arguments: str = "{}") -> Found:
    return [("call", name), ("arguments", arguments)]


X1 = call("f", '{"x": 1}')
F1 = '{"name": "f", "arguments": {"x": 1}}'

SAMPLES: list[tuple[str, str, Found]] = [
    # Hermes
    ("hermes", f"<tool_call>\n{F1}\n</tool_call>", X1),
    ("hermes", f"Let me see.\n\n<tool_call>{F1}</tool_call>\n", [c("Let me see."), *X1]),
    ("hermes", f'<tool_call>\n{F1}\n</tool_call>\n<tool_call>\n{{"name": "g"}}\n</tool_call>', [*X1, *call("g")]),
    ("hermes", f'<tool_call>[{F1}, {{"name": "g", "arguments": null}}]</tool_call>', [*X1, *call("g")]),
    ("hermes", '<tool_call>{"arguments": {"x": [1, {}]}, "name": "f"}</tool_call>', call("f", '{"x": [1, {}]}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', X1),
    ("hermes", f"<tool_call>{F1}", X1),
    ("hermes", f"<tool_call>{F1}<tool_call>{F1}", [*X1, *X1]),
    ("hermes", f"<tool_call>{F1}}}</tool_call>", [*X1, c("}</tool_call>")]),
    ("hermes", f"<tool_call>{F1}</tool_call> Done. ", [*X1, c("Done. ")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>\\u00e9\\n{\n\t}"}}</tool_call>',
        call("f", '{"s": "</tool_call>\\u00e9\\n{\\n\\t}"}'),
    ),
    ("hermes", '{"name": "f", "arguments": {}}', [c('{"name": "f", "arguments": {}}')]),
    ("hermes", "a < b <tool_ <tool_call", [c("a < b <tool_ <tool_call")]),
    ("hermes", "<tool_call>no</tool_call>", [c("<tool_call>no</tool_call>")]),
    ("hermes", f"<tool_call>\n<tool_call>{F1}</tool_call>", [c("<tool_call>"), *X1]),
    (
        "hermes",
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [c('<tool_call>{"name": "h", "arguments": {}}</tool_call>')],
    ),
    ("hermes", '<tool_call>{"name": "f", "x": 1}</tool_call>', [c('<tool_call>{"name": "f", "x": 1}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', [c('<tool_call>{"name": "f", "arguments": [1]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1,}}', [*call("f", '{"x": 1,'), c("}}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": tr', call("f", '{"x": tr')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\u00', call("f", '{"s": "\\u00')),
    ("hermes", '<tool_call>{"name": "f", "argum', [c('<tool_call>{"name": "f", "argum')]),
    # Llama 3
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', X1),
    ("llama3_json", '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', X1),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', [*X1, *call("g")]),
    ("llama3_json", 'See: <|python_tag|>{"name": "g"}', [c("See:"), *call("g")]),
    ("llama3_json", '{"name": "Ann", "age": 3}', [c('{"name": "Ann", "age": 3}')]),
    ("llama3_json", 'A {"name": "f", "parameters": {}}', [c('A {"name": "f", "parameters": {}}')]),
    # Mistral
    ("mistral", f'[TOOL_CALLS] [{F1}, {{"name": "g", "arguments": {{}}, "id": "abcdefghi"}}]', [*X1, *call("g")]),
    ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', [c("Yes."), *X1, *call("g")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}', X1),
    ("mistral", "[TOOL_CALLS]h[ARGS]{} [TOOL", [c("[TOOL_CALLS]h[ARGS]{} [TOOL")]),
    # Qwen3-Coder
    (
        "qwen3_coder",
        'Sure.\n<tool_call>\n<function=f>\n<parameter=s>\n "a"\n</p>\n\n</parameter>\n<parameter=x>\n3\n</parameter>\n'
        '<parameter=o>\n{"k": [1]}\n</parameter>\n</function>\n</tool_call>',
        [c("Sure."), *call("f", '{"s": " \\"a\\"\\n</p>\\n", "x": 3, "o": {"k": [1]}}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>many</parameter><parameter=o>None</parameter></function></tool_call>"
        "<function=g>\n</function>",
        [*call("f", '{"x": "many", "o": null}'), *call("g")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=h></function></tool_call>",
        [c("<tool_call><function=h></function></tool_call>")],
    ),
    # pythonic
    (
        "pythonic",
        '[f(x=-1, s="a])\\"", o={"k": [True, None]}), g()]',
        [*call("f", '{"x": -1, "s": "a])\\"", "o": {"k": [true, null]}}'), *call("g")],
    ),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", call("g")),
    ("pythonic", "[1, 2] [g()]", [c("[1, 2] [g()]")]),
    ("pythonic", "[f(x=y)]", [c("[f(x=y)]")]),
    ("pythonic", "[f(1)]", [c("[f(1)]")]),
    ("pythonic", "[g(), h()]", [*call("g"), c(", h()]")]),
    ("pythonic", "[f(x=1", [c("[f(x=1")]),
    (
        "pythonic",
        '[f(x=null, **{"o": {"k": [true, false]}}), g(**{})]',
        [*call("f", '{"x": null, "o": {"k": [true, false]}}'), *call("g")],
    ),
    ("pythonic", '[f(**[("x", 1)])]', [c('[f(**[("x", 1)])]')]),
    # DeepSeek
    *(
        ("deepseek_v3", text.replace("¦", "\uff5c"), expected)
        for text, expected in [
            (
                'Yes.<¦tool▁calls▁begin¦><¦tool▁call▁begin¦>function<¦tool▁sep¦>f\n```json\n{"x": 1}\n```'
                "<¦tool▁call▁end¦>\n<¦tool▁call▁begin¦>function<¦tool▁sep¦>g\n```json\n{}\n```<¦tool▁call▁end¦>"
                "<¦tool▁calls▁end¦>",
                [c("Yes."), *X1, *call("g")],
            ),
            ('<¦tool▁calls▁begin¦><¦tool▁call▁begin¦>function<¦tool▁sep¦>f\n```json\n{"x": 1}\n```', X1),
        ]
    ),
    *(
        ("deepseek_v31", text.replace("¦", "\uff5c"), expected)
        for text, expected in [
            (
                '<¦tool▁calls▁begin¦><¦tool▁call▁begin¦>f<¦tool▁sep¦>{"x": 1}<¦tool▁call▁end¦><¦tool▁call▁begin¦>g'
                "<¦tool▁sep¦>{}<¦tool▁call▁end¦><¦tool▁calls▁end¦> Done.",
                [*X1, *call("g"), c("Done.")],
            ),
            ('<¦tool▁calls▁begin¦><¦tool▁call▁begin¦>f<¦tool▁sep¦>{"x": tr', call("f", '{"x": tr')),
        ]
    ),
    ("deepseek_v31", "<\uff5ctool▁calls▁begin\uff5c>no", [c("<\uff5ctool▁calls▁begin\uff5c>no")]),
    # harmony
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        [("reasoning", "Hm."), c("I look."), *X1],
    ),
    ("harmony", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}', X1),
    ("harmony", "<|channel|>final<|message|>Hi <|return|>", [c("Hi ")]),
    (
        "harmony",
        "<|channel|>commentary to=functions.h<|message|>{}<|call|>",
        [c("<|channel|>commentary to=functions.h<|message|>{}")],
    ),
    ("harmony", "plain <|channel|>final", [c("plain <|channel|>final")]),
]


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES)
def test_calls_are_found_wherever_the_text_is_split(name: str, text: str, expected: Found) -> None:
    parser_type = TOOL_CALL_PARSERS[name]
    assert parsed(parser_type(FUNCTIONS), [text]) == expected
    assert parsed(parser_type(FUNCTIONS), text) == expected
    for position in range(1, len(text)):
        assert parsed(parser_type(FUNCTIONS), [text[:position], text[position:]]) == expected


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm. </thin \n</think>\n\nYes. \n", False, [("reasoning", "Hm. </thin"), c("Yes. \n")]),
        ("Hm.\n</think>Yes", True, [("reasoning", "Hm."), c("Yes")]),
        ("Hm. ", True, [("reasoning", "Hm.")]),
        ("</think>\n\nYes", True, [c("Yes")]),
        (" \n<thin> Yes", False, [c(" \n<thin> Yes")]),
        ("No <think>x</think>", False, [c("No <think>x</think>")]),
        ("", False, []),
        ("\n", False, [c("\n")]),
        (f"<think>Hm.</think>\n<tool_call>{F1}</tool_call>", False, [("reasoning", "Hm."), *X1]),
        (f"<tool_call>{F1}</tool_call>", False, X1),
    ],
)
def test_reasoning_is_found_wherever_the_text_is_split(text: str, opened: bool, expected: Found) -> None:
    for parser_type in (OutputParser, TOOL_CALL_PARSERS["hermes"]):
        if parser_type is OutputParser and "tool_call" in text:
            continue
        for position in range(len(text) + 1):
            parser = parser_type(FUNCTIONS, THINK, opened=opened)
            assert parsed(parser, [text[:position], text[position:]]) == expected


def test_what_follows_reasoning_without_tools_is_plain() -> None:
    parser = OutputParser({}, THINK)
    parser.push("<think>a</think> ")
    assert not parser.is_plain
    parser.push("b")
    assert parser.is_plain


def test_arguments_are_not_held_back() -> None:
    parser = TOOL_CALL_PARSERS["hermes"](FUNCTIONS)
    pieces = ['<tool_call>\n{"name": "f", "arguments": ', '{"s"', ': "ab', 'cd"', "}"]
    assert [[text for _, text in parser.push(piece)] for piece in pieces] == [
        [],
        ["f", '{"s"'],
        [': "ab'],
        ['cd"'],
        ["}"],
    ]


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    parser = TOOL_CALL_PARSERS["llama3_json"](FUNCTIONS)
    assert parser.push('{"name": "Ann"') == []
    assert parser.push(",") == [(Kind.CONTENT, '{"name": "Ann",')]
    hermes = TOOL_CALL_PARSERS["hermes"](FUNCTIONS)
    assert [hermes.push(piece) for piece in ("a <tool", "s>", " b")] == [
        [(Kind.CONTENT, "a")],
        [(Kind.CONTENT, " <tools>")],
        [(Kind.CONTENT, " b")],
    ]


def test_markers_within_a_call_are_read_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time to read an output would grow with the square of the number of its markers."""
    num_taken = 0
    original = PythonicParser.take

    def take(*args: Any) -> Iterator[None]:
        nonlocal num_taken
        num_taken += 1
        return original(*args)

    monkeypatch.setattr(PythonicParser, "take", take)
    text = "<|python_start|>[f(" * 50
    assert parsed(PythonicParser(FUNCTIONS), [text + "<|python_start|>[g()]"]) == [c(text), *call("g")]
    assert num_taken < 3 * len(text)


def test_deep_nesting_is_malformed() -> None:
    for depth, is_call in ((100, True), (200, False), (100_000, False)):
        arguments = f'{{"x": {"[" * depth}{"]" * depth}}}'
        found = parsed(
            TOOL_CALL_PARSERS["hermes"](FUNCTIONS), [f'<tool_call>{{"arguments": {arguments}, "name": "f"}}']
        )
        assert (found[0][0] == "call") == is_call


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=5), VALUES, max_size=4)), max_size=3)
TEXTS = st.sampled_from(["", "Hello", 'a "b" {c}\n<d>'])


def written(name: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    """Return the text of calls in a notation, with JSON by Python's own writer."""
    key = "parameters" if name == "llama3_json" else "arguments"
    texts = [json.dumps({"name": function, key: arguments}, indent=indent) for function, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(texts)}]" if texts else ""
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(texts) if texts else ""
        case _:
            parts = [
                f"<|channel|>commentary to=functions.{function}<|message|>{json.dumps(arguments)}<|call|>"
                for function, arguments in calls
            ]
            return "".join(parts)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "harmony"])
@given(calls=CALLS, text=TEXTS, indent=st.sampled_from([None, 2]), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_calls_written_by_a_json_library(
    name: str, calls: list[tuple[str, dict[str, Any]]], text: str, indent: int | None, cuts: list[int]
) -> None:
    whole = text + written(name, calls, indent)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    found = parsed(TOOL_CALL_PARSERS[name](FUNCTIONS), [whole[a:b] for a, b in pairwise(edges)])
    names = [each for kind, each in found if kind == "call"]
    arguments = [json.loads(each) for kind, each in found if kind == "arguments"]
    assert list(zip(names, arguments, strict=True)) == calls
    assert [each for kind, each in found if kind == "content"] == ([text] if text else [])


TAGS = "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <function=f> <parameter=x> </parameter> </function> <|python_tag|>"
FRAGMENTS = [*TAGS.split(), "<|channel|>", "final", "<|message|>", "<|end|>", F1, *'f{}[]()"\\, \n:1a']
FRAGMENTS += [*TOOL_CALL_PARSERS["deepseek_v31"].markers, "function", "\n```json\n", "\n```"]


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_any_text_is_parsed_alike_in_one_piece_and_in_single_characters(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parsed(TOOL_CALL_PARSERS[name](FUNCTIONS, THINK), [text])
    assert parsed(TOOL_CALL_PARSERS[name](FUNCTIONS, THINK), text) == whole
    if not any(kind == "call" for kind, _ in whole) and name != "harmony":
        assert "".join(each for _, each in whole) == text
