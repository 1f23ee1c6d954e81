"""How KV memory is used at a moment: what is held, what of it is empty, what is only kept for later."""

from __future__ import annotations

from typing import NamedTuple

from llmsched.engine.request import Request


class KVUse(NamedTuple):
    """Tokens, each of one group of layers, that blocks have room for: in blocks that requests or pins hold (`held`,
    shared ones once), of which `empty` have no KV in them; in blocks that only the prefix cache keeps (`cached`); in
    all blocks (`total`).
    """

    held: int
    empty: int
    cached: int
    total: int


def num_empty(request: Request) -> int:
    """Tokens that the blocks of an admitted request have room for, and no KV of."""
    return request.table.num_empty(request.num_computed_tokens)
