"""Pinned prefixes: blocks that stay in the cache although no request holds them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from llmsched.engine.errors import RequestError, setting
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix_tree import PrefixKey, PrefixNode, PrefixTree, blocks_of, encode
from llmsched.engine.kv.recurrent_slots import StateSlots


def most_pinned_blocks(num_blocks: int, share: float, max_request_blocks: int) -> int:
    """Return how many blocks pins may hold: `share` x `num_blocks`, but at least `max_request_blocks` must remain."""
    return max(0, min(int(share * num_blocks), num_blocks - max_request_blocks))


@dataclass(frozen=True, slots=True)
class PinState:
    """State of a pinned prefix, as `Pins` reports it."""

    pin_id: str
    salt: PrefixKey
    num_tokens: int  # tokens in its whole blocks
    num_written_tokens: int  # tokens with KV
    expires_at: float | None  # in seconds of the engine's clock; None if it never expires


@dataclass(slots=True, eq=False)
class _Pin:
    pin_id: str
    tokens: bytes
    salt: PrefixKey
    num_blocks: int
    expires_at: float | None
    nodes: list[PrefixNode] = field(default_factory=list)
    state: int | None = None  # slot of the recurrent state at the end, once it is saved


class Pins:
    """Pinned prefixes of an engine.

    A pin references all blocks of its prefix in full-attention groups, the blocks of the last window in sliding-window
    groups, and the recurrent state at its end. Together, pins hold at most `max_blocks` blocks, including blocks that
    are still to be written, and `max_states` of `states`. A written block that several pins share counts once.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        prefixes: PrefixTree,
        max_blocks: int,
        states: StateSlots | None = None,
        max_states: int = 0,
    ) -> None:
        self.max_blocks = max_blocks
        self._states, self._max_states = states, max_states
        #: Number of pins that still wait for blocks to be written.
        self.num_waiting = 0
        self._layout = layout
        self._pool = pool
        self._prefixes = prefixes
        self._pins: dict[str, _Pin] = {}
        self._holds: Counter[int] = Counter()
        self._names = count(1)

    @property
    def num_blocks(self) -> int:
        return len(self._holds)

    def pin(self, token_ids: Sequence[int], salt: PrefixKey, ttl: float | None, now: float) -> PinState:
        """Pin the whole blocks of a prefix for `ttl` seconds (None: until the pin is deleted).

        Pinning the same prefix again only changes the time at which the pin expires. Raises RequestError if the ttl is
        not positive and finite, if the prefix is shorter than a block, or if the pins would exceed `max_blocks`.
        """
        if ttl is not None and not (0 < ttl < math.inf):
            raise RequestError(
                "ttl", f"ttl must be finite and more than 0 seconds, not {ttl}; leave it out to pin until deleted"
            )
        num_blocks = len(token_ids) // self._prefixes.block_size
        if num_blocks == 0:
            raise RequestError(
                "prefix",
                f"the prefix has {len(token_ids)} tokens; only whole blocks are pinned, so it must have at least "
                f"{self._prefixes.block_size}",
            )
        tokens = encode(token_ids[: num_blocks * self._prefixes.block_size])
        expires_at = None if ttl is None else now + ttl
        pin = next((p for p in self._pins.values() if p.tokens == tokens and p.salt == salt), None)
        if pin is not None:
            pin.expires_at = expires_at
            return self._state(pin)
        pin = _Pin(f"pin-{next(self._names)}", tokens, salt, num_blocks, expires_at)
        self._check_room(pin)
        self._pins[pin.pin_id] = pin
        self.advance()
        return self._state(pin)

    def advance(self) -> None:
        """Let each pin hold the blocks of its prefix that requests have written since the last call.

        Call this before requests release blocks.
        """
        self.num_waiting = 0
        for pin in self._pins.values():
            if len(pin.nodes) == pin.num_blocks:
                continue
            start = self._window_start(pin)
            if not self._layout.full_groups and len(pin.nodes) <= start:
                pin.nodes.clear()  # the pin holds no blocks of these nodes, so they may have been evicted
            held = len(pin.nodes)
            new = self._prefixes.match(pin.tokens, pin.salt, pin.num_blocks, held, pin.nodes[-1] if held else None)
            if self._layout.window_groups:  # stop before the first node without window blocks that the pin must hold
                lacking = (i for i, node in enumerate(new) if held + i >= start and not node.window_blocks)
                del new[next(lacking, len(new)) :]
            if self._states is not None and held + len(new) == pin.num_blocks:
                pin.state = new[-1].state
                if pin.state is None:
                    del new[-1]
                else:
                    self._states.pool.acquire([pin.state])
            blocks = self._blocks(pin, new, held)
            self._pool.acquire(blocks)
            self._holds.update(blocks)
            pin.nodes += new
            self.num_waiting += len(pin.nodes) < pin.num_blocks

    def delete(self, pin_id: str) -> None:
        """Delete a pin. Its blocks stay in the cache until evicted. Raises RequestError for an unknown pin_id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            raise RequestError(
                "pin_id", f"there is no pin {pin_id!r}; existing pins: {', '.join(self._pins) or 'none'}"
            )
        self.num_waiting -= len(pin.nodes) < pin.num_blocks
        blocks = self._blocks(pin, pin.nodes, 0)[::-1]
        self._holds.subtract(blocks)
        for block in blocks:
            if not self._holds[block]:
                del self._holds[block]
        self._pool.release(blocks)
        if self._states is not None and pin.state is not None:
            self._states.pool.release([pin.state])

    def expire(self, now: float) -> bool:
        """Delete the pins that have expired by the time `now`. Return True if a pin had expired."""
        over = [pin for pin in self._pins.values() if pin.expires_at is not None and pin.expires_at <= now]
        for pin in over:
            self.delete(pin.pin_id)
        return bool(over)

    def next_expiry(self) -> float | None:
        """Return the time (engine's clock) at which the next pin expires; None if no pin expires."""
        return min((pin.expires_at for pin in self._pins.values() if pin.expires_at is not None), default=None)

    def states(self) -> list[PinState]:
        return [self._state(pin) for pin in self._pins.values()]

    def ref_counts(self) -> Counter[int]:
        return self._holds.copy()

    def held_states(self) -> list[int]:
        return [pin.state for pin in self._pins.values() if pin.state is not None]

    def _window_start(self, pin: _Pin) -> int:
        return self._layout.first_kept(pin.num_blocks * self._layout.block_size)

    def _blocks(self, pin: _Pin, nodes: list[PrefixNode], first: int) -> list[int]:
        if not self._layout.window_groups:
            return blocks_of(nodes, ())
        return blocks_of(nodes, nodes[max(0, self._window_start(pin) - first) :])

    def _check_room(self, pin: _Pin) -> None:
        if self._states is not None and len(self._pins) >= self._max_states:
            raise RequestError(
                "prefix",
                f"{len(self._pins)} prefixes are pinned, and at most {self._max_states} may be, because each keeps a "
                f"recurrent state; delete a pin, or raise {setting('max_num_seqs')} or the share of pinned blocks",
            )
        known = self._prefixes.match(pin.tokens, pin.salt, pin.num_blocks)
        wanted = self._size(pin) - sum(block in self._holds for block in self._blocks(pin, known, 0))
        others = (self._size(other) - len(self._blocks(other, other.nodes, 0)) for other in self._pins.values())
        taken = len(self._holds) + sum(others)
        if taken + wanted > self.max_blocks:
            size = self._prefixes.block_size
            raise RequestError(
                "prefix",
                f"pinning {pin.num_blocks * size} tokens takes {wanted} more blocks of {size}; {taken} are pinned, and "
                f"at most {self.max_blocks} may be; delete a pin, raise the share of pinned blocks, or lower "
                f"{setting('max_model_len')} (a request of that length must fit in the other blocks)",
            )

    def _size(self, pin: _Pin) -> int:
        """Return how many blocks the pin holds once its whole prefix is written."""
        windowed = self._layout.window_groups * (pin.num_blocks - self._window_start(pin))
        return self._layout.full_groups * pin.num_blocks + windowed

    def _state(self, pin: _Pin) -> PinState:
        size = self._prefixes.block_size
        return PinState(pin.pin_id, pin.salt, pin.num_blocks * size, len(pin.nodes) * size, pin.expires_at)
