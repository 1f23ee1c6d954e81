"""Conversion of token ids to text, one token at a time."""

from __future__ import annotations

import codecs

from llmsched.engine.text.tokenizer import BYTE_TOKEN, Tokenizer


class Detokenizer:
    """Incremental detokenizer of one output.

    The texts that `push` returns, followed by that of `flush`, equal `tokenizer.decode(ids, skip_special_tokens)` for
    any ids. Only text that the next token may change is held back: the bytes of an incomplete character.

    With a byte-level tokenizer the text is the bytes of all tokens, decoded as UTF-8. Invalid bytes give the same text
    as in the tokenizers library: Python's `replace` and Rust's `from_utf8_lossy` both write one U+FFFD per maximal
    subpart (Unicode 15, section 3.9).

    With other tokenizers the new text is the difference between two decodes of the last few tokens. The library strips
    the space before the first token, so the decoded tokens begin with one whose text was already returned. The library
    decodes a run of byte-fallback tokens (<0xE2> <0x82> <0xAC>) as a whole, to one U+FFFD per byte if the run is not
    valid UTF-8, so a run is held back until another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add the next token and return the text that no later token can change."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if BYTE_TOKEN.fullmatch(token) else self._decode_pending()

    def flush(self) -> str:
        """Return the text held back. Call it at the end of the output; an incomplete character becomes U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._decode_pending() if self._pending else ""

    def _decode_pending(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        delta = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return delta
