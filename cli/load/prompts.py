"""Prompts of an exact length, the same for the same seed and never seen before for another.

A prompt is made when it is sent: what is kept of it is where it lies in endless random sequences, so that request k
needs none of those before it, and a load of many millions of tokens needs no memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsched.cli.load.traces.trace import Content, Message

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

#: Ids that nearly every vocabulary has and that are neither special nor single bytes.
COMMON_IDS = range(1_000, 30_000)

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back face"
)

#: Words that are one token, with the blank before them, in nearly every vocabulary.
WORDS = tuple(_WORDS.split())

#: Which family of random sequences a part of a prompt is from.
PREFIX, OWN, BLOCK = range(3)


class Prompt(Protocol):
    """A prompt as token ids or, for targets that take none, as text. Exactly one of the two is not None.

    Both are made anew at every look; who needs one twice keeps it.
    """

    @property
    def token_ids(self) -> list[int] | None: ...

    @property
    def text(self) -> str | None: ...

    @property
    def messages(self) -> list[Message]:
        """The text as messages of a chat."""
        ...


class Encode(Protocol):
    """How a target that takes token ids sees text."""

    def prompt(self, content: Content) -> list[int]:
        """The token ids of a prompt."""
        ...

    def count(self, text: str) -> int:
        """Tokens of an answer."""
        ...


class Part(NamedTuple):
    """The first `length` symbols of the endless random sequence `number` of a family."""

    family: int
    number: int
    length: int


class Vocabulary:
    """What prompts are drawn from: token ids, or words where `ids` is None."""

    def __init__(self, ids: Sequence[int] | None) -> None:
        self.of_words = ids is None
        self._symbols = np.array(WORDS if ids is None else ids, dtype=object)  # the objects are shared, not copied

    def draw(self, seed: int, parts: Sequence[Part]) -> list[Any]:
        """The symbols of the parts, one after the other."""
        drawn: list[Any] = self._symbols[_indices(seed, parts, len(self._symbols))].tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class RandomPrompt:
    """Random symbols: prompts that have a part in common begin with the same symbols there."""

    seed: int
    parts: tuple[Part, ...]
    vocabulary: Vocabulary = field(compare=False, repr=False)

    @property
    def token_ids(self) -> list[int] | None:
        return None if self.vocabulary.of_words else self.vocabulary.draw(self.seed, self.parts)

    @property
    def text(self) -> str | None:
        return " ".join(self.vocabulary.draw(self.seed, self.parts)) if self.vocabulary.of_words else None

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.text}]


class EncodedPrompt:
    """A prompt whose token ids are known."""

    text = None

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int32)  # a fifth of the memory of a list

    @property
    def token_ids(self) -> list[int] | None:
        ids: list[int] = self._token_ids.tolist()
        return ids

    @property
    def messages(self) -> list[Message]:
        raise TypeError("a prompt of token ids has no messages")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt that is sent as the text it is."""

    content: Content
    token_ids = None

    @property
    def text(self) -> str | None:
        return self.content.text

    @property
    def messages(self) -> list[Message]:
        return list(self.content.messages or [{"role": "user", "content": self.content.text}])


class TokenizerEncode:
    """Text as a model's own tokenizer sees it; messages go through the chat template if the model has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, content: Content) -> list[int]:
        """Raises RequestError where the template refuses the messages."""
        from llmsched.engine.text.chat import render_chat

        if content.messages is not None and self._tokenizer.chat_template is not None:
            return render_chat(self._tokenizer, content.messages)
        return self._tokenizer.encode(content.text)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class WordEncode:
    """Text where no tokenizer is at hand: each word is a token, always the same one of `ids` for the same word."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def prompt(self, content: Content) -> list[int]:
        return [self._ids[zlib.crc32(word.encode()) * len(self._ids) >> 32] for word in content.words]

    def count(self, text: str) -> int:
        return len(text.split())


def usable_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The ids of a vocabulary that stand for text."""
    size = min(tokenizer.vocab_size, vocab_size)
    return [
        token_id for token_id in range(size) if not tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id)
    ]


def _indices(seed: int, parts: Sequence[Part], size: int) -> NDArray[np.int64]:
    """Indices below `size`, each a function of seed, family, number and place alone (a counter-based generator)."""
    families, numbers, lengths = np.array(parts, dtype=np.uint64).reshape(-1, 3).T
    keys = _mix(_mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + families) + numbers)
    counts = lengths.astype(np.int64)
    places = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    bits = _mix(np.repeat(keys, counts) + places.astype(np.uint64) * _GOLDEN)
    drawn: NDArray[np.int64] = (((bits >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    return drawn


#: Constants of SplitMix64 (Steele, Lea, Flood 2014): the odd number next to 2^64 / golden ratio, and its finaliser.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit numbers so that near ones end far apart; arithmetic is modulo 2^64."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
