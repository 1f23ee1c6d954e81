"""Slots for recurrent state: one for each running sequence, and snapshots of prefixes in the prefix cache.

The KV of a prefix can be reused up to any block, but recurrent state only where it was saved. Snapshots are saved at
block boundaries: at the end of a prompt, where two prompts diverge, and at the last boundary before a sequence's end.
The first two follow Marconi (Pan et al. 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix_tree import PrefixNode
from llmsched.engine.kv.recurrent_state import RowState, SequenceState
from llmsched.engine.kv.table import BlockTable
from llmsched.engine.request import Request


class StateSlots:
    """Slots 0 .. num_slots-1 of recurrent states.

    Each running request has one slot. The other slots belong to nodes of the prefix tree and are evicted like cached
    blocks; `on_evict` is called with the node. At most `max_running` requests run at the same time.
    """

    def __init__(
        self, num_slots: int, max_running: int, block_size: int, on_evict: Callable[[PrefixNode], None]
    ) -> None:
        self.pool = BlockPool(num_slots, self._forget)
        self._nodes: dict[int, PrefixNode] = {}
        self._on_evict = on_evict
        self._block_size = block_size
        self._num_idle = max_running  # requests that may still start
        self._source_of: dict[int, int] = {}

    @property
    def num_spare(self) -> int:
        """Number of available slots beyond those reserved for requests that may still start."""
        return self.pool.num_available - self._num_idle

    def nodes(self) -> list[PrefixNode]:
        """Return the nodes that have a snapshot."""
        return list(self._nodes.values())

    def open(self, request: Request, source: int | None, save_at: Iterable[int]) -> None:
        """Give an admitted request a slot. Its state is copied from the snapshot `source`, unless that is None.

        Snapshots are saved after the numbers of tokens `save_at`.
        """
        if source is not None:  # it becomes the most recently used
            self.pool.acquire([source], shared=request.num_preemptions == 0)
            self.pool.release([source])
        [slot] = self.pool.allocate(1)
        self._num_idle -= 1
        self._source_of.pop(slot, None)
        if source is not None and slot != source:
            self._source_of[slot] = source
        request.state = SequenceState(slot, set(save_at))

    def close(self, request: Request) -> None:
        """Release the slots of a request that has finished or is preempted."""
        state = _state_of(request)
        self.pool.release([state.slot, *(slot for _, slot in state.saves)])
        self._num_idle += 1
        request.state = None

    def row(self, request: Request, start: int, end: int, *, save: bool) -> RowState:
        """Return the state of a row with the request's tokens `start` to `end` - 1.

        If `save` is True, slots are allocated for its snapshots while there are spare ones.
        """
        state = _state_of(request)
        at_end = end % self._block_size == 0
        if not save or not (at_end or state.save_at):
            return RowState(state.slot)
        saves = []
        for at in sorted(at for at in state.save_at if start < at < end) + [end] * at_end:
            planned = at in state.save_at
            if self.num_spare > (0 if planned else 1) and (planned or self._may_follow(state)):
                saves.append((at, self.pool.allocate(1)[0]))
        state.saves += saves
        return RowState(state.slot, saves)

    def _may_follow(self, state: SequenceState) -> bool:
        """Return True if the sequence may save one more snapshot, and drop its newest one if slots are short.

        So a sequence that grows longer and longer evicts at most one snapshot of other sequences.
        """
        if self.pool.num_free or state.newest is None:
            return True
        slot = state.newest.state
        self._drop_unused(state.newest)
        return slot is not None and state.newest.state is None

    def num_saved_tokens(self, request: Request) -> int:
        """Return the number of tokens in the longest snapshot that `commit(...)` would take; 0 without one."""
        places = (at for at, _ in _state_of(request).saves if at <= request.num_computed_tokens)
        return max(places, default=0)

    def commit(self, request: Request) -> None:
        """Assign the snapshots that settled steps have saved to the nodes of their prefixes.

        The request's blocks must be in the prefix tree up to the last snapshot. A snapshot is dropped if its node
        already has one.
        """
        state = _state_of(request)
        while state.saves and state.saves[0][0] <= request.num_computed_tokens:
            at, slot = state.saves.pop(0)
            node = node_at(request.table, at // self._block_size)
            if node.state is not None:
                self.pool.release([slot])
                continue
            if state.newest is not None and state.newest is not node:
                self._drop_unused(state.newest)
            state.newest = None if at in state.save_at else node
            node.state, self._nodes[slot] = slot, node
            self.pool.set_findable([slot])
            self.pool.release([slot])

    def _drop_unused(self, node: PrefixNode) -> None:
        """Drop the snapshot of a node if no other request has used it."""
        if node.state is not None and self.pool.is_private(node.state):
            self.pool.evict(node.state)

    def _forget(self, slot: int) -> Sequence[int]:
        node = self._nodes.pop(slot)
        node.state = None
        self._on_evict(node)
        return ()

    def check_integrity(self, running: Iterable[Request], pinned: Iterable[int]) -> None:
        """Raise AssertionError unless each slot is held by one running request, or is free, cached or in `pinned`."""
        held = Counter(pinned)
        for request in running:
            state = _state_of(request)
            held.update([state.slot, *(slot for _, slot in state.saves)])
        self.pool.check_integrity(held)
        assert all(node.state == slot for slot, node in self._nodes.items()), "a node lost its snapshot"

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (source, destination) that were noted since the last call."""
        copies = [(source, slot) for slot, source in self._source_of.items()]
        self._source_of.clear()
        return copies


def node_at(table: BlockTable, num_blocks: int) -> PrefixNode:
    """Return the node of the table's first `num_blocks` blocks, which must be in the prefix tree."""
    node = table.node
    for _ in range(table.num_findable - num_blocks):
        node = node and node.parent
    assert node is not None
    return node


def num_saved_blocks(table: BlockTable) -> int:
    """Return the number of blocks before the last snapshot among the table's nodes in the prefix tree."""
    node, count = table.node, table.num_findable
    while count and node is not None and node.state is None:
        node, count = node.parent, count - 1
    return count


def _state_of(request: Request) -> SequenceState:
    assert request.state is not None, f"request {request.request_id} has no recurrent state"
    return request.state
