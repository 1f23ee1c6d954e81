"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one output while it grows.

    Whatever the tokens are, the pieces that `push` returns and the rest from `flush` join to
    `tokenizer.decode(ids, skip_special_tokens)`; nothing that was returned is ever taken back. Held back is only text
    that the next token may still change: the bytes of an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder: _Decoder = _ByteDecoder(tokenizer) if tokenizer.byte_level else _WindowDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.push(token_id)

    def flush(self) -> str:
        """The text still held back, at the end of the output: an incomplete character becomes U+FFFD."""
        return self._decoder.flush()


class _ByteDecoder:
    """Byte-level tokenizers: the text is the UTF-8 of the tokens' bytes, one after the other.

    Python's `replace` and Rust's `from_utf8_lossy` both write one U+FFFD per maximal subpart of a broken character
    (Unicode 15, section 3.9), so this is exactly what the tokenizers library decodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """All other tokenizers: the difference between two decodes of the last few tokens.

    Such a decoder treats the first token differently (it strips the space before it), so the window begins with a token
    that was emitted before and that has a place in the vocabulary. A run of byte-fallback tokens (<0xE2> <0x82> <0xAC>)
    is decoded as a whole, and all its bytes become U+FFFD if it is no valid UTF-8: it is held until a token of another
    kind ends it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._decode = tokenizer.decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._emit()

    def flush(self) -> str:
        return self._emit() if self._pending else ""

    def _emit(self) -> str:
        text = self._decode(self._context + self._pending, skip_special_tokens=False)
        delta = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context, skip_special_tokens=False)
        return delta
