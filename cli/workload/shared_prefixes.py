"""Prefixes that prompts share, and the tokens that an unlimited prefix cache would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.workload.request_sample import RequestSample

#: Lengths in tokens for which the most frequent prefix is counted.
PREFIX_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)

#: Lowest share of requests with a prefix for which pinning it is recommended.
PIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of requests whose prompt begins with the most frequent prefix of `tokens` tokens."""

    tokens: int
    share: float
    exact: bool  # False if the prefix was rounded to whole blocks of the trace


@dataclass(frozen=True, slots=True)
class Pin:
    """Prefix that several prompts share."""

    tokens: int  # length of the prefix
    requests: int  # number of prompts that share the prefix
    example: int  # index of the first such prompt


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Figures of an unlimited prefix cache that keeps the KV of all earlier requests."""

    coverage: tuple[Coverage, ...]
    hit_rate: float  # share of prompt tokens served from whole cached blocks
    distinct_tokens: int  # in the cache at the end
    pin: Pin | None  # prefix that saves the most prompt tokens, if enough requests share one


def shared_prefixes(sample: RequestSample, block_size: int) -> SharedPrefixes | None:
    """Compute the shared prefixes of a load in blocks of `block_size` tokens; None if the prompts are unknown."""
    if sample.prompts is None:
        return None
    coverage, prompts = [], list(zip(sample.prompts, sample.inputs, strict=True))
    for tokens in PREFIX_LENGTHS:
        units = max(1, tokens // sample.unit)
        heads = Counter(tuple(prompt[:units]) for prompt, length in prompts if length >= tokens and prompt)
        share = max(heads.values(), default=0) / len(prompts)
        coverage.append(Coverage(tokens, share, exact=tokens % sample.unit == 0))
    tree = _Tree(block_size if sample.unit == 1 else sample.unit)
    hits, step = 0, tree.step
    for prompt, length in prompts:
        if sample.unit == 1:  # a shorter piece at the end is dropped
            pieces: list[Piece] = [(tuple(prompt[at : at + step]), step) for at in range(0, length - step + 1, step)]
        else:
            pieces = [(block, min(step, length - place * step)) for place, block in enumerate(prompt)]
        hits += min(tree.add(pieces) // block_size * block_size, max(0, length - 1))
    return SharedPrefixes(
        coverage=tuple(coverage),
        hit_rate=hits / sum(sample.inputs) if any(sample.inputs) else 0.0,
        distinct_tokens=sum(tree.tokens),
        pin=tree.best_pin(),
    )


#: A piece of a prompt: a key for comparison, and its number of tokens.
Piece = tuple[object, int]


class _Tree:
    """Tree of prompts. Each node is a piece of a prompt, and the path to a node is a prefix."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._children: dict[tuple[int, object], int] = {}
        self.tokens, self._depth, self._count, self._first = [0], [0], [0], [0]

    def add(self, pieces: Sequence[Piece]) -> int:
        """Add a prompt. Return the number of tokens in the longest prefix that was already in the tree."""
        node, matched = 0, 0
        self._count[0] += 1
        for key, tokens in pieces:
            child = self._children.get((node, key))
            if child is None:
                child = self._children[node, key] = len(self.tokens)
                self.tokens.append(tokens)
                self._depth.append(self._depth[node] + tokens)
                self._count.append(0)
                self._first.append(self._count[0] - 1)
            else:
                matched += min(tokens, self.tokens[child])
                self.tokens[child] = max(tokens, self.tokens[child])
            self._count[child] += 1
            node = child
        return matched

    def best_pin(self) -> Pin | None:
        """Return the prefix that saves the most tokens if pinned; None if too few requests share any prefix."""
        enough = max(2, PIN_SHARE * self._count[0])
        nodes = [node for node in range(1, len(self._count)) if self._count[node] >= enough]
        if not nodes:
            return None
        best = max(nodes, key=lambda node: (self._count[node] * self._depth[node], -node))
        return Pin(self._depth[best], self._count[best], self._first[best])
