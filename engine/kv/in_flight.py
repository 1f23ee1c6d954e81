"""Who is writing what right now: running requests by the last block that they have made findable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from llmsched.engine.kv.prefix_tree import PrefixNode, encode, num_common_tokens
from llmsched.engine.request import Request

#: How many requests that write after the same prefix are compared, newest first.
MAX_COMPARED = 32


class InFlightPrefixes:
    """Running requests, found by the prefix behind which they write: the node of their last findable block, or their
    cache salt while there is none. Equal prefixes have one node, so the key proves that all tokens before it are equal.
    """

    def __init__(self) -> None:
        self._after: dict[PrefixNode | str, dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        self._after.setdefault(_place(request), {})[request] = None

    def remove(self, request: Request) -> None:
        """Also before the request's `node` changes; `add` it again afterwards."""
        place = _place(request)
        there = self._after[place]
        del there[request]
        if not there:
            del self._after[place]

    def requests(self) -> list[Request]:
        return [request for there in self._after.values() for request in there]

    def open_block(self, node: PrefixNode | None, salt: str, tokens: bytes) -> tuple[tuple[int, ...], int] | None:
        """The block being filled behind the prefix that shares most written leading tokens with a block (or less).

        Returns (block of each group, how many tokens it shares), None if none shares any. Blocks of requests that have
        not been in a step since they were admitted do not count: what they are taken to hold may still have to be
        copied there.
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
        """How many of the request's tokens from `start` (where the prefix ends) to `limit` others will have written as
        whole blocks when they have caught up with their tokens.
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


def _place(request: Request) -> PrefixNode | str:
    node = request.table.node
    return request.cache_salt if node is None else node


def _common_length(one: Sequence[int], two: Sequence[int], start: int, end: int) -> int:
    """The largest n <= end with one[start:n] == two[start:n], by halving what is compared."""
    low, high = start, max(start, end)
    step = high
    while low < high:
        if one[low:step] == two[low:step]:
            low = step
        else:
            high = step - 1
        step = (low + high + 1) // 2
    return low
