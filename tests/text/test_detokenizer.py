"""The detokenizer against the tokenizers library: the pieces always join to what decoding all ids gives."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import build_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from llmsched.engine.text.detokenizer import Detokenizer
from llmsched.engine.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPIECE_WORDS = ["▁", "▁▁", "▁a", "a", "b", "▁the", "天", "é", ".", "▁.", "�", "▁�", "<", "0x41"]


def wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|tool call|>", special=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" two words", normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


def byte_level() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def byte_level_with_added() -> Tokenizer:
    backend = build_tokenizer().backend_tokenizer
    # The library reads an added token through the byte alphabet too, if all of its characters are in it.
    texts = ("<\uff5cbegin▁of▁sentence\uff5c>", "\ufffd", "naïve", "天ï", "Ġa")
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return wrap(backend)


def byte_fallback() -> Tokenizer:
    """Build a tokenizer as in Llama 2 and Mistral."""
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES, *SPIECE_WORDS])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend)


def byte_fallback_unstripped() -> Tokenizer:
    """Build a tokenizer as in Gemma."""
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES, *SPIECE_WORDS])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrap(backend)


def metaspace() -> Tokenizer:
    """Build a tokenizer as in T5 and XLM-R."""
    backend = Backend(models.Unigram([("<unk>", 0.0)] + [(word, -1.0) for word in SPIECE_WORDS], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend)


def word_piece() -> Tokenizer:
    """Build a tokenizer as in BERT: spaces between tokens, except before ## and punctuation."""
    words = ["[UNK]", "he", "##llo", "does", "n't", "##n", ".", ",", "'", "天", "not"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return wrap(backend)


def word_ends() -> Tokenizer:
    """Build a tokenizer as in the first GPT: </w> ends a word, and is a space except at the end of the text."""
    words = ["<unk>", "he", "llo</w>", "world</w>", "wor", ".</w>", "</w>"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder()
    return wrap(backend)


def no_decoder() -> Tokenizer:
    words = ["<unk>", "one", "two", "three"]
    return wrap(Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")))


MAKERS = [
    byte_level,
    byte_level_with_added,
    byte_fallback,
    byte_fallback_unstripped,
    metaspace,
    word_piece,
    word_ends,
    no_decoder,
]


@cache
def tokenizer_of(maker_index: int) -> Tokenizer:
    return MAKERS[maker_index]()


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("maker", range(len(MAKERS)), ids=[maker.__name__ for maker in MAKERS])
@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_text(maker: int, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(maker)
    last = tokenizer.vocab_size + 2
    token_id = st.one_of(st.integers(0, last), st.integers(max(0, last - 16), last))  # the last ones are the added ones
    ids = data.draw(st.lists(token_id, max_size=24))
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(raw=st.lists(st.sampled_from([0x41, 0x80, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xF5])))
@example(raw=[0xE2, 0x82])
@example(raw=[0xF0, 0x9F, 0x8D, 0x41])
def test_broken_utf8_is_replaced_as_the_library_does(raw: list[int]) -> None:
    tokenizer = tokenizer_of(0)
    token_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [token_of[bytes((byte,))] for byte in raw]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == bytes(raw).decode(errors="replace")


def test_a_character_is_returned_with_its_last_byte() -> None:
    tokenizer = tokenizer_of(0)
    ids = tokenizer.encode("天k🍋")
    assert pieces_of(tokenizer, ids) == ["", "", "天", "k", "", "", "", "🍋", ""]
    assert pieces_of(tokenizer, ids[:-1])[-1] == "\ufffd"


def test_a_run_of_byte_tokens_is_returned_as_a_whole() -> None:
    tokenizer = tokenizer_of(2)
    backend = tokenizer.backend
    ids = [backend.token_to_id(token) for token in ("▁a", "<0xE5>", "<0xA4>", "<0xA9>", "b")]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "天b", ""]


def test_a_replacement_character_of_the_model_is_not_held() -> None:
    tokenizer = tokenizer_of(1)
    ids = [*tokenizer.encode("q"), tokenizer.backend.token_to_id("\ufffd")]
    assert pieces_of(tokenizer, ids) == ["q", "\ufffd", ""]


def test_the_space_of_the_second_word_survives_a_special_token_before_it() -> None:
    tokenizer = tokenizer_of(2)
    backend = tokenizer.backend
    ids = [backend.token_to_id(token) for token in ("▁the", "<|end|>", "▁a")]
    assert pieces_of(tokenizer, ids) == ["the", "", " a", ""]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_demo_tokenizer(demo_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, demo_tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces_of(demo_tokenizer, ids)) == demo_tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", ["smile 🙂 family 👨‍👩‍👧 flag 🇫🇷", "天気 한국어", "e\u0301 n\u0303o", " two  spaces\ttab\n", "שלום"]
)
def test_demo_tokenizer_round_trip(demo_tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces_of(demo_tokenizer, demo_tokenizer.encode(text))) == text


@pytest.fixture(scope="module")
def demo_tokenizer(demo_dir: Path) -> Tokenizer:
    from llmsched.engine.model.loader import load_tokenizer
    from llmsched.engine.model.source import locate

    return load_tokenizer(locate(str(demo_dir)))
