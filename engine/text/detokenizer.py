"""Conversion of token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from llmsched.engine.text.tokenizer import BYTE_TOKEN, Tokenizer


class Detokenizer:
    """Incremental detokenizer of one output.

    The texts from `push(...)` and `flush()` together equal `tokenizer.decode(ids, skip_special_tokens)`, except that
    the special tokens in `shown_ids` are never skipped.
    """

    # For a byte-level tokenizer, the text is the bytes of all tokens, decoded as UTF-8. The tokenizers library gives
    # the same text for invalid bytes: Python's `replace` and Rust's `from_utf8_lossy` both write one U+FFFD per maximal
    # subpart (Unicode 15, section 3.9). For other tokenizers, the last few tokens are decoded with and without the new
    # token, and the new text is the difference. Both decodes begin with a token whose text was already returned,
    # because the library strips the space before the first token. The library decodes a run of byte-fallback tokens
    # (<0xE2> <0x82> <0xAC>) as a whole, and writes one U+FFFD per byte if the run is not valid UTF-8. So `push` holds
    # back a run until another token ends it.

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, shown_ids: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add the next token. Return the new text that later tokens cannot change."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._shown_ids:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if BYTE_TOKEN.fullmatch(token) else self._decode_pending()

    def flush(self) -> str:
        """Return the text that `push(...)` still holds back at the end. An incomplete character becomes U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._decode_pending() if self._pending else ""

    def _decode_pending(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        delta = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return delta
