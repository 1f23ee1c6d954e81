"""Whom to preempt when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence

from llmsched.engine.request import Request

#: A request that was preempted this often is left alone as long as there is another.
SAFE_AFTER = 2


def choose_victim(running: Sequence[Request]) -> Request:
    """The running request (of at least two) that gives its blocks back.

    Lowest class first; then the one whose loss is cheapest, which is the one with the fewest computed tokens; then the
    last in the queue. Requests preempted SAFE_AFTER times are safe while there are others, and the first of all by rank
    always: it makes progress in every step, so everybody's turn comes.
    """
    first = min(running, key=lambda r: (r.rank, r.request_id))
    others = [request for request in running if request is not first]
    unsafe = [request for request in others if request.num_preemptions < SAFE_AFTER]
    if not unsafe:
        return max(others, key=lambda r: (r.rank, r.request_id))
    return max(unsafe, key=lambda r: (r.priority, -r.num_computed_tokens, r.rank, r.request_id))
