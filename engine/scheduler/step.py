"""One step being put together: who gets how many tokens."""

from __future__ import annotations

from collections.abc import Iterable

from llmsched.engine.executor.base import ScheduledRow
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Ledger


class Step:
    """Tokens given out so far, `left` of the token budget."""

    def __init__(self, token_budget: int, kv: KVManager, ledger: Ledger) -> None:
        self.left = token_budget
        self._kv = kv
        self._ledger = ledger
        self._counts: dict[Request, int] = {}
        self._behind: set[Request] = set()

    def give(self, request: Request, limit: int) -> int:
        """Let the request compute as much of what it is behind as `limit` and the budget allow; returns how much.

        In layers with a window memory may allow less (see KVManager.reach).
        """
        given = self._counts.get(request, 0)
        start = request.num_computed_tokens + given
        count = min(limit, self.left, request.num_tokens - start)
        if count > 0:
            count = self._kv.reach(request, start + count) - start
        if count <= 0:
            return 0
        self._counts[request] = given + count
        self._behind.add(request)
        self.left -= count
        return count

    def decode(self, requests: Iterable[Request]) -> None:
        """Give one token to each of these, which are one behind; nothing has been given yet."""
        self._counts = dict.fromkeys(requests, 1)
        self.left -= len(self._counts)

    def rows(self) -> list[ScheduledRow]:
        """The step as it is to be computed; what is no decode is written down."""
        for request in self._behind:
            done = request.num_computed_tokens + self._counts[request]
            self._ledger.note(request.request_id, "computed", up_to=done, of=request.num_tokens)
        return [_row(request, count) for request, count in self._counts.items()]


def _row(request: Request, count: int) -> ScheduledRow:
    start, end = request.num_computed_tokens, len(request.token_ids)
    sample = start + count == end and end - request.num_prompt_tokens < request.sampling.max_tokens
    return ScheduledRow(request, start, count, request.table.ids, sample)
