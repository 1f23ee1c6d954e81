"""Conversion between text and token ids with the tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from llmsched.engine.errors import RequestError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

_SPIECE_SPACE = "\u2581"
#: Mark that `Tokenizer.escape` puts between characters. Unicode reserves its two characters for use inside programs.
_MARK = "\ufdd0\ufdd1"
#: Byte-fallback token of SentencePiece.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: Decoders that give a token the same text wherever it stands, but for a space at the beginning.
_JOINING = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """Thread-safe tokenizer of one model."""

    def __init__(self, fast: PreTrainedTokenizerBase) -> None:
        self.fast = fast
        self.backend: tokenizers.Tokenizer = fast.backend_tokenizer
        # tokenizer.json may enable truncation and padding for training; truncation would silently cut prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        #: The model's vocabulary may be larger.
        self.vocab_size: int = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id: int | None = fast.bos_token_id
        #: The tokenizer's own EOS id; ModelInfo has all EOS ids.
        self.eos_token_ids = frozenset[int]() if fast.eos_token_id is None else frozenset({int(fast.eos_token_id)})
        self._added = self.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)
        self._special = sorted(
            (token.content for token in self._added.values() if token.special), key=len, reverse=True
        )
        decoders = _steps(self.backend.decoder)
        #: True if tokens are written in GPT-2's byte-level alphabet.
        self.byte_level = any(part["type"] == "ByteLevel" for part in decoders)
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in decoders)
        #: True if the text of token ids is the text of their joined bytes, but for a space at its beginning.
        self.joins_bytes = bool(decoders) and {part["type"] for part in decoders} <= _JOINING
        self._spiece = any(_SPIECE_SPACE in json.dumps(part, ensure_ascii=False) for part in decoders)

    @property
    def chat_template(self) -> str | None:
        """Jinja template for chats. If there are several templates, the one named "default"."""
        template = self.fast.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True, *, escaped: bool = False) -> list[int]:
        """Return the token ids of `text`, in which special tokens are recognised.

        If `add_special_tokens` is True, the special tokens that the model expects around a text are added, often only
        BOS. If `escaped` is True, tokens marked by `escape(...)` are encoded as plain text. Raises RequestError for a
        lone surrogate.
        """
        check_unicode(text, "prompt")
        backend = self._unescaping if escaped and _MARK in text else self.backend
        # Unlike the backend's `encode`, this call releases the interpreter lock and computes no offsets.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def escape(self, text: str, also: Iterable[str] = ()) -> str:
        """Mark special tokens and all of `also`, so that `encode(..., escaped=True)` reads them as plain text."""
        for token in (_MARK, *self._special, *also):
            if token in text:
                text = text.replace(token, "".join(char + _MARK for char in token))
        return text

    def written_tokens(self, text: str) -> list[str]:
        """Return the added tokens in `text` that are neither special nor blank, longest first."""
        plain = (token.content for token in self._added.values() if not token.special)
        return sorted((token for token in plain if token in text and token.strip()), key=len, reverse=True)

    @cached_property
    def _unescaping(self) -> tokenizers.Tokenizer:
        # This copy of the backend removes the marks of `escape` after it has recognised added tokens.
        # A backend first looks for added tokens in the raw text. Then it normalises the text between them, where the
        # copy removes the marks. Last, it looks for the added tokens that are declared as normalised. In the copy, only
        # blank tokens are declared so. Thus a token that was marked is not recognised after its marks are gone.
        from tokenizers import AddedToken, Tokenizer, normalizers

        own = self.backend.normalizer
        copy: tokenizers.Tokenizer = Tokenizer(self.backend.model)  # shared: copying a large model takes a second
        copy.normalizer = normalizers.Sequence([normalizers.Replace(_MARK, ""), *([own] if own is not None else [])])
        for part in ("pre_tokenizer", "post_processor"):
            if (step := getattr(self.backend, part)) is not None:
                setattr(copy, part, step)
        copy.add_tokens(
            [
                AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and not token.content.strip(" \t\n" + _SPIECE_SPACE),
                )
                for _, token in sorted(self._added.items())  # in the order that gives them the same ids
            ]
        )
        return copy

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Unknown ids are skipped. Bytes that form no character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or b"" for an unknown id."""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.byte_level:
            alphabet = _byte_of_char()
            return bytes(alphabet[char] for char in token) if alphabet.keys() >= set(token) else str(token).encode()
        if token_id in self._added:
            return str(token).encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (token.replace(_SPIECE_SPACE, " ") if self._spiece else token).encode()

    def vocabulary(self, size: int) -> list[bytes]:
        """Return the bytes of the tokens 0 to `size` - 1, b"" for unknown ids."""
        return [self._token_bytes(token_id) for token_id in range(size)]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens in `text`, without encoding it. 0: no bound is known."""
        longest, dropped = self._token_limits
        if longest is None:
            return 0
        encoded = text.replace(_MARK, "").encode()
        return -(-len(encoded.translate(None, dropped) if dropped else encoded) // longest)

    @cached_property
    def _token_limits(self) -> tuple[int | None, bytes]:
        # The result is the largest number of bytes that one token can stand for, and the bytes that have no token.
        # The tokenizer drops bytes without a token. The number is None except for a BPE tokenizer that keeps all other
        # bytes. Other tokenizers may turn several unknown characters into one token, or drop characters.
        vocab = self.backend.get_vocab(with_added_tokens=True)
        normalizer, pre_tokenizer = _steps(self.backend.normalizer), _steps(self.backend.pre_tokenizer)
        kinds = {step["type"] for step in normalizer}
        names = _byte_of_char() if self.byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
        dropped = bytes(byte for name, byte in names.items() if name not in vocab)
        keeps_bytes = type(self.backend.model).__name__ == "BPE" and not (dropped and kinds)
        if self.byte_level:
            keeps_bytes &= "ByteLevel" in kinds | {step["type"] for step in pre_tokenizer}
        else:
            keeps_bytes &= not dropped
        strips = any(token.lstrip or token.rstrip for token in self._added.values())
        if not keeps_bytes or strips or not all(map(_keeps_text, normalizer + pre_tokenizer)):
            return None, b""
        # NFC and NFKC shorten no text to less than a quarter of its bytes.
        shortened = 4 if kinds & {"NFC", "NFKC"} else 1
        return shortened * max(len(self.token_bytes(i)) for i in vocab.values()), dropped

    def is_special(self, token_id: int) -> bool:
        """Return True if decode(skip_special_tokens=True) omits this token."""
        return token_id in self._special_ids


def _steps(part: Any) -> list[dict[str, Any]]:
    if part is None:
        return []
    steps = [json.loads(part.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        inner = ("normalizers", "pretokenizers", "decoders")
        steps = [each for step in steps for each in next((step[name] for name in inner if name in step), [step])]
    return steps


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return True if a normalizer or pre-tokenizer with the settings `step` is known to drop no characters."""
    match step["type"]:
        case "Replace":
            return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
        case "Split" | "Punctuation":
            return bool(step["behavior"] != "Removed")
        case kind:
            return kind in ("NFC", "NFKC", "NFD", "NFKD", "Prepend", "ByteLevel", "Digits", "Metaspace")


def check_unicode(text: str, param: str) -> None:
    """Raise RequestError for the parameter `param` if `text` cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            param,
            f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "only valid Unicode text is allowed",
        ) from error


@cache
def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte-level alphabet stands for."""
    # Printable Latin-1 characters stand for their own bytes, characters from U+0100 on for the other bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet
