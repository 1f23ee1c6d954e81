"""Tokenizers built from GGUF vocabularies cut and merge text as the original ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import write_gguf
from tiny_models import build_model, build_tokenizer
from tokenizers import pre_tokenizers

from llmsched.engine.errors import ModelError
from llmsched.engine.model.gguf_file import GGUFFile
from llmsched.engine.model.gguf_tokenizer import SPLITS, gguf_tokenizer
from llmsched.engine.model.loader import load_config, load_tokenizer
from llmsched.engine.model.source import locate
from llmsched.engine.text.chat_template import render_chat
from llmsched.engine.text.tokenizer import Tokenizer

NORMAL, CONTROL, TEXT = (
    int(kind) for kind in (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
)
UNKNOWN, BYTE = int(gguf.TokenType.UNKNOWN), int(gguf.TokenType.BYTE)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = "\u2581"


def byte_level(
    pre: str | None, *, merged: tuple[str, ...] = (), merges: tuple[str, ...] = (), **metadata: Any
) -> Tokenizer:
    """Build a byte-level vocabulary: <s>, </s>, <tool_call> (marked as control), 256 bytes, and `merged` tokens."""
    tokens = ["<s>", "</s>", "<tool_call>", *ALPHABET, *merged]
    values = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()},
    }
    return Tokenizer(gguf_tokenizer(GGUFFile(Path("tiny.gguf"), values, {})))


def spiece(pieces: dict[str, float], **metadata: Any) -> Tokenizer:
    """Build a SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, and `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()},
    }
    return Tokenizer(gguf_tokenizer(GGUFFile(Path("tiny.gguf"), values, {})))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the parts into which `text` is split before tokens are merged."""
    backend = tokenizer.backend
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    cuts = [offsets for _, offsets in backend.pre_tokenizer.pre_tokenize_str(normal)]
    return [normal[start:end] for start, end in cuts]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


#: How "It's 1234\n\n  next don't HELLOworld" is split.
CUTS = {
    "gpt-2": ["It", "'s", " 1234", "\n\n ", " next", " don", "'t", " HELLOworld"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "\n\n ", " next", " don", "'t", " HELLOworld"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "\n\n", " ", " next", " don", "'t", " HELLOworld"],
    "llama-bpe": ["It", "'s", " ", "123", "4", "\n\n", " ", " next", " don", "'t", " HELLOworld"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "\n\n", " ", " next", " don", "'t", " HELLOworld"],
    "gpt-4o": ["It's", " ", "123", "4", "\n\n", " ", " next", " don't", " HELLOworld"],
}
CUTS["deepseek-llm"] = ["It", "'", "s", " ", "1234", "\n", "\n", " ", " next", " don", "'", "t", " HELLOworld"]
CUTS["deepseek-coder"] = [*CUTS["deepseek-llm"][:4], *"1234", *CUTS["deepseek-llm"][5:]]
SAME = {
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "deepseek-r1-qwen": "qwen2",
    "dbrx": "llama-bpe",
    "deepseek-v3": "llama-bpe",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_cut_as_the_family_does(pre: str) -> None:
    assert pieces_of(byte_level(pre), "It's 1234\n\n  next don't HELLOworld") == CUTS[SAME.get(pre, pre)]


@pytest.mark.parametrize("pre", SPLITS)
def test_decoding_restores_the_text(pre: str) -> None:
    tokenizer = byte_level(pre, merged=("he", "Ġt"), merges=("h e", "Ġ t"))
    text = "  the 12,345th\t\n\n naïve 漢字 🙂 don't\r\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone_before_spaces_are_merged() -> None:
    """Expect the two spaces of "x  2" as one token, without one before the digit."""
    merged, merges = ("ĠĠ", "Ġ2"), ("Ġ Ġ", "Ġ 2")
    assert tokens_of(byte_level("smollm", merged=merged, merges=merges), "x  2") == ["x", "ĠĠ", "2"]
    assert tokens_of(byte_level("gpt-2", merged=merged, merges=merges), "x  2") == ["x", "Ġ", "Ġ2"]


def test_qwen_composes_characters() -> None:
    qwen, other = byte_level("qwen2"), byte_level("gpt-2")
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    assert other.encode("e\u0301") != other.encode("\u00e9")


def test_qwens_tool_call_is_text_though_marked_as_control() -> None:
    qwen, other = byte_level("qwen2"), byte_level("smollm")
    assert qwen.encode("<tool_call>") == [2]
    assert qwen.decode([2]) == "<tool_call>"
    assert not qwen.is_special(2)
    assert other.decode([2]) == ""


def test_user_defined_tokens_are_text() -> None:
    tokens = ["<s>", "</s>", "<think>", *ALPHABET]
    types = [CONTROL, CONTROL, TEXT] + [NORMAL] * 256
    tokenizer = byte_level("smollm", tokens=tokens, token_type=types)
    assert tokenizer.encode("<think>") == [2]
    assert tokenizer.decode([2]) == "<think>"


def test_llama_takes_whole_words_without_merges() -> None:
    assert tokens_of(byte_level("llama-bpe", merged=("hello",)), "hello") == ["hello"]
    assert tokens_of(byte_level("qwen2", merged=("hello",)), "hello") == ["h", "e", "l", "l", "o"]


@pytest.mark.parametrize(
    ("pre", "metadata", "expected"),
    [
        ("llama-bpe", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("qwen2", {}, []),
        ("qwen2", {"add_bos_token": True}, [0]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [0, 1]),
    ],
)
def test_bos_and_eos_around_a_text(pre: str, metadata: dict[str, bool], expected: list[int]) -> None:
    assert byte_level(pre, **metadata).encode("") == expected


def test_named_tokens() -> None:
    tokenizer = byte_level("qwen2", padding_token_id=2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.fast.pad_token_id) == (0, {1}, 2)


# SentencePiece.

PIECES = {SPACE: -9.0, "a": -8.0, "b": -7.0, "c": -6.0, "ab": -3.0, "bc": -2.0, f"{SPACE}a": -4.0, f"{SPACE}bc": -1.0}


def test_the_best_score_is_merged_first() -> None:
    tokenizer = spiece(PIECES, add_space_prefix=False)
    assert tokens_of(tokenizer, "abc") == ["a", "bc"]
    assert tokens_of(tokenizer, "ab") == ["ab"]
    assert tokens_of(tokenizer, " a") == [f"{SPACE}a"]


def test_a_space_is_put_before_unless_the_file_says_no() -> None:
    assert tokens_of(spiece(PIECES), "bc a") == [f"{SPACE}bc", f"{SPACE}a"]
    assert tokens_of(spiece(PIECES, add_space_prefix=False), "bc a") == ["bc", f"{SPACE}a"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ["abc", "a  b", "naïve 漢\n", " abc"])
def test_bytes_stand_for_what_has_no_piece(text: str, prefix: bool) -> None:
    tokenizer = spiece(PIECES, add_space_prefix=prefix)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert spelled == (f" {text}" if prefix else text)


def test_sentencepiece_begins_with_bos() -> None:
    assert spiece(PIECES).encode("a")[0] == 1
    assert spiece(PIECES, add_bos_token=False).encode("a")[0] != 1


# Files.


@pytest.mark.parametrize(
    ("pre", "metadata", "message"),
    [
        ("jais", {}, "pre-tokenizer 'jais' is not supported; supported: gpt-2, olmo, smollm"),
        (None, {}, "pre-tokenizer None is not supported"),
        ("gpt-2", {"model": "rwkv"}, "tokenizer 'rwkv' is not supported; supported: gpt2"),
        ("gpt-2", {"tokens": []}, "no vocabulary"),
    ],
)
def test_unknown_kinds_are_refused(pre: str | None, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        byte_level(pre, **metadata)


def test_a_whole_file(tmp_path: Path) -> None:
    original = build_tokenizer()
    source = locate(str(write_gguf(tmp_path / "tiny.gguf", build_model("llama"), original, arch="llama")))
    tokenizer = load_tokenizer(source)
    text = "The quick brown fox<|im_end|> jumps"
    assert tokenizer.encode(text) == original.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    assert render_chat(tokenizer, messages) == render_chat(Tokenizer(original), messages)


def test_a_vocabulary_without_a_model_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.embedding_length", 64)
    writer.add_uint32("llama.feed_forward_length", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"lacks token_embd\.weight: it holds a vocabulary"):
        load_config(locate(str(tmp_path / "vocab.gguf")))


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.merges": ["absent missing"]},
        {"tokenizer.ggml.token_type": [1, 2]},
        {"tokenizer.ggml.eos_token_id": 99999},
        {"tokenizer.ggml.model": "llama"},
    ],
)
def test_a_damaged_vocabulary_is_named(metadata: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", build_model("llama"), build_tokenizer(), arch="llama", metadata=metadata)
    with pytest.raises(ModelError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(locate(str(path)))
    assert "\n" not in str(caught.value)
