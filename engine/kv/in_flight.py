"""Prefixes that running requests are writing right now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from llmsched.engine.kv.prefix_tree import PrefixNode, encode, num_common_tokens
from llmsched.engine.request import Request

#: At most this many requests that write behind the same prefix are compared, newest first.
MAX_COMPARED = 32


class InFlightPrefixes:
    """Running requests by the prefix that they extend: the node of their last findable block, or their cache salt while
    they have none. Equal prefixes share one node, so requests under one key agree in all tokens before it.
    """

    def __init__(self) -> None:
        self._after: dict[PrefixNode | str, dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        self._after.setdefault(_key(request), {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request. Before its `node` changes, remove it, then `add` it again."""
        key = _key(request)
        del self._after[key][request]
        if not self._after[key]:
            del self._after[key]

    def requests(self) -> list[Request]:
        return [request for requests in self._after.values() for request in requests]

    def open_block(self, node: PrefixNode | None, salt: str, tokens: bytes) -> tuple[tuple[int, ...], int] | None:
        """Return the partly written block behind `node` that shares most leading tokens with `tokens`, at most a block.

        Returns (block of each group, number of shared tokens), or None if no token is shared. Requests that have not
        been in a step since they were admitted are left out: their blocks may still have to be copied or restored.
        """
        best: tuple[tuple[int, ...], int] | None = None
        for request in self._newest(node, salt):
            table = request.table
            start, end = table.num_findable * table.layout.block_size, request.num_computed_tokens
            if end > max(start, table.num_initial):
                common = num_common_tokens(encode(request.token_ids[start:end]), tokens)
                if common > (best[1] if best else 0):
                    full, window = table.column(table.num_findable)
                    best = full + window, common
        return best

    def num_coming(self, node: PrefixNode | None, request: Request, start: int, limit: int) -> int:
        """Return how many tokens of the request, from `start` (the end of the prefix) to `limit`, other requests will
        have written in whole blocks when they have computed all tokens that they have now.
        """
        most = 0
        for other in self._newest(node, request.cache_salt):
            size = other.table.layout.block_size
            if other.token_ids[start : start + size] == request.token_ids[start : start + size]:
                common = _common_length(other.token_ids, request.token_ids, start, limit) - start
                most = max(most, common // size * size)
        return most

    def _newest(self, node: PrefixNode | None, salt: str) -> Iterator[Request]:
        return islice(reversed(self._after.get(salt if node is None else node, {})), MAX_COMPARED)


def _key(request: Request) -> PrefixNode | str:
    node = request.table.node
    return request.cache_salt if node is None else node


def _common_length(one: Sequence[int], two: Sequence[int], start: int, end: int) -> int:
    """Return the largest n <= end with one[start:n] == two[start:n], by bisection."""
    low, high = start, max(start, end)
    step = high
    while low < high:
        if one[low:step] == two[low:step]:
            low = step
        else:
            high = step - 1
        step = (low + high + 1) // 2
    return low
