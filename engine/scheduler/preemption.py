"""Preemption: which running request gives up its blocks, and whether its KV is discarded or swapped to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Detail

#: A request that was preempted this often is not preempted again while there are others to choose from.
SAFE_AFTER = 2
#: Prefill rate (tokens/s) assumed until prefills have been measured. Hardly ever used: a victim has been prefilled.
ASSUMED_PREFILL_RATE = 10_000.0
#: Copy rate (bytes/s) assumed until copies have been measured: that of PCIe 4 x16. Rather too high than too low, since
#: copies that are never made are never measured.
ASSUMED_COPY_RATE = 20e9
#: Number of later measurements after which one counts half.
HALF_LIFE = 64
#: Share by which each decision against a copy moves its measured cost back to the assumed one, so that copies are tried
#: again: the machine may have been busy when they were measured.
FADING = 0.02


class MeanCost:
    """Seconds per unit over the measurements so far; newer ones count more."""

    def __init__(self, assumed: float) -> None:
        self._seconds = self._units = 0.0
        self._assumed = assumed

    def add(self, seconds: float, units: int) -> None:
        forget = 0.5 ** (1 / HALF_LIFE)
        self._seconds = self._seconds * forget + seconds
        self._units = self._units * forget + units

    def fade(self) -> None:
        """Move the mean towards the assumed cost, because a decision went against it."""
        self._seconds += FADING * (self._assumed * self._units - self._seconds)

    @property
    def per_unit(self) -> float:
        return self._seconds / self._units if self._units else self._assumed


class MeasuredCosts:
    """Costs of a prefill token and of a block copied from or to host memory, measured while serving.

    A prefill token costs the time by which steps with prefills exceed steps of decodes alone, because decodes go on
    beside a recomputation anyway.
    """

    def __init__(self, block_bytes: int) -> None:
        self.prefill_token = MeanCost(1 / ASSUMED_PREFILL_RATE)
        self.block_copy = MeanCost(block_bytes / ASSUMED_COPY_RATE)
        self._decode_step = MeanCost(0.0)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Add the measured times of a step."""
        if result.swap_elapsed > 0:
            self.block_copy.add(result.swap_elapsed, len(plan.swap_out) + len(plan.swap_in))
        computing = result.elapsed - result.swap_elapsed
        num_prefill_tokens = plan.num_tokens - len(plan.rows)
        if num_prefill_tokens == 0:
            self._decode_step.add(computing, 1)
        else:
            self.prefill_token.add(max(0.0, computing - self._decode_step.per_unit), num_prefill_tokens)


class Loss(NamedTuple):
    """Cost of preempting a request now.

    `seconds` are the time to compute `num_tokens` tokens again or, with `swap`, to copy `num_blocks` blocks to host
    memory and back.
    """

    swap: bool
    seconds: float
    num_tokens: int
    num_blocks: int

    def details(self) -> dict[str, Detail]:
        """Return the details for the ledger."""
        cost_ms = round(1e3 * self.seconds, 3)
        if self.swap:
            return {"how": "swap", "swapped_blocks": self.num_blocks, "cost_ms": cost_ms}
        return {"how": "recompute", "lost_tokens": self.num_tokens, "cost_ms": cost_ms}


class Preemption:
    """Chooses victims, and by `preemption_mode` whether their KV is swapped or recomputed later.

    Mode auto takes what is predicted to cost less time: computing again those tokens that the prefix cache will not
    keep, or copying the blocks both ways. Swap needs free host blocks; without them every mode recomputes.

    When memory runs out, the lowest priority class is preempted first, unless priority_step is 0.
    """

    def __init__(self, kv: KVManager, config: EngineConfig) -> None:
        self.costs = MeasuredCosts(kv.swap.block_bytes)
        self._kv = kv
        self._mode = config.preemption_mode
        self._policy = config.scheduling_policy
        self._memory_by_class = config.priority_step > 0

    def loss(self, request: Request, demand: int | None = None) -> Loss:
        """Return the cost of preempting the request.

        `demand` is the number of blocks that will be taken from the pool. None: assume every available block will be
        needed, because running requests keep growing.
        """
        kept = self._kv.num_kept(request, demand) * self._kv.block_size
        num_tokens = max(0, request.num_computed_tokens - kept)
        recompute = Loss(False, num_tokens * self.costs.prefill_token.per_unit, num_tokens, 0)
        if self._mode == "recompute":
            return recompute
        num_blocks = self._kv.num_swapped(request)
        swap = Loss(True, 2 * num_blocks * self.costs.block_copy.per_unit, num_tokens, num_blocks)
        if not 0 < num_blocks <= self._kv.swap.num_free:
            return recompute
        return swap if self._mode == "swap" or swap.seconds < recompute.seconds else recompute

    def decide(self, request: Request, demand: int | None) -> Loss:
        """Return how the request that is preempted now loses its KV; see `loss`."""
        loss = self.loss(request, demand)
        if self._mode == "auto" and not loss.swap and self._kv.swap.num_free:
            self.costs.block_copy.fade()
        return loss

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return which of at least two running requests gives up its blocks when memory runs out.

        The lowest class comes first, then the cheapest loss, then the last in the queue. A request that was preempted
        SAFE_AFTER times is chosen only if all others were too. The first by rank is never chosen, so it makes progress
        in every step and each request's turn comes.
        """
        first = min(running, key=lambda r: (r.rank, r.request_id))
        others = [request for request in running if request is not first]
        unsafe = [request for request in others if request.num_preemptions < SAFE_AFTER]
        if not unsafe:
            return max(others, key=lambda r: (r.rank, r.request_id))
        if self._memory_by_class:
            lowest = max(request.priority for request in unsafe)
            unsafe = [request for request in unsafe if request.priority == lowest]
        losses = {request: self.loss(request) for request in unsafe}
        return max(unsafe, key=lambda r: (-losses[r].seconds, -losses[r].num_tokens, r.rank, r.request_id))

    def choose_victim_for(self, waiting: Request, running: Sequence[Request]) -> Request | None:
        """Return the running request that gives its place to one of a higher class, or None if all keep theirs.

        The victim is of the lowest class that runs, ranks behind `waiting`, and was preempted less than SAFE_AFTER
        times. Only policy fair has classes.
        """
        if self._policy != "fair":
            return None
        lowest = max(running, key=lambda r: (r.priority, r.rank, r.request_id))
        if lowest.priority <= waiting.priority or lowest.rank <= waiting.rank or lowest.num_preemptions >= SAFE_AFTER:
            return None
        return lowest
