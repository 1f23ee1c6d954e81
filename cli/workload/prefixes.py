"""What prompts have in common: how many begin alike, and what a prefix cache without limits would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmsched.cli.workload.sample import Sample

#: Lengths, in tokens, of which the most frequent beginning is looked for.
PREFIX_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)

#: The least share of requests that must begin alike for their beginning to be worth a pin.
PIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of all requests that begin with the most frequent `tokens` tokens.

    Not `exact`: blocks of the trace are longer than that, so it is the share that has the whole block, and may be more.
    """

    tokens: int
    share: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """A beginning of `tokens` tokens that `requests` have in common, the first of them number `example`."""

    tokens: int
    requests: int
    example: int


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """`hit_rate`: prompt tokens that an unlimited cache of whole blocks would have served, each request with those
    before it; the last token of a prompt is always computed. `distinct_tokens` is what such a cache would hold.

    `pin` is the beginning that saves the most prompt tokens, None if no beginning is that of enough requests.
    """

    coverage: tuple[Coverage, ...]
    hit_rate: float
    distinct_tokens: int
    pin: Pin | None


def prefix_figures(sample: Sample, block_size: int) -> PrefixFigures | None:
    """What the prompts of a sample have in common, at blocks of `block_size` tokens; None if they are not known."""
    if sample.prompts is None:
        return None
    tree = _Tree(block_size if sample.unit == 1 else sample.unit)
    hits = sum(
        min(tree.add(_steps(prompt, length, sample.unit, tree.step)) // block_size * block_size, max(0, length - 1))
        for prompt, length in zip(sample.prompts, sample.inputs, strict=True)
    )
    return PrefixFigures(
        coverage=tuple(_coverage(sample, tokens) for tokens in PREFIX_LENGTHS),
        hit_rate=hits / sum(sample.inputs) if any(sample.inputs) else 0.0,
        distinct_tokens=tree.distinct_tokens,
        pin=tree.best_pin(),
    )


def _coverage(sample: Sample, tokens: int) -> Coverage:
    assert sample.prompts is not None
    units = max(1, tokens // sample.unit)
    heads = Counter(
        tuple(prompt[:units])
        for prompt, length in zip(sample.prompts, sample.inputs, strict=True)
        if length >= tokens and prompt
    )
    share = max(heads.values(), default=0) / len(sample.prompts)
    return Coverage(tokens, share, exact=tokens % sample.unit == 0)


#: A piece of a prompt: what is compared, and how many tokens it is.
Step = tuple[object, int]


def _steps(prompt: Sequence[int], length: int, unit: int, step: int) -> Iterator[Step]:
    """A prompt in pieces of `step` tokens. A shorter one at the end counts only as a unit of the trace."""
    if unit == 1:
        for start in range(0, length - step + 1, step):
            yield tuple(prompt[start : start + step]), step
        return
    for place, block in enumerate(prompt):
        yield block, min(step, length - place * step)


class _Tree:
    """All prompts so far, as a tree of pieces; every node is a beginning that some prompts have in common."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._children: dict[tuple[int, object], int] = {}
        self._tokens, self._depth, self._count, self._first = [0], [0], [0], [0]

    def add(self, steps: Iterator[Step]) -> int:
        """Add a prompt. Returns how many of its first tokens an earlier one began with."""
        node, matched = 0, 0
        self._count[0] += 1
        for key, tokens in steps:
            child = self._children.get((node, key))
            if child is None:
                child = self._grow(node, key, tokens)
            else:
                matched += min(tokens, self._tokens[child])
                self._tokens[child] = max(tokens, self._tokens[child])
            self._count[child] += 1
            node = child
        return matched

    def _grow(self, parent: int, key: object, tokens: int) -> int:
        child = self._children[parent, key] = len(self._tokens)
        self._tokens.append(tokens)
        self._depth.append(self._depth[parent] + tokens)
        self._count.append(0)
        self._first.append(self._count[0] - 1)
        return child

    @property
    def distinct_tokens(self) -> int:
        return sum(self._tokens)

    def best_pin(self) -> Pin | None:
        """The beginning that, kept for good, serves the most tokens; None if it is that of too few requests."""
        enough = max(2, PIN_SHARE * self._count[0])
        nodes = [node for node in range(1, len(self._count)) if self._count[node] >= enough]
        if not nodes:
            return None
        best = max(nodes, key=lambda node: (self._count[node] * self._depth[node], -node))
        return Pin(self._depth[best], self._count[best], self._first[best])
