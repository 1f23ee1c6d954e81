"""Sampling filters (temperature, min_p, top_k, top_p) and the random draw, for batches of rows.

All filters order tokens by logit, and equal logits (common in bfloat16) by ascending id. So the tokens that a row keeps
depend only on the row's own logits, not on how a batched sort orders equal values.

The draw is an exponential race. Each token has a weight w and an independent exponential time E, and the token with the
largest w / E is drawn. This happens with probability w / sum(w). The race is the Gumbel-max trick, because log w - log
E is log w plus Gumbel noise.

The draw hardly depends on rounding, because the times do not depend on the logits. If a recomputation moves logits by
1e-6, about one draw in 1e6 changes. Inverting the cumulative distribution would change far more draws, because each
token's interval in [0, 1) would shift with the sum of the weights before it.

Source: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NIPS 2014, which also covers races between sets of tokens by
the sums of their weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmsched.engine.executor.batch import to_device
from llmsched.engine.executor.rng import UInt64, hashed
from llmsched.engine.memory.activations import SORTED_BYTES

#: Number of best tokens that are sorted first for top_p, and the factor by which this number grows for rows that need
#: more. On a CPU, sorting a whole vocabulary takes longer than a forward pass of a small model.
CANDIDATES, CANDIDATES_GROWTH = 256, 16
#: Tokens per chunk of the draw (see `race`).
CHUNK = 256

Float64 = npt.NDArray[np.float64]


class Filters(NamedTuple):
    """Filter parameters of S rows, each an array [S]. `keys` [2, S] has the random key of each row in two 32-bit words.

    Temperatures are above 0. A filter is off at these values: top_k 0 or -1, top_p 1, min_p 0.
    """

    temperature: Float64
    top_k: Float64
    top_p: Float64
    min_p: Float64
    keys: UInt64


def draw(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Draw a token id for each row of logits [S, V] (fp32); return the ids [S] as int64 on the same device.

    The filters apply one after the other. temperature divides the logits. min_p keeps tokens with at least min_p times
    the best token's probability. top_k keeps the k best of these. top_p keeps the fewest best tokens whose renormalised
    probabilities sum to top_p or more. A row whose best logit is not finite gets an id without meaning.
    """
    numbers = to_device(np.vstack(filters), logits.device)
    temperature, top_k, top_p, min_p = numbers[:4]
    # (logits - best) / temperature, so the best score is 0; padded with -inf to a multiple of CHUNK.
    width = logits.shape[1]
    scores = logits.new_full((len(logits), -(-width // CHUNK) * CHUNK), float("-inf"))
    torch.sub(logits, logits.amax(dim=1, keepdim=True), out=scores[:, :width])
    scores.div_(temperature.float()[:, None])
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
    return race(scores.exp_(), numbers[4:].T.long()).clamp(max=width - 1)


def cut(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, look: int) -> None:
    """Apply top_k and top_p [S] in place to scores [S, V]: set the scores of dropped tokens to -inf.

    The best score of each row must be 0. `look`, at least the largest top_k, is the number of best tokens to sort
    first. For rows whose top_p needs more tokens, more are sorted.
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
            wider, look_further = scores[larger], look * CANDIDATES_GROWTH
            step = max(1, SORTED_BYTES // (4 * min(look_further, width)))
            for low in range(0, len(larger), step):
                rows = larger[low : low + step]
                cut(wider[low : low + step], top_k[rows], top_p[rows], look_further)
    kept = ((running - weights < wanted[:, None]) & (ranks < limit[:, None])).sum(dim=1).clamp(min=1)
    drop_beyond(scores, kept, best.gather(1, kept[:, None] - 1))
    if look < width and len(larger):
        scores[larger] = wider


def drop_beyond(scores: torch.Tensor, kept: torch.Tensor, last: torch.Tensor) -> None:
    """Keep the `kept` [S] best tokens of each row; lower ids win ties. Set the scores of all others to -inf.

    `last` [S, 1] is the score of the worst token to keep.
    """
    keep = scores >= last
    crowded = (keep.sum(dim=1) > kept).nonzero()[:, 0]
    if len(crowded):
        rows, ends = scores[crowded], last[crowded]
        ties = rows == ends
        room = kept[crowded] - (rows > ends).sum(dim=1)
        keep[crowded] &= ~(ties & (ties.cumsum(dim=1) > room[:, None]))
    scores.masked_fill_(~keep, float("-inf"))


def race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one id per row with probabilities proportional to weights [S, V], where V is a multiple of CHUNK.

    `keys` [S, 2] (int64) are the random keys. The draw is an exponential race in two rounds, to draw fewer random
    numbers. First the chunks of CHUNK tokens compete, each with the sum of its weights. Then the tokens in the winning
    chunk compete. Lower ids win ties. A token of weight 0 is drawn only if all weights are 0.
    """
    chunks = weights.view(len(weights), -1, CHUNK)
    # The order of additions may differ between batches; in float64 it does not change which chunk wins.
    sums = chunks.sum(dim=2, dtype=torch.float64)
    names = torch.arange(CHUNK + sums.shape[1], device=weights.device)
    uniform = (hashed(names, keys[:, :1], keys[:, 1:]).double() + 0.5) * 2.0**-32
    times = uniform.neg_().log1p_().neg_()  # independent exponentially distributed samples (mean 1, above 0)
    chunk = (sums / times[:, CHUNK:]).argmax(dim=1)
    inside = chunks[torch.arange(len(chunks), device=weights.device), chunk]
    return chunk * CHUNK + (inside / times[:, :CHUNK]).argmax(dim=1)
