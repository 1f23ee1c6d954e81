"""From logits to a drawn token, row by row: temperature, min_p, top_k, top_p, and the draw itself.

Order of tokens for all filters: higher logit first, and of equal logits (common in bfloat16) the lower id first. With
that, what a row keeps depends on its own logits alone, not on how a sort happened to treat the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmsched.engine.executor.batch import to_device

#: How many of the best tokens are sorted first for top_p. Rows whose nucleus is larger try again with so many times
#: more: sorting a whole vocabulary takes a CPU longer than a forward pass of a small model.
CANDIDATES, CANDIDATES_GROWTH = 256, 16
#: The draw sums the weights in chunks of this many tokens first, then walks one chunk.
CHUNK = 256

Float64 = npt.NDArray[np.float64]


class Filters(NamedTuple):
    """Parameters of S rows, each [S]: temperature above 0; top_k 0, top_p 1 and min_p 0 are off; uniform in [0, 1)."""

    temperature: Float64
    top_k: Float64
    top_p: Float64
    min_p: Float64
    uniform: Float64


def draw(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """One token id for each row of logits [S, V] (fp32), [S] int64 on the same device.

    Temperature first; then min_p keeps tokens of at least min_p times the best one's probability; of those, top_k keeps
    the k best; of those, renormalised, top_p keeps the fewest best ones that together reach top_p. At least one stays.
    A row whose best logit is not finite gets an id that means nothing.
    """
    temperature, top_k, top_p, min_p, uniform = to_device(np.stack(filters), logits.device)
    scores = scaled(logits, temperature.float())
    if filters.min_p.any():
        scores.masked_fill_(scores < min_p.log().float()[:, None], float("-inf"))
    restricted = (filters.top_k > 0) | (filters.top_p < 1)
    if restricted.any():
        counts = filters.top_k[restricted]
        look = int(np.where(counts > 0, counts, CANDIDATES).max())
        if restricted.all():
            cut(scores, top_k, top_p, look)
        else:
            rows = to_device(restricted.nonzero()[0], logits.device)
            some = scores[rows]
            cut(some, top_k[rows], top_p[rows], look)
            scores[rows] = some
    return invert(scores.exp_(), uniform).clamp(max=logits.shape[1] - 1)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - best) / temperature: the best is 0 and nothing overflows. Filled with -inf to a multiple of CHUNK."""
    rows, width = logits.shape
    scores = logits.new_full((rows, -(-width // CHUNK) * CHUNK), float("-inf"))
    torch.sub(logits, logits.amax(dim=1, keepdim=True), out=scores[:, :width])
    return scores.div_(temperature[:, None])


def cut(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, look: int) -> None:
    """Apply top_k and top_p [S] to scores [S, V] (best of a row: 0) in place; what goes becomes -inf.

    `look` is how many of the best tokens are sorted: at least the largest top_k. It does not change the result.
    """
    width = scores.shape[1]
    look = min(look, width)
    limit = torch.where(top_k > 0, top_k, width).clamp(max=width)
    best = scores.topk(look, dim=1).values
    ranks = torch.arange(look, device=scores.device)
    weights = best.exp().double() * (ranks < limit[:, None])
    running = weights.cumsum(dim=1)
    mass = torch.where(top_k > 0, running[:, -1], scores.exp().sum(dim=1, dtype=torch.float64))
    wanted = top_p * mass
    if look < width:
        larger = ((limit > look) & (running[:, -1] < wanted)).nonzero()[:, 0]
        if len(larger):
            wider = scores[larger]
            cut(wider, top_k[larger], top_p[larger], look * CANDIDATES_GROWTH)
    kept = ((running - weights < wanted[:, None]) & (ranks < limit[:, None])).sum(dim=1).clamp(min=1)
    drop_beyond(scores, kept, best.gather(1, kept[:, None] - 1))
    if look < width and len(larger):
        scores[larger] = wider


def drop_beyond(scores: torch.Tensor, kept: torch.Tensor, last: torch.Tensor) -> None:
    """Keep the `kept` [S] best of each row, whose last one scores `last` [S, 1]; ties at the end by lower id."""
    keep = scores >= last
    crowded = (keep.sum(dim=1) > kept).nonzero()[:, 0]
    if len(crowded):
        rows, ends = scores[crowded], last[crowded]
        ties = rows == ends
        room = kept[crowded] - (rows > ends).sum(dim=1)
        keep[crowded] &= ~(ties & (ties.cumsum(dim=1) > room[:, None]))
    scores.masked_fill_(~keep, float("-inf"))


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution, tokens in order of id: weights [S, V], V a multiple of CHUNK, -> ids [S].

    The first token at which the running sum exceeds uniform * total. Sums are float64; a token of weight 0 is never
    drawn, unless all weights are 0: then the id is any.
    """
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = below(uniform * sums[:, -1], sums[:, -1])
    chunk = (sums <= target[:, None]).sum(dim=1).clamp(max=chunks.shape[1] - 1)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = chunks[torch.arange(len(chunks), device=chunks.device), chunk].cumsum(dim=1, dtype=torch.float64)
    rest = below(target - before, inside[:, -1])
    return chunk * CHUNK + (inside <= rest[:, None]).sum(dim=1)


def below(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The value, or the largest number below the limit if rounding has brought it there."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))
