"""May a request come in? What its memory will be when all that run have grown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.prefix_tree import PrefixHit, blocks_of
from llmsched.engine.request import Request
from llmsched.engine.scheduler.prediction import OutputPredictor

#: Standard deviations of the held tokens by which the expected peak is raised.
RISK = 1.0
#: Numbers of steps ahead at which the expected peak is looked at.
HORIZON_POINTS = 16


Tokens: TypeAlias = npt.NDArray[np.int64]


def future_peak(held: Tokens, remaining: Tokens) -> int:
    """The most tokens that n sequences hold at the same time until all have ended, if each adds a token per step: held
    [n] now, and remaining [n] that each will still add.

    For one group of layers that keeps all tokens; `saturating_peak` is for any layout.

    Sorted by what remains, longest first, the first i are those that still run when the i-th ends; together they then
    hold what they hold now and i times what remained to it (the admission rule of LightLLM).
    """
    order = np.argsort(-remaining)
    counts = np.arange(1, len(order) + 1)
    return int((held[order].cumsum() + remaining[order] * counts).max())


def saturating_peak(held: Tokens, remaining: Tokens, layout: KVLayout) -> int:
    """As future_peak, with what each holds counted by `layout`: at the end of each one, all that run until then."""
    size = layout.room(held[:, None] + remaining)
    return int((size * (remaining[:, None] >= remaining)).sum(axis=0).max())


def expected_peak(held: Tokens, alive: npt.NDArray[np.float64], steps: Tokens, layout: KVLayout) -> float:
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
        ones as well, both as they are now. More than that where there is room for all to become as long as they may.
        """
        layout, tables = self._kv.layout, [other.table for other in running]
        held = np.array([*map(len, tables), layout.width(request.num_tokens)]) * layout.block_size
        others = self._kv.pool.num_used - sum(table.num_blocks for table in tables)
        outlook = self._predictor.outlook([*running, request])
        longest = -(-np.maximum(held, outlook.num_tokens + outlook.most) // layout.block_size) * layout.block_size
        if (most := layout.width(int(layout.room(longest).sum())) + others) <= self._kv.pool.num_blocks:
            return most
        if outlook.learned:
            horizon = max(2, int((outlook.limit - outlook.done).max()))
            steps = np.unique(np.geomspace(1, horizon, HORIZON_POINTS).astype(np.int64))
            peak = expected_peak(held, outlook.survival(steps), steps, layout)
        else:
            remaining = np.maximum(0, outlook.num_tokens + outlook.most - 1 - held)
            simple = layout.full_groups == layout.num_groups == 1
            peak = future_peak(held, remaining) if simple else saturating_peak(held, remaining, layout)
        return layout.width(int(peak)) + others

    def reserve(self, request: Request, running: Sequence[Request], shortage: int) -> Reservation:
        """When a request that lacks `shortage` blocks will fit: after enough of those that run have ended."""
        steps = 0
        for remaining, blocks in sorted((self._predictor.remaining(r), r.table.num_blocks) for r in running):
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
