"""Prompts: given texts, given token ids, or random tokens or words, of which only the Parts are stored."""

from __future__ import annotations

import zlib
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsched.cli.load.traces.trace import Content, Message
from llmsched.engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

#: Token ids that nearly every vocabulary has, and that are neither special tokens nor single bytes.
COMMON_IDS = range(1_000, 30_000)

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back face"
)

#: Words that, with a space before them, are one token in nearly every vocabulary.
WORDS = tuple(_WORDS.split())

#: Families of random sequences. A part of a prompt is a prefix of all prompts, the prompt's own, or a shared block.
PREFIX, OWN, BLOCK = range(3)


class Prompt:
    """Prompt of token ids (`text` is None) or text (`token_ids` is None). Each access may compute the value again."""

    __slots__ = ()

    @property
    def length(self) -> int:
        """Length in tokens, where each word of a text counts as one."""
        raise NotImplementedError

    @property
    def content_key(self) -> tuple[Part, ...] | bytes:
        raise NotImplementedError

    @property
    def token_ids(self) -> list[int] | None:
        return None

    @property
    def text(self) -> str | None:
        return None

    @property
    def messages(self) -> list[Message]:
        """Text of the prompt as messages of a chat. Raises TypeError for a prompt of token ids."""
        if (text := self.text) is None:
            raise TypeError("a prompt of token ids has no messages")
        return [{"role": "user", "content": text}]


class TextEncoder(Protocol):
    def prompt(self, content: Content) -> list[int]: ...

    def count(self, text: str) -> int: ...


class Part(NamedTuple):
    """Part of a prompt: the first `length` tokens or words of the endless random sequence (`family`, `number`)."""

    family: int  # PREFIX, OWN or BLOCK
    number: int
    length: int


class Vocabulary:
    """Vocabulary of random prompts: token ids, or words if `ids` is None."""

    def __init__(self, ids: Sequence[int] | None) -> None:
        self.of_words = ids is None
        self._symbols = np.array(WORDS if ids is None else ids, dtype=object)  # the objects are shared, not copied

    def draw(self, seed: int, parts: Sequence[Part]) -> list[Any]:
        """Return the tokens or words of all parts, in order. With the same seed, equal parts give equal tokens."""
        families, numbers, lengths = np.array(parts, dtype=np.uint64).reshape(-1, 3).T
        keys = _mix(_mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + families) + numbers)
        counts = lengths.astype(np.int64)
        places = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        bits = _mix(np.repeat(keys, counts) + places.astype(np.uint64) * _GOLDEN)
        indices = ((bits >> np.uint64(32)) * np.uint64(len(self._symbols))) >> np.uint64(32)
        drawn: list[Any] = self._symbols[indices.astype(np.int64)].tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class RandomPrompt(Prompt):
    """Prompt of random tokens or words. Equal parts of prompts with the same seed have the same tokens."""

    seed: int
    parts: tuple[Part, ...]
    vocabulary: Vocabulary = field(compare=False, repr=False)

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def content_key(self) -> tuple[Part, ...]:
        return self.parts

    @property
    def token_ids(self) -> list[int] | None:
        return None if self.vocabulary.of_words else self.vocabulary.draw(self.seed, self.parts)

    @property
    def text(self) -> str | None:
        return " ".join(self.vocabulary.draw(self.seed, self.parts)) if self.vocabulary.of_words else None


class EncodedPrompt(Prompt):
    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int32)  # a fifth of the memory of a list

    @property
    def length(self) -> int:
        return len(self._token_ids)

    @property
    def content_key(self) -> bytes:
        return self._token_ids.tobytes()

    @property
    def token_ids(self) -> list[int] | None:
        ids: list[int] = self._token_ids.tolist()
        return ids


@dataclass(frozen=True, slots=True)
class TextPrompt(Prompt):
    content: Content

    @property
    def length(self) -> int:
        return len(self.content.words)

    @property
    def content_key(self) -> bytes:
        return self.content.text.encode()

    @property
    def text(self) -> str | None:
        return self.content.text

    @property
    def messages(self) -> list[Message]:
        return list(self.content.messages or [{"role": "user", "content": self.text}])


def repeated_share(prompts: Iterable[Prompt]) -> float:
    """Return the share of prompt tokens that an unlimited prefix cache, empty at first, could serve."""
    keys = sorted((prompt.content_key for prompt in prompts), key=lambda key: (isinstance(key, bytes), key))
    sizes = [len(key) if isinstance(key, bytes) else sum(part.length for part in key) for key in keys]
    return sum(_common(one, other) for one, other in pairwise(keys)) / max(1, sum(sizes))


def _common(one: tuple[Part, ...] | bytes, other: tuple[Part, ...] | bytes) -> int:
    if isinstance(one, bytes) and isinstance(other, bytes):
        return bisect(range(1, min(len(one), len(other)) + 1), False, key=lambda end: one[:end] != other[:end])
    common = 0
    for part, same in zip(one, other, strict=False):
        if not (isinstance(part, Part) and isinstance(same, Part)) or part[:2] != same[:2]:
            break
        common += min(part.length, same.length)
        if part.length != same.length:
            break
    return common


class TokenizerEncoder:
    """Encoder that uses a model's tokenizer and, for messages, the tokenizer's chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def prompt(self, content: Content) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if the template rejects the messages."""
        from llmsched.engine.text.chat_template import render_chat

        if content.messages is not None and self.tokenizer.chat_template is not None:
            return render_chat(self.tokenizer, content.messages)
        return self.tokenizer.encode(content.text)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def load_encoder(model: str) -> TokenizerEncoder:
    """Return an encoder with the tokenizer of `model`. Raises ConfigError if the tokenizer cannot be loaded."""
    from llmsched.engine.model.loader import load_tokenizer
    from llmsched.engine.model.source import locate

    try:
        return TokenizerEncoder(load_tokenizer(locate(model)))
    except ModelError as problem:
        raise ConfigError("tokenizer", problem.message) from problem


class WordEncoder:
    """Encoder without a tokenizer. It maps each word to one of `ids`, and equal words to the same id."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def prompt(self, content: Content) -> list[int]:
        return [self._ids[zlib.crc32(word.encode()) * len(self._ids) >> 32] for word in content.words]

    def count(self, text: str) -> int:
        return len(text.split())


def usable_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the token ids below `vocab_size` that stand for text, without special tokens."""
    size = min(tokenizer.vocab_size, vocab_size)
    return [
        token_id for token_id in range(size) if not tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id)
    ]


#: Constants of SplitMix64 (Steele, Lea, Flood 2014): the odd number next to 2^64 / golden ratio, and the multipliers of
#: its finaliser.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
