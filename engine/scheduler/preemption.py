"""Whom to preempt when memory runs out, and whether its KV is thrown away or copied to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Detail
from llmsched.engine.scheduler.rates import Rates

#: A request that was preempted this often is left alone as long as there is another.
SAFE_AFTER = 2


class Loss(NamedTuple):
    """What it costs to preempt a request now: `seconds` to compute `num_tokens` tokens again or, with `swap`, to copy
    `num_blocks` blocks to host memory and back.
    """

    swap: bool
    seconds: float
    num_tokens: int
    num_blocks: int

    def details(self) -> dict[str, Detail]:
        """For the ledger."""
        cost_ms = round(1e3 * self.seconds, 3)
        if self.swap:
            return {"how": "swap", "swapped_blocks": self.num_blocks, "cost_ms": cost_ms}
        return {"how": "recompute", "lost_tokens": self.num_tokens, "cost_ms": cost_ms}


class Preemption:
    """Chooses victims, and how they lose their memory: as `preemption_mode` says, by swap as long as there is room.

    auto takes what is predicted to cost less time: computing again those tokens that the prefix cache will not hold, at
    the measured rate of prefills, or copying blocks both ways at the measured rate of copies (see Rates for what is
    assumed before anything was measured).
    """

    def __init__(self, kv: KVManager, config: EngineConfig) -> None:
        self.rates = Rates(kv.swap.block_bytes)
        self._kv = kv
        self._mode = config.preemption_mode
        self._has_classes = config.priority_step > 0

    def loss(self, request: Request, demand: int | None = None) -> Loss:
        """What preempting the request costs. `demand` are the blocks that are wanted of it; None: all, and more.

        More is the rule: memory ran out, and those that go on keep growing.
        """
        kept = self._kv.num_kept(request, demand) * self._kv.block_size
        num_tokens = max(0, request.num_computed_tokens - kept)
        recompute = Loss(False, num_tokens * self.rates.per_prefill_token, num_tokens, 0)
        if self._mode == "recompute":
            return recompute
        num_blocks = self._kv.num_swapped(request)
        swap = Loss(True, 2 * num_blocks * self.rates.per_block, num_tokens, num_blocks)
        if not 0 < num_blocks <= self._kv.swap.num_free:
            return recompute
        return swap if self._mode == "swap" or swap.seconds < recompute.seconds else recompute

    def decide(self, request: Request, demand: int | None) -> Loss:
        """How a request that is preempted loses its memory; see `loss`."""
        loss = self.loss(request, demand)
        if self._mode == "auto" and not loss.swap and self._kv.swap.num_free:
            self.rates.not_copied()
        return loss

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The running request (of at least two) that gives its blocks back.

        Lowest class first, if classes are worth anything; then the one whose loss is cheapest; then the last in the
        queue. Requests preempted SAFE_AFTER times are safe while there are others, and the first of all by rank always:
        it makes progress in every step, so everybody's turn comes.
        """
        first = min(running, key=lambda r: (r.rank, r.request_id))
        others = [request for request in running if request is not first]
        unsafe = [request for request in others if request.num_preemptions < SAFE_AFTER]
        if not unsafe:
            return max(others, key=lambda r: (r.rank, r.request_id))
        if self._has_classes:
            lowest = max(request.priority for request in unsafe)
            unsafe = [request for request in unsafe if request.priority == lowest]
        return max(unsafe, key=self._cheapness)

    def _cheapness(self, request: Request) -> tuple[float, int, float, str]:
        loss = self.loss(request)
        return -loss.seconds, -loss.num_tokens, request.rank, request.request_id
