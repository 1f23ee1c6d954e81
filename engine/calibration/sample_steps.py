"""Choice of the steps to measure: decodes, prefills and mixed steps within an engine's limits."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

#: Rows of a step: (context, new tokens) each.
Rows = tuple[tuple[int, int], ...]

#: Contexts in tokens, each up to a share of the longest sequence.
_CONTEXTS = ((64, 1 / 8), (512, 1 / 4), (2048, 1 / 2))


class StepLimits(NamedTuple):
    """Limits of an engine: tokens and sequences in a step, tokens in a sequence and in all blocks."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int

    @property
    def max_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def allow(self, rows: Rows) -> bool:
        """Return whether the engine could plan a step of these rows."""
        lengths = [context + tokens for context, tokens in rows]
        return (
            len(rows) <= self.max_num_seqs
            and sum(tokens for _, tokens in rows) <= self.max_num_batched_tokens
            and max(lengths) <= self.max_model_len
            and sum(lengths) <= self.kv_tokens
        )


def choose_steps(limits: StepLimits) -> dict[str, Rows]:
    """Return about twenty steps by name, fewer where the limits are tight."""
    short, middle, long = (max(1, min(tokens, int(share * limits.max_model_len))) for tokens, share in _CONTEXTS)
    most, largest = limits.max_rows, limits.max_num_batched_tokens
    quarter = max(1, largest // 4)
    counts = sorted({min(most, count) for count in (1, 4, 16, 64)} | {most})
    steps: list[Rows] = [((context, 1),) * count for count, context in product(counts, (short, middle, long))]
    sizes = sorted({min(16, largest), min(64, largest), quarter, max(1, largest // 2), largest})
    steps += [((0, tokens),) for tokens in sizes]
    steps += [((context, tokens),) for context, tokens in product((middle, long), (quarter, largest))]
    steps.append(((0, quarter),) * 4)
    for share, count, context in ((2, 4, middle), (1, 16, short), (4, 16, middle)):
        if largest // share > count:
            steps.append(((0, largest // share - count), *((context, 1),) * count))
    return {describe(rows): rows for rows in steps if limits.allow(rows)}


def describe(rows: Rows) -> str:
    """Name a step, for example "4 decodes of 512 + prefill of 124 after 0"."""
    decodes = [context for context, tokens in rows if tokens == 1]
    prefills = [row for row in rows if row[1] > 1]
    parts = []
    if decodes:
        parts.append(f"{len(decodes)} decode{'s' * (len(decodes) > 1)} of {decodes[0]}")
    for context, tokens in dict.fromkeys(prefills):
        times = prefills.count((context, tokens))
        parts.append(f"{f'{times} x ' if times > 1 else ''}prefill of {tokens} after {context}")
    return " + ".join(parts)
