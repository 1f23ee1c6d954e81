"""Which steps are measured: decodes, prefills and both together, across what an engine may plan."""

from __future__ import annotations

from typing import NamedTuple

#: Rows of a step: (context, new tokens) each.
Rows = tuple[tuple[int, int], ...]

#: Contexts in tokens, as far as they are no more than this share of the longest sequence.
_CONTEXTS = ((64, 1 / 8), (512, 1 / 4), (2048, 1 / 2))


class Room(NamedTuple):
    """The limits of an engine: tokens and sequences of a step, tokens of a sequence and of all blocks."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int

    @property
    def most_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def choose_steps(room: Room) -> dict[str, Rows]:
    """Some twenty steps by name, fewer where the limits leave no room for them; all within the limits."""
    steps: dict[str, Rows] = {}
    short, middle, long = (max(1, min(tokens, int(share * room.max_model_len))) for tokens, share in _CONTEXTS)
    for count in _counts(room.most_rows):
        for context in (short, middle, long):
            _add(steps, room, _decodes(count, context))
    largest = room.max_num_batched_tokens
    for tokens in sorted({min(16, largest), min(64, largest), max(1, largest // 4), max(1, largest // 2), largest}):
        _add(steps, room, ((0, tokens),))
    for context in (middle, long):
        for tokens in (max(1, largest // 4), largest):
            _add(steps, room, ((context, tokens),))
    _add(steps, room, ((0, max(1, largest // 4)),) * 4)
    for share, count, context in ((2, 4, middle), (1, 16, short), (4, 16, middle)):
        if largest // share > count:
            _add(steps, room, ((0, largest // share - count), *_decodes(count, context)))
    return steps


def describe(rows: Rows) -> str:
    """The step in words: 4 decodes of 512 + prefill of 124 after 0."""
    decodes = [context for context, tokens in rows if tokens == 1]
    prefills = [row for row in rows if row[1] > 1]
    parts = []
    if decodes:
        parts.append(f"{len(decodes)} decode{'s' * (len(decodes) > 1)} of {decodes[0]}")
    for context, tokens in dict.fromkeys(prefills):
        times = prefills.count((context, tokens))
        parts.append(f"{f'{times} x ' if times > 1 else ''}prefill of {tokens} after {context}")
    return " + ".join(parts)


def _counts(most: int) -> list[int]:
    """Numbers of sequences: powers of four, and the most."""
    return sorted({min(most, count) for count in (1, 4, 16, 64)} | {most})


def _decodes(count: int, context: int) -> Rows:
    return ((context, 1),) * count


def _add(steps: dict[str, Rows], room: Room, rows: Rows) -> None:
    """Add a step if it is one that the engine could plan."""
    held = [context + tokens for context, tokens in rows]
    given = sum(tokens for _, tokens in rows)
    if len(rows) > room.max_num_seqs or given > room.max_num_batched_tokens:
        return
    if max(held) <= room.max_model_len and sum(held) <= room.kv_tokens:
        steps[describe(rows)] = rows
