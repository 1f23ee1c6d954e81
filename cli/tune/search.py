"""Which settings to try. Pure."""

from __future__ import annotations

from llmsched.engine.errors import LlmschedError


def powers_of_two(low: int, high: int) -> list[int]:
    """Both bounds and the powers of two between them, ascending, each once.

    Raises LlmschedError unless 1 <= low <= high.
    """
    if not 1 <= low <= high:
        raise LlmschedError(f"the sweep from {low} to {high} is empty; the lower bound is 1 or more, the upper no less")
    between = (1 << power for power in range(low.bit_length(), high.bit_length()))
    return sorted({low, *between, high})


def largest_useful(concurrency: int, input_len: int) -> int:
    """The power of two that holds all prompts of a load at once: a larger step would find nothing to fill it with."""
    return 1 << (concurrency * input_len - 1).bit_length()
