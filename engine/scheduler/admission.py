"""May a request come in? What its memory will be when all that run have grown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.finder import PrefixHit, blocks_of
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.table import table_of
from llmsched.engine.request import Request
from llmsched.engine.scheduler.prediction import OutputPredictor

#: Standard deviations of the held tokens by which the expected peak is raised.
RISK = 1.0
#: Numbers of steps ahead at which the expected peak is looked at.
HORIZON_POINTS = 16


class Growth(NamedTuple):
    """A sequence that runs (or might): tokens it holds now, and tokens that it will still add."""

    held: int
    remaining: int


def future_peak(growths: Iterable[Growth]) -> int:
    """The most tokens that are held at the same time until all have ended, if each adds a token per step.

    For one group of layers that keeps all tokens; `saturating_peak` is for any layout.

    Sorted by what remains, longest first, the first i are those that still run when the i-th ends; together they then
    hold what they hold now and i times what remained to it (the admission rule of LightLLM).
    """
    peak = held = 0
    for count, growth in enumerate(sorted(growths, key=lambda g: -g.remaining), start=1):
        held += growth.held
        peak = max(peak, held + growth.remaining * count)
    return peak


def saturating_peak(growths: Sequence[Growth], layout: KVLayout) -> int:
    """As future_peak, with what each holds counted by `layout`: at the end of each one, all that run until then."""
    held, remaining = np.array(growths, dtype=np.int64).T
    size = layout.room(held[:, None] + remaining)
    return int((size * (remaining[:, None] >= remaining)).sum(axis=0).max())


def expected_peak(
    held: npt.NDArray[np.int64], alive: npt.NDArray[np.float64], steps: npt.NDArray[np.int64], layout: KVLayout
) -> float:
    """Like future_peak where lengths are uncertain: the largest, over `steps` ahead, of mean plus RISK deviations.

    held [n] tokens now, alive [n, len(steps)] the probability that each still runs after so many steps, independently.
    """
    size = layout.room(held[:, None] + steps)
    mean = (alive * size).sum(axis=0)
    variance = (alive * (1 - alive) * size.astype(float) ** 2).sum(axis=0)
    return float((mean + RISK * np.sqrt(variance)).max())


@dataclass(slots=True)
class Reservation:
    """A request that does not fit yet, and in how many steps it is predicted to."""

    request: Request
    steps: int


class Shortage(NamedTuple):
    """Blocks that a request lacks: `now`, above the headroom, or else when those that run have grown."""

    blocks: int
    now: bool


class Admission:
    """The gates: the whole uncached prompt must fit above the headroom, and the predicted peak must fit the pool."""

    def __init__(self, kv: KVManager, config: EngineConfig, predictor: OutputPredictor) -> None:
        self._kv = kv
        self._config = config
        self._predictor = predictor

    def shortage(self, request: Request, hit: PrefixHit, running: Sequence[Request], headroom: int) -> Shortage | None:
        """What the request lacks to come in now and leave `headroom` blocks; None lets it in.

        With nobody running there is nobody to keep headroom for: what fits alone comes in.
        """
        pool = self._kv.pool
        if not running:
            return None
        if (missing := self._kv.num_missing(request, hit) + headroom - pool.num_available) > 0:
            return Shortage(missing, now=True)
        if self._config.output_prediction == "none":
            return None
        found = blocks_of(hit.nodes, ())
        held_already = len(found) - pool.count_cached(found)
        missing = self._predicted_peak(request, running) - held_already - pool.num_blocks
        return Shortage(missing, now=False) if missing > 0 else None

    def _predicted_peak(self, request: Request, running: Sequence[Request]) -> int:
        """Blocks held at the peak, if the request shares none. Those that running requests share count once and pinned
        ones as well, both as they are now.
        """
        size, layout = self._kv.block_size, self._kv.layout
        tables = [table_of(other) for other in running]
        held = [len(table) * size for table in tables] + [layout.width(request.num_tokens) * size]
        everyone = [*running, request]
        if any(self._predictor.knows(other) for other in everyone):
            longest = max(other.sampling.max_tokens - other.num_output_tokens for other in everyone)
            steps = np.unique(np.geomspace(1, max(2, longest), HORIZON_POINTS).astype(np.int64))
            peak = expected_peak(np.array(held), self._predictor.survival(everyone, steps), steps, layout)
        else:
            growths = [
                Growth(now, max(0, other.num_tokens + self._predictor.remaining(other) - 1 - now))
                for other, now in zip(everyone, held, strict=True)
            ]
            simple = layout.full_groups == layout.num_groups == 1
            peak = future_peak(growths) if simple else saturating_peak(growths, layout)
        return layout.width(int(peak)) + self._kv.pool.num_used - sum(table.num_blocks for table in tables)

    def reserve(self, request: Request, running: Sequence[Request], shortage: int) -> Reservation:
        """When a request that lacks `shortage` blocks will fit: after enough of those that run have ended."""
        steps = 0
        for remaining, blocks in sorted((self._predictor.remaining(r), table_of(r).num_blocks) for r in running):
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
