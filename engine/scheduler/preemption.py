"""Preemption: which request gives up its blocks, and whether its KV is dropped or swapped to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Detail

#: After this many preemptions, a request is preempted again only if all candidates were preempted this often.
SAFE_AFTER = 2
#: Prefill rate (tokens/s) assumed until a prefill is measured. Rarely used, because every victim was prefilled.
ASSUMED_PREFILL_RATE = 10_000.0
#: Copy rate (bytes/s) of PCIe 4 x16, assumed until a copy is measured. The first copy corrects a rate that is too high.
#: A rate that is too low would prevent copies.
ASSUMED_COPY_RATE = 20e9
#: Number of later measurements after which a measurement counts half.
HALF_LIFE = 64
#: Share of the way by which each decision against a copy moves the measured copy cost towards the assumed cost. So
#: copies are tried again at some time: the machine may have been busy when copies were measured.
FADING = 0.02


class MeanCost:
    """Average cost in seconds per unit, `assumed` before the first measurement. Newer measurements count more."""

    def __init__(self, assumed: float) -> None:
        self._seconds = self._units = 0.0
        self._assumed = assumed

    def add(self, seconds: float, units: int) -> None:
        forget = 0.5 ** (1 / HALF_LIFE)
        self._seconds = self._seconds * forget + seconds
        self._units = self._units * forget + units

    def fade(self) -> None:
        """Move the average towards the assumed cost, so that an outdated measurement loses its weight."""
        self._seconds += FADING * (self._assumed * self._units - self._seconds)

    @property
    def per_unit(self) -> float:
        return self._seconds / self._units if self._units else self._assumed


class MeasuredCosts:
    """Costs in seconds of computing a prefill token and of copying a block from or to host memory.

    Prefill tokens cost only the time by which a step with prefills takes longer than a step without them.
    """

    def __init__(self, block_bytes: int) -> None:
        self.prefill_token = MeanCost(1 / ASSUMED_PREFILL_RATE)
        self.block_copy = MeanCost(block_bytes / ASSUMED_COPY_RATE)
        self._decode_step = MeanCost(0.0)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if result.swap_elapsed > 0:
            self.block_copy.add(result.swap_elapsed, len(plan.swap_out) + len(plan.swap_in))
        computing = result.elapsed - result.swap_elapsed
        num_prefill_tokens = plan.num_tokens - len(plan.rows)
        if plan.num_draft_tokens:  # drafts cost neither as much as decodes nor as prefill tokens
            return
        if num_prefill_tokens == 0:
            self.learn_decodes(computing)
        else:
            self.prefill_token.add(max(0.0, computing - self._decode_step.per_unit), num_prefill_tokens)

    def learn_decodes(self, seconds: float) -> None:
        """Add the time of a step without prefills and copies."""
        self._decode_step.add(seconds, 1)


class Loss(NamedTuple):
    """Cost of preempting a request now."""

    swap: bool  # True for copying blocks to host memory and back, False for recomputing tokens
    seconds: float  # of the copies or of the computation
    num_tokens: int
    num_blocks: int

    def details(self) -> dict[str, Detail]:
        cost_ms = round(1e3 * self.seconds, 3)
        if self.swap:
            return {"how": "swap", "swapped_blocks": self.num_blocks, "cost_ms": cost_ms}
        return {"how": "recompute", "lost_tokens": self.num_tokens, "cost_ms": cost_ms}


class Preemption:
    """Rules of preemption: which request to preempt, and whether to swap or recompute its KV (see preemption_mode).

    Mode "auto" chooses the way that is predicted to take less time. If too few host blocks are free, KV is recomputed
    in every mode.
    """

    def __init__(self, kv: KVManager, config: EngineConfig) -> None:
        self.costs = MeasuredCosts(kv.swap.block_bytes)
        self._kv = kv
        self._mode = config.preemption_mode
        self._policy = config.scheduling_policy
        self._memory_by_class = config.priority_step > 0

    def loss(self, request: Request, demand: int | None = None, *, may_swap: bool = True) -> Loss:
        """Return the cost of preempting the request. If `may_swap` is False, this is the cost of recomputing.

        `demand` is the number of blocks that other requests will take from the pool; None means all available blocks.
        """
        kept = self._kv.num_kept(request, demand) * self._kv.block_size
        num_tokens = max(0, request.num_computed_tokens - kept)
        recompute = Loss(False, num_tokens * self.costs.prefill_token.per_unit, num_tokens, 0)
        if self._mode == "recompute" or not may_swap:
            return recompute
        num_blocks = self._kv.num_swapped(request)
        swap = Loss(True, 2 * num_blocks * self.costs.block_copy.per_unit, num_tokens, num_blocks)
        if not self._kv.may_swap(request, num_blocks):
            return recompute
        return swap if self._mode == "swap" or swap.seconds < recompute.seconds else recompute

    def decide(self, request: Request, demand: int | None, *, may_swap: bool = True) -> Loss:
        # In mode auto, a decision against a possible copy moves the cost of copies towards the assumed cost, because
        # without copies their cost is not measured again.
        loss = self.loss(request, demand, may_swap=may_swap)
        if self._mode == "auto" and may_swap and not loss.swap and self._kv.swap.num_free:
            self.costs.block_copy.fade()
        return loss

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return which of two or more running requests gives up its blocks when memory runs out.

        The first request by rank is never chosen, so it makes progress in every step.
        """
        # A request that was preempted SAFE_AFTER times is chosen only if every candidate was preempted that often.
        # Otherwise the victim is of the lowest priority class; within it, the request with the smallest loss, then with
        # the largest rank.
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
        """Return the running request to preempt so that `waiting`, a request of a higher priority class, can run.

        Returns None if there is no such request, and under every policy except fair.
        """
        if self._policy != "fair":
            return None
        lowest = max(running, key=lambda r: (r.priority, r.rank, r.request_id))
        if lowest.priority <= waiting.priority or lowest.rank <= waiting.rank or lowest.num_preemptions >= SAFE_AFTER:
            return None
        return lowest
