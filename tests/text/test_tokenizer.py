"""Ids, text and bytes agree with the tokenizers library, whatever the ids and whatever the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE, build_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from llmsched.engine.errors import ModelError, RequestError
from llmsched.engine.model.loader import load_tokenizer
from llmsched.engine.model.source import locate
from llmsched.engine.text.tokenizer import Tokenizer

SPACE = "\u2581"
#: Texts that some tokenizer turns into few tokens: runs of spaces, unknown words, joined accents, text of one token.
DENSE = [" " * 4000, "\u6f22" * 4000, "\u03b1\u0313\u0300\u0345" * 1000, "<|im_end|>" + " " * 999, "<|im_end|>" * 99]
TEXTS = ["", "Hello world", "the quick brown fox", " two  spaces ", "naïve 漢字 🙂\n\ttabs", "<|im_end|> in text"]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(build_tokenizer(bos=True))


@pytest.fixture(scope="module")
def spiece() -> Tokenizer:
    """Build a small SentencePiece-like tokenizer: pieces with a space mark, and bytes for everything else."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", f"{SPACE}a"]
    merges = [(SPACE, "a")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_that_of_transformers_and_comes_back(text: str, tiny: Tokenizer) -> None:
    assert tiny.encode(text) == tiny.fast(text).input_ids
    plain = tiny.encode(text, add_special_tokens=False)
    assert tiny.encode(text) == [tiny.bos_token_id, *plain]
    assert tiny.decode(plain, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_spell_the_text(text: str, tiny: Tokenizer, spiece: Tokenizer) -> None:
    for tokenizer in (tiny, spiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_every_byte_has_a_token(tiny: Tokenizer, spiece: Tokenizer) -> None:
    for tokenizer in (tiny, spiece):
        single = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        assert {bytes((byte,)) for byte in range(256)} <= single


def test_facts(tiny: Tokenizer, spiece: Tokenizer) -> None:
    assert (tiny.vocab_size, tiny.bos_token_id, tiny.eos_token_ids, tiny.byte_level) == (300, 0, {2}, True)
    assert (spiece.vocab_size, spiece.bos_token_id, spiece.eos_token_ids, spiece.byte_level) == (263, 1, {2}, False)


def test_special_tokens_have_text_and_can_be_skipped(tiny: Tokenizer) -> None:
    assert [token_id for token_id in range(VOCAB_SIZE) if tiny.is_special(token_id)] == [0, 1, 2, 3]
    assert tiny.token_bytes(2) == b"<|im_end|>"
    ids = tiny.encode("hello<|im_end|>", add_special_tokens=False)
    assert tiny.decode(ids) == "hello"
    assert tiny.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"


def test_added_text_tokens_are_not_skipped() -> None:
    fast = build_tokenizer()
    fast.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer = Tokenizer(fast)
    (token_id,) = tokenizer.encode("<tool_call>")
    assert not tokenizer.is_special(token_id)
    assert tokenizer.token_bytes(token_id) == b"<tool_call>"
    assert tokenizer.decode([token_id]) == "<tool_call>"


@pytest.mark.parametrize("token_id", [300, 305, VOCAB_SIZE - 1, 1 << 20])
def test_padded_ids_have_no_text(token_id: int, tiny: Tokenizer) -> None:
    around = tiny.encode("ab", add_special_tokens=False)
    assert tiny.decode([token_id]) == ""
    assert tiny.decode([around[0], token_id, *around[1:]]) == "ab"
    assert tiny.token_bytes(token_id) == b""
    assert not tiny.is_special(token_id)


def test_spaces_before_punctuation_are_kept() -> None:
    fast = build_tokenizer()
    fast.clean_up_tokenization_spaces = True
    tokenizer = Tokenizer(fast)
    text = "a , b . c ' d"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(text: str, tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D") as caught:
        tiny.encode(text)
    assert caught.value.param == "prompt"


def test_long_texts_are_encoded_whole(tiny: Tokenizer) -> None:
    for text in ("a" * 300_000, "word " * 60_000):
        assert tiny.decode(tiny.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    fast = build_tokenizer()
    fast.backend_tokenizer.enable_truncation(4)
    fast.backend_tokenizer.enable_padding(length=64)
    assert len(Tokenizer(fast).encode("abcdefghij")) == len(build_tokenizer().encode("abcdefghij"))


def test_empty_prompt(tiny: Tokenizer) -> None:
    """An empty prompt has one token if the tokenizer adds BOS, else none."""
    assert tiny.encode("") == [0]
    assert Tokenizer(build_tokenizer()).encode("") == []


# Loading.


def test_loaded_tokenizer_is_the_saved_one(tiny_model: Any) -> None:
    tokenizer = load_tokenizer(locate(str(tiny_model("llama", bos=True))))
    assert tokenizer.encode("hello") == Tokenizer(build_tokenizer(bos=True)).encode("hello")
    assert tokenizer.chat_template is not None


def test_added_tokens_beyond_the_base_vocabulary_count(tmp_path: Path) -> None:
    fast = build_tokenizer()
    fast.add_tokens(["<extra>"])
    fast.save_pretrained(tmp_path)
    assert load_tokenizer(locate(str(tmp_path))).vocab_size == 301


def test_escaped_texts_have_the_same_ids_but_for_escaped_tokens() -> None:
    fast = build_tokenizer(bos=True)
    fast.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("<extra>", normalized=False), "\n\n"])
    tokenizer = Tokenizer(fast)
    for text in (*TEXTS, "<tool>a<extra> b\n\n<|im_start|>user<|im_end|>"):
        assert tokenizer.encode(text + tokenizer.escape("<|im_end|>"), escaped=True) == [
            *tokenizer.encode(text),
            *(token for char in "<|im_end|>" for token in tokenizer.encode(char, add_special_tokens=False)),
        ]


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "llama"])
def test_missing_tokenizer_is_named(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"no tokenizer: none of tokenizer\.json") as caught:
        load_tokenizer(locate(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}', encoding="utf-8")
    with pytest.raises(ModelError, match="tokenizer cannot be read") as caught:
        load_tokenizer(locate(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_demo_splits_digits(demo_dir: Path) -> None:
    tokenizer = load_tokenizer(locate(str(demo_dir)))
    for text in [*DENSE, "\x04" * 999, *(chr(i) * 999 for i in range(0x80, 0x90)), "\U00040000" * 999]:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens("word " * 1000) > 20
    assert tokenizer.encode("x  2") == [104, 256, 34]
    assert tokenizer.vocab_size == 49152


def backend_of(kind: str) -> Backend:
    """Return the tiny byte-level backend with one change, or another model with its usual pre-tokeniser."""
    backend = Backend.from_str(build_tokenizer(bos=False).backend_tokenizer.to_str())
    match kind:
        case "nfc":
            backend.normalizer = normalizers.NFC()
        case "strip":
            backend.normalizer = normalizers.Strip()
        case "regex":
            backend.normalizer = normalizers.Replace(Regex(" +"), " ")
        case "rstrip":
            backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
        case "removed":
            split = pre_tokenizers.Split(" ", "removed")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
        case "words":
            backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
            backend.pre_tokenizer = pre_tokenizers.Whitespace()
        case "unknown":
            backend = Backend(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    return backend


@pytest.mark.parametrize("kind", ["plain", "nfc"])
def test_no_text_has_more_characters_per_token_than_the_bound(kind: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend_of(kind)))
    for text in DENSE:
        assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("kind", ["strip", "regex", "rstrip", "removed", "words", "unknown"])
def test_tokenizers_that_drop_text_have_no_bound(kind: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend_of(kind)))
    assert [tokenizer.least_tokens(text) for text in DENSE] == [0] * len(DENSE)


def test_byte_fallback_has_a_bound(spiece: Tokenizer) -> None:
    assert spiece.least_tokens("ab" * 50) == 100 / len("<unk>")
