"""Forecast of the most KV memory that running requests will hold at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.prediction import OutputPredictor

#: Standard deviations that are added to the expected number of held tokens.
RISK = 1.0
#: Numbers of steps ahead at which the expected peak is evaluated.
HORIZON_POINTS = 16


Tokens: TypeAlias = npt.NDArray[np.int64]


def future_peak(held: Tokens, remaining: Tokens) -> int:
    """Return the most tokens that n sequences hold together until all have ended, if each adds a token per step.

    held [n] are their tokens now, remaining [n] those each will still add. For one group of layers that keeps all
    tokens; `saturating_peak` handles any layout.

    Sorted by what remains, longest first, the first i sequences still run when the i-th ends. They then hold what they
    hold now plus i times what remained to the i-th (the admission rule of LightLLM).
    """
    order = np.argsort(-remaining)
    counts = np.arange(1, len(order) + 1)
    return int((held[order].cumsum() + remaining[order] * counts).max())


def saturating_peak(held: Tokens, remaining: Tokens, layout: KVLayout) -> int:
    """Return the peak of `future_peak` for any layout: windows limit what a sequence holds.

    The peak is at the end of some sequence, so each end is evaluated with all sequences that run until then.
    """
    size = layout.room(held[:, None] + remaining)
    return int((size * (remaining[:, None] >= remaining)).sum(axis=0).max())


def expected_peak(held: Tokens, alive: npt.NDArray[np.float64], steps: Tokens, layout: KVLayout) -> float:
    """Return the largest mean plus RISK standard deviations of held tokens over `steps` ahead.

    held [n] are tokens now, alive [n, len(steps)] the probability that each sequence still runs after so many steps.
    Sequences are taken to be independent.
    """
    size = layout.room(held[:, None] + steps)
    mean = (alive * size).sum(axis=0)
    variance = (alive * (1 - alive) * size.astype(float) ** 2).sum(axis=0)
    return float((mean + RISK * np.sqrt(variance)).max())


def forecast_peak(kv: KVManager, predictor: OutputPredictor, request: Request, running: Sequence[Request]) -> int:
    """Return the blocks held at the peak if the request is admitted and shares no block.

    Blocks shared by running requests and pinned blocks count once, as they are now. If the pool has room for all
    requests to reach their longest possible length, return that sum without a forecast.
    """
    layout, tables = kv.layout, [other.table for other in running]
    held = np.array([*map(len, tables), layout.width(request.num_tokens)]) * layout.block_size
    others = kv.pool.num_used - sum(table.num_blocks for table in tables)
    outlook = predictor.outlook([*running, request])
    longest = -(-np.maximum(held, outlook.num_tokens + outlook.most) // layout.block_size) * layout.block_size
    if (most := layout.width(int(layout.room(longest).sum())) + others) <= kv.pool.num_blocks:
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
