"""Masks against independent definitions of what may follow, over the whole small vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import regex
import torch
from engines import EOS, sampling, tokenizer
from tiny_models import VOCAB_SIZE
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from llmsched.engine.errors import RequestError
from llmsched.engine.executor.penalties import ceilings
from llmsched.engine.grammar.compiler import Grammar, GrammarCompiler, Matcher, Vocabulary, token_masks
from llmsched.engine.grammar.spec import JSON_OBJECT, GrammarSpec, Tag, tagged_output
from llmsched.engine.text.tokenizer import Tokenizer

TOKENS = [tokenizer().token_bytes(i) for i in range(VOCAB_SIZE)]
PLAIN = {i for i, token in enumerate(TOKENS) if token and not tokenizer().is_special(i)}
COMPILER = GrammarCompiler(Vocabulary(tokenizer(), VOCAB_SIZE, frozenset({EOS})), lambda seconds: None)
WS = r"[ \n\r\t]{0,40}"
TEXT = "(.|\n)*"

#: The rule "may `text` begin an output?" and "may `text` be an output?"
Rule = tuple[Callable[[bytes], bool], Callable[[bytes], bool]]


def compiled(spec: GrammarSpec) -> Grammar:
    return COMPILER.compile(spec, "test")


def allowed(matcher: Matcher) -> set[int]:
    bits = ceilings(token_masks([matcher]), VOCAB_SIZE, torch.device("cpu"))
    return set((bits[0] > 0).nonzero()[:, 0].tolist())


def language(texts: Iterable[str]) -> Rule:
    """Return the rule of a finite set of outputs."""
    encoded = [text.encode() for text in texts]
    return lambda text: any(each.startswith(text) for each in encoded), lambda text: text in encoded


def pattern(source: str) -> Rule:
    """Return the rule of a regular expression, from the regex module's partial matches."""
    found = regex.compile(source.encode())
    return (
        lambda text: found.fullmatch(text, partial=True) is not None,
        lambda text: found.fullmatch(text) is not None,
    )


CASES: dict[str, tuple[GrammarSpec, Rule]] = {
    "choice": (GrammarSpec.choice(["the", "then", "thinking", "n"]), language(["the", "then", "thinking", "n"])),
    "odd choices": (
        GrammarSpec.choice(odd := ['"', "\\n", "\n", "\0", "\x7f", "é日😀", "<|im_end|>", "\u2028", "a b", "a", "{}"]),
        language(odd),
    ),
    "empty choice": (GrammarSpec.choice(["", "no"]), language(["", "no"])),
    "characters of several bytes": (GrammarSpec("regex", "é日?|😀"), language(["é", "é日", "😀"])),
    "regex": (GrammarSpec("regex", "[0-9]{2,4}(-[a-f]+)?"), pattern("[0-9]{2,4}(-[a-f]+)?")),
    "alternatives": (GrammarSpec("regex", "(a|ab|abc)*(x|yy)"), pattern("(a|ab|abc)*(x|yy)")),
    "classes": (GrammarSpec("regex", r"\d\w/\s"), pattern(r"[0-9][0-9A-Za-z_]/[ \t\n\r\f\v]")),
    "classes in a schema": (
        GrammarSpec.json_schema({"type": "string", "pattern": r"^\d\w$"}),
        pattern('"[0-9][0-9A-Za-z_]"'),
    ),
    "anchors": (GrammarSpec("regex", "^th(e|is)?$"), language(["th", "the", "this"])),
    "lark": (
        GrammarSpec("grammar", 'start: item ("," item)*\nitem: "on" | NUMBER\nNUMBER: /[0-9]+/'),
        pattern("(on|[0-9]+)(,(on|[0-9]+))*"),
    ),
    "gbnf": (
        GrammarSpec("grammar", 'root ::= item ("," item)*\nitem ::= "on" | [0-9]+'),
        pattern("(on|[0-9]+)(,(on|[0-9]+))*"),
    ),
    "gbnf escapes": (
        GrammarSpec("grammar", r'root ::= [\x61-\x63] "\\" [\]\n] "\u1e9e"'),
        language([f"{a}\\{b}ẞ" for a in "abc" for b in "]\n"]),
    ),
    "special token": (GrammarSpec("grammar", 'start: "a" <[1]> "b"'), None),
    "integer": (GrammarSpec.json_schema({"type": "integer"}), pattern("-?(0|[1-9][0-9]*)")),
    "enum": (GrammarSpec.json_schema({"enum": ["a", 1, None, True]}), language(['"a"', "1", "null", "true"])),
    "array": (
        GrammarSpec.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
        pattern(rf"\[{WS}(true|false)({WS},{WS}(true|false))?{WS}\]"),
    ),
    "object": (
        GrammarSpec.json_schema(
            {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "on": {"$ref": "#/$defs/flag"}},
                "required": ["n"],
                "additionalProperties": False,
                "$defs": {"flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
            }
        ),
        pattern(
            rf'\{{{WS}"n"{WS}:{WS}-?(0|[1-9][0-9]*)({WS},{WS}"on"{WS}:{WS}(true|false|null))?{WS}\}}',
        ),
    ),
    "string": (
        GrammarSpec.json_schema({"type": "string", "pattern": "^[a-c]{2}$"}),
        pattern('"[a-c]{2}"'),
    ),
}


def rule_of_special(text: bytes) -> tuple[bool, bool]:
    return text in (b"", b"a", b"a\xff1", b"a\xff1b"), text == b"a\xff1b"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_masks_are_what_the_rule_says(name: str, ignore_eos: bool) -> None:
    spec, rule = CASES[name]
    begins, ends = rule or (lambda text: rule_of_special(text)[0], lambda text: rule_of_special(text)[1])
    chance = random.Random(0)
    for _ in range(4):
        matcher, text = compiled(spec).matcher(ignore_eos=ignore_eos), b""
        for _ in range(25):
            expected = {i for i in PLAIN if begins(text + TOKENS[i])}
            if rule is None and begins(text + b"\xff1"):
                expected.add(1)
            ended = ends(text)
            assert matcher.finished == (ended and not expected)
            assert matcher.error is None
            assert allowed(matcher) == expected | ({EOS} if ended and not (ignore_eos and expected) else set())
            if not expected:
                assert ended
                break
            token = chance.choice(sorted(expected))
            for other in chance.sample(sorted(set(range(VOCAB_SIZE)) - expected - {EOS}), 3):
                assert compiled_after(spec, matcher, other) is not None
            assert matcher.accept(token) is None
            text += b"\xff1" if token == 1 else TOKENS[token]
        if ends(text) and not matcher.finished:
            assert matcher.accept(EOS) is None
            assert matcher.finished


def compiled_after(spec: GrammarSpec, matcher: Matcher, token_id: int) -> str | None:
    """Return what a copy of `matcher` says about a token."""
    return Matcher(matcher.vocabulary, matcher.state.deep_copy(), False).accept(token_id)


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_json_as_people_write_it_is_allowed(indent: int | None) -> None:
    value = {"name": 'Zoë "Z" \n 😀', "size": -1.5e-7, "tags": ["a", None, True, []], "more": {"deep": [{"er": {}}]}}
    for ascii_only in (False, True):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        matcher = compiled(JSON_OBJECT).matcher()
        errors = [matcher.accept(token) for token in tokenizer().encode(text, add_special_tokens=False)]
        # Escapes such as \u00eb are a second spelling of a character, see JSON_OPTIONS.
        assert (errors[-1] is None and matcher.finished) is not ascii_only


def test_blanks_are_limited() -> None:
    matcher = compiled(JSON_OBJECT).matcher()
    space = tokenizer().encode(" ", add_special_tokens=False)[0]
    matcher.accept(tokenizer().encode("{", add_special_tokens=False)[0])
    for _ in range(40):
        assert matcher.accept(space) is None
    assert space not in allowed(matcher)


def test_a_declared_property_has_no_second_spelling() -> None:
    spec = GrammarSpec.json_schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    for text, right in (('{"a":1,"b":2}', True), ('{"a":1,"a":2}', False), ('{"a":1,"\\u0061":2}', False)):
        matcher = compiled(spec).matcher()
        ids = tokenizer().encode(text, add_special_tokens=False)
        assert all(matcher.accept(token) is None for token in ids) is right


def test_masks_of_a_batch_are_the_masks_of_its_rows() -> None:
    matchers = [compiled(spec).matcher() for spec, _ in CASES.values()]
    broken = compiled(JSON_OBJECT).matcher()
    assert broken.accept(5) is not None
    masks = token_masks([*matchers, broken])
    assert not masks[-1].any()
    for row, matcher in enumerate(matchers):
        assert np.array_equal(masks[row], token_masks([matcher])[0])


@pytest.mark.parametrize("width", [VOCAB_SIZE, VOCAB_SIZE - 3, VOCAB_SIZE + 64])
def test_ceilings_are_the_bits_of_a_mask(width: int) -> None:
    masks = np.random.default_rng(0).integers(0, 256, (3, VOCAB_SIZE // 8), dtype=np.uint8)
    expected = np.full((3, width), -np.inf)
    for row, token in np.ndindex(3, min(width, VOCAB_SIZE)):
        if masks[row, token // 8] >> (token % 8) & 1:
            expected[row, token] = np.inf
    assert ceilings(masks, width, torch.device("cpu")).tolist() == expected.tolist()


def test_of_tokens_with_equal_bytes_one_is_allowed() -> None:
    class Twice:
        """Tokenizer with three tokens for "a", of which the first is the token of a byte."""

        bos_token_id = None
        joins_bytes = True
        names = ("<0x61>", "a", "b", "a", "</s>")

        def __init__(self) -> None:
            self.backend = self

        def id_to_token(self, token_id: int) -> str | None:
            return self.names[token_id] if token_id < len(self.names) else None

        def vocabulary(self, size: int) -> list[bytes]:
            return [b"a", b"a", b"b", b"a", b"</s>", *[b""] * (size - 5)]

        def is_special(self, token_id: int) -> bool:
            return token_id == 4

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1 if char == "a" else 2 for char in text]

    for eos in (frozenset({4}), frozenset[int]()):
        compiler = GrammarCompiler(Vocabulary(Twice(), 7, eos), lambda seconds: None)  # type: ignore[arg-type]
        matcher = compiler.compile(GrammarSpec("regex", "a+b?"), "test").matcher()
        bits = ceilings(token_masks([matcher]), 7, torch.device("cpu"))
        assert (bits[0] > 0).nonzero()[:, 0].tolist() == [1]
        matcher.accept(1)
        bits = ceilings(token_masks([matcher]), 7, torch.device("cpu"))
        assert (bits[0] > 0).nonzero()[:, 0].tolist() == [1, 2, *sorted(eos)]
        matcher.accept(2)
        assert matcher.finished


CALLS = [
    Tag(["<tool>"], {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}, ["</tool>"]),
    Tag(["<tool>f"], {"type": "integer"}, ["</tool>"]),
]


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({}, ['<tool>{"x":1}</tool>', "<tool>f2</tool><tool>f3</tool>"], ["", "so <tool>f2</tool>", "<tool>f</tool>"]),
        ({"many": False}, ["<tool>f2</tool>"], ["", "<tool>f2</tool><tool>f3</tool>"]),
        ({"separator": "\n"}, ["<tool>f2</tool>\n<tool>f3</tool>"], ["<tool>f2</tool><tool>f3</tool>"]),
        (
            {"trigger": "<tool>"},
            ["", "text < tool", "so <tool>f2</tool> and\n<tool>f3</tool> end", '<tool>{"x":1}</tool>'],
            ["so <tool>g", "<tool>f2</tool> <tool>fa", '<tool>{"x":2'],
        ),
        ({"trigger": "<tool>", "many": False}, ["", "a", "so <tool>f2</tool>"], ["so <tool>f2</tool> and", "<tool>g"]),
    ],
)
def test_tagged_outputs(options: dict[str, object], right: list[str], wrong: list[str]) -> None:
    grammar = compiled(tagged_output(CALLS, **options))  # type: ignore[arg-type]
    for text in (*right, *wrong):
        matcher = grammar.matcher()
        errors = [matcher.accept(token) for token in tokenizer().encode(text, add_special_tokens=False)]
        ends = not any(errors) and (matcher.finished or EOS in allowed(matcher))
        assert ends is (text in right), text


def test_a_special_token_begins_a_tag() -> None:
    for trigger in (None, 1):
        grammar = compiled(tagged_output([Tag([1, "f"], {"type": "integer"}, [3])], trigger=trigger))
        matcher = grammar.matcher()
        assert 1 in allowed(matcher)
        assert 3 not in allowed(matcher)
        ids = [1, *tokenizer().encode("f12", add_special_tokens=False)]
        assert [matcher.accept(token) for token in ids] == [None] * len(ids)
        assert 3 in allowed(matcher)
        assert 1 not in allowed(matcher)
        assert matcher.accept(3) is None
        assert 1 in allowed(matcher)
        assert EOS in allowed(matcher)
    with pytest.raises(ValueError, match="does not begin with the trigger"):
        tagged_output([Tag(["a"], {})], trigger="b")


def makers() -> dict[str, Backend]:
    """Return tokenizers as in Gemma, T5, BERT and the first GPT."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", '\u2581"', "a", "\u2581a", '"', "{", "}", ":", "1", ","]
    gemma = Backend(models.BPE({w: i for i, w in enumerate([*bytes_, *words])}, [], byte_fallback=True))
    gemma.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    t5 = Backend(models.Unigram([("<unk>", 0.0)] + [(word, -1.0) for word in words], 0, False))
    t5.decoder = decoders.Metaspace()
    bert = Backend(models.WordPiece({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    bert.decoder = decoders.WordPiece()
    gpt = Backend(models.BPE({"a": 0, "a</w>": 1, '"': 2}, []))
    gpt.decoder = decoders.BPEDecoder()
    return {"gemma": gemma, "t5": t5, "bert": bert, "gpt": gpt}


@pytest.mark.parametrize("name", ["gemma", "t5", "bert", "gpt"])
def test_other_kinds_of_tokenizers(name: str) -> None:
    backend = makers()[name]
    backend.add_special_tokens(["</s>"])
    own = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    size = own.vocab_size + 5
    compiler = GrammarCompiler(Vocabulary(own, size, own.eos_token_ids), lambda seconds: None)
    if name in ("bert", "gpt"):
        with pytest.raises(RequestError, match="tokens whose text depends on other tokens"):
            compiler.compile(JSON_OBJECT, "test")
        return
    matcher = compiler.compile(JSON_OBJECT, "test").matcher()
    text = '{"a": 1, "aa": "a a"}' if name == "t5" else '{"a": 1, "b\n": "\u00e9"}'.replace("\n", " ")
    ids = []
    rest = text.encode()
    while rest:
        bits = ceilings(token_masks([matcher]), size, torch.device("cpu"))[0]
        following = [
            i for i in (bits > 0).nonzero()[:, 0].tolist() if rest.startswith(own.token_bytes(i)) and own.token_bytes(i)
        ]
        ids.append(max(following, key=lambda i: len(own.token_bytes(i))))
        assert matcher.accept(ids[-1]) is None
        rest = rest.removeprefix(own.token_bytes(ids[-1]))
    assert matcher.finished
    assert own.decode(ids) == text


def test_a_sequence_has_a_matcher_of_its_own() -> None:
    params = sampling(grammar=compiled(GrammarSpec.choice(["ab", "ac"])))
    first, second = (params.grammar.matcher() for _ in range(2))  # type: ignore[union-attr]
    first.accept(tokenizer().encode("a", add_special_tokens=False)[0])
    assert allowed(first) != allowed(second)
