"""Warnings about prompts that differ at the same early token, which defeats the prefix cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.kv.misses import SPREAD, WINDOW, PromptWatch
from llmsched.engine.metrics import EngineMetrics

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Number of admitted requests between two checks; a check takes milliseconds.
CHECK_EVERY = WINDOW // 2


class Example(NamedTuple):
    """Text of a prompt before and after the position at which prompts differ."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PromptChange:
    """Group of recent prompts that differ at one early token and are alike after it."""

    position: int
    count: int
    window: int
    examples: tuple[Example, Example] | None  # text of two of these prompts; None if prompts may not be quoted
    private: bool  # True if an example has a cache_salt; only the operator may see it then

    def __str__(self) -> str:
        quoted = ""
        if self.examples is not None:
            one, two = (f"{example.before!r} + {example.after!r}" for example in self.examples)
            quoted = f". Two examples: {one} and {two}"
        return (
            f"prompts change at token {self.position}: {self.count} of the last {self.window} requests differ there "
            f"and are alike after it, so the prefix cache cannot reuse what follows; move the part that changes (a "
            f"time, an id) behind the part that does not{quoted}"
        )


class PromptChanges:
    """Periodic check of recent prompts for an early token at which they differ.

    The check logs what it finds, unless the position is within SPREAD tokens of the last logged position. Prompt text
    is included only if `quote_prompts` is set.
    """

    def __init__(self, watch: PromptWatch, tokenizer: Tokenizer, metrics: EngineMetrics) -> None:
        self._watch = watch
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._next_check = CHECK_EVERY
        self._logged = -SPREAD
        self.quote_prompts = False

    def update(self) -> None:
        """Call `check()` if CHECK_EVERY requests have been admitted since the last check."""
        if self._watch.num_seen >= self._next_check:
            self.check()

    def check(self) -> PromptChange | None:
        """Check the latest prompts now. Return the change found, or None."""
        self._next_check = self._watch.num_seen + CHECK_EVERY
        found = self._watch.report()
        self._metrics.set("prefix_cache_changing_prompts", found.count / WINDOW if found is not None else 0)
        if found is None:
            return None
        cut = found.position - found.start
        examples = None
        if self.quote_prompts:
            one, two = (Example(self._text(ids[:cut]), self._text(ids[cut:])) for ids in found.examples)
            examples = (one, two)
        change = PromptChange(found.position, found.count, found.window, examples, found.private)
        if abs(change.position - self._logged) >= SPREAD:
            self._logged = change.position
            logger.warning("%s", change)
        return change

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
