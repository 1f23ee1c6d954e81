"""May a request come in? What its memory will be when all that run have grown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.manager import KVManager, PrefixHit, table_of
from llmsched.engine.request import Request
from llmsched.engine.scheduler.prediction import OutputPredictor


class Growth(NamedTuple):
    """A sequence that runs (or might): tokens it holds now, and tokens that it will still add."""

    held: int
    remaining: int


def future_peak(growths: Iterable[Growth]) -> int:
    """The most tokens that are held at the same time until all have ended, if each adds a token per step.

    Sorted by what remains, longest first, the first i are those that still run when the i-th ends; together they then
    hold what they hold now and i times what remained to it (the admission rule of LightLLM).
    """
    peak = held = 0
    for count, growth in enumerate(sorted(growths, key=lambda g: -g.remaining), start=1):
        held += growth.held
        peak = max(peak, held + growth.remaining * count)
    return peak


@dataclass(slots=True)
class Reservation:
    """A request that does not fit yet, and in how many steps it is predicted to."""

    request: Request
    steps: int


class Admission:
    """The gates: the whole uncached prompt must fit above the headroom, and the predicted peak must fit the pool."""

    def __init__(self, kv: KVManager, config: EngineConfig, predictor: OutputPredictor) -> None:
        self._kv = kv
        self._config = config
        self._predictor = predictor

    def shortage(self, request: Request, hit: PrefixHit, running: Sequence[Request], headroom: float) -> int:
        """Blocks that are missing for the request to come in now; 0 lets it in.

        With nobody running there is nobody to keep headroom for: what fits alone comes in.
        """
        pool = self._kv.pool
        if not running:
            return 0
        missing = self._kv.num_missing(request, hit) + int(headroom * pool.num_blocks) - pool.num_available
        if missing <= 0 and self._config.output_prediction != "none":
            missing = self._predicted_peak(request, running) - pool.num_blocks
        return max(0, missing)

    def _predicted_peak(self, request: Request, running: Sequence[Request]) -> int:
        """Blocks held at the peak. Blocks that running requests share are counted once, as they are now."""
        size = self._kv.block_size
        tables = [len(table_of(other)) for other in running]
        growths = [
            Growth(blocks * size, max(0, other.num_tokens + self._predictor.remaining(other) - 1 - blocks * size))
            for other, blocks in zip(running, tables, strict=True)
        ]
        own = self._kv.num_blocks_for(request.num_tokens) * size
        growths.append(Growth(own, max(0, request.num_tokens + self._predictor.remaining(request) - 1 - own)))
        shared = sum(tables) - self._kv.pool.num_used
        return self._kv.num_blocks_for(future_peak(growths)) - max(0, shared)

    def reserve(self, request: Request, running: Sequence[Request], shortage: int) -> Reservation:
        """When a request that lacks `shortage` blocks will fit: after enough of those that run have ended."""
        steps = 0
        for remaining, blocks in sorted((self._predictor.remaining(r), len(table_of(r))) for r in running):
            steps = remaining
            shortage -= blocks
            if shortage <= 0:
                break
        return Reservation(request, steps)

    def may_pass(self, request: Request, reservation: Reservation) -> bool:
        """Whether a later request may go before the reserved one: a bounded number may, if gone before its start."""
        budget = self._config.max_num_batched_tokens or 1
        steps = -(-request.num_tokens // budget) + self._predictor.remaining(request)
        return reservation.request.num_passed < self._config.max_passes and steps <= reservation.steps
