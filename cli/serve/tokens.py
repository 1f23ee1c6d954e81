"""How single tokens are written in an answer: texts and bytes for log-probabilities, pieces of an echoed prompt."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from llmsched.cli.serve.prepare import PreparedPrompt
from llmsched.engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

#: JSON has no minus infinity; OpenAI writes this number for it.
_LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


class TokenWriter:
    """Texts of single tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=65536)(self._text)

    def _text(self, token_id: int) -> str:
        """The token alone; one that is no whole characters is written as OpenAI does, `bytes:\\xe2\\x82`."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> list[int]:
        """The token's bytes."""
        return list(self._tokenizer.token_bytes(token_id))

    def emitted(self, token_id: int, piece: str, skip_special_tokens: bool) -> list[int]:
        """The bytes that a generated token contributes to the text, so that those of all tokens decode to it.

        Byte-level tokens are exactly their bytes. Others depend on their place (a leading space is stripped, a run of
        byte-fallback tokens is one character), which `piece`, the text that the token added, accounts for.
        """
        if skip_special_tokens and self._tokenizer.is_special(token_id):
            return []
        return self.raw(token_id) if self._tokenizer.byte_level else list(piece.encode())

    def prompt_pieces(self, prompt: PreparedPrompt) -> list[str]:
        """For each prompt token the text that it adds. Special tokens are part of it, but not the BOS that the
        tokenizer put before a text."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        first = prompt.token_ids[0]
        if prompt.text is not None and first == self._tokenizer.bos_token_id:
            added = not prompt.text.startswith(self._text(first))
            pieces = [""] if added else [detokenizer.push(first)]
        else:
            pieces = [detokenizer.push(first)]
        pieces += [detokenizer.push(token_id) for token_id in prompt.token_ids[1:]]
        pieces[-1] += detokenizer.flush()
        return pieces
