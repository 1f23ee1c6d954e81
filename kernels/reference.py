"""Specification of all ops in plain torch, which is slow but easy to check.

A packed batch holds T new tokens of B sequences, one sequence after the other. The q_len_b new tokens of sequence b are
the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1: many in a prefill chunk, one in a decode.

The KV cache consists of blocks of block_size tokens, [num_blocks, kv_heads, block_size, head_dim]. Position p of
sequence b is in block block_tables[b, p // block_size] at offset p % block_size. Sequences may share blocks. Entries of
a block table after the context, or before a sliding window, are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Required, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from llmsched.kernels.activations import ACTIVATIONS as ACTIVATIONS
from llmsched.kernels.activations import Activation as Activation
from llmsched.kernels.experts import route as route
from llmsched.kernels.experts import run_experts as run_experts
from llmsched.kernels.fp8 import as_bytes, restored, stored
from llmsched.kernels.latents import LatentWidths, expanded
from llmsched.kernels.lora import add_lora as add_lora
from llmsched.kernels.lora import prepare_lora as prepare_lora
from llmsched.kernels.packed_matrix import PackedMatrix

Int32 = npt.NDArray[np.int32]
#: Function that copies an array to the device and returns the copy.
Put = Callable[[npt.NDArray[np.generic]], Tensor]


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    item_size: int  # bytes of one element of the query
    #: Of latent attention, in which `key_dim` and `value_dim` are the widths of latent vectors and rotary keys.
    latent: LatentWidths | None = None


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `paged_attention`."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    slopes: Tensor | None
    kv_scales: Tensor | None


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
    work: Any = None,
) -> Tensor:
    """Return the causal attention of a packed batch over a paged KV cache that already holds the new keys and values.

    - query: [T, heads, D]. Query i of sequence b is at position p = context_lens[b] - q_len_b + i.
    - key_cache: [num_blocks, kv_heads, block_size, D]. Query head h uses KV head h // (heads // kv_heads).
    - value_cache: [num_blocks, kv_heads, block_size, Dv].
    - block_tables: int32 [B, max_blocks].
    - cu_seqlens_q: int32 [B + 1].
    - context_lens: int32 [B]. A context length includes the new tokens.
    - window: a query at position p attends to the keys p - window + 1 to p (transformers' `sliding_window`). None: to
      the keys 0 to p.
    - softcap: a scaled score s becomes softcap * tanh(s / softcap) (Gemma-2).
    - sinks: [heads]. Each head's sink is one more logit in the denominator of the softmax, without a value (gpt-oss).
    - slopes: [heads]. A key's score is lowered by the head's slope times the distance between key and query in tokens
      (ALiBi, Press et al. 2021).
    - kv_scales: float32 [2, kv_heads], the scales of keys and of values in fp8 caches (see fp8.py); None for others.
    - work: the result of the backend's `prepare_attention` for this layer and batch. None: it is prepared now.

    Returns [T, heads, Dv] in the query's dtype. The softmax is computed in float32.
    """
    group, block_size = query.shape[1] // key_cache.shape[1], key_cache.shape[2]
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    bounds = cu_seqlens_q.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        first_query = context - (rows.stop - rows.start)
        begin = 0 if window is None else max(0, first_query - window + 1) // block_size * block_size
        table = block_tables[sequence, begin // block_size :]
        keys = restored(gather(key_cache, table, context - begin), key_scales).repeat_interleave(group, dim=1)
        values = restored(gather(value_cache, table, context - begin), value_scales).repeat_interleave(group, dim=1)
        attended = _attend(query[rows], keys, values, begin, scale, window, softcap, sinks, slopes)
        output[rows] = attended.to(output.dtype)
    return output


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last queries of one sequence, float32 [q_len, heads, Dv].

    `keys` [C, heads, D] and `values` [C, heads, Dv] are float32, and belong to the positions from `begin` on.
    """
    context = begin + len(keys)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(begin, context, device=query.device)
    query_positions = torch.arange(context - len(query), context, device=query.device)[:, None]
    if slopes is not None:
        scores = scores + slopes.float()[:, None, None] * (key_positions - query_positions)
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink_column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink_column], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : context - begin]
    return torch.einsum("hqk,khd->qhd", weights, values)


def latent_attention(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    weight: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    work: Any = None,
) -> Tensor:
    """Return the causal latent attention of a packed batch over a paged cache that already holds the new tokens.

    - query: [T, heads, N + P]. The last P numbers belong to the rotary key.
    - latents: [num_blocks, 1, block_size, R]. rope_keys: [num_blocks, 1, block_size, P].
    - weight: [heads x (N + M), R], see latents.py.
    - kv_scales: float32 [2, 1], the scales of latent vectors and of rotary keys in fp8 caches; None for others.
    - the other arguments: as in `paged_attention`.

    Returns [T, heads, M] in the query's dtype.
    """
    widths, heads = LatentWidths.of(query, latents, rope_keys, weight), query.shape[1]
    latent_scales, rope_scales = (None, None) if kv_scales is None else kv_scales
    output = query.new_empty(query.shape[0], heads, widths.value)
    bounds = cu_seqlens_q.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        rows, table = slice(bounds[sequence], bounds[sequence + 1]), block_tables[sequence]
        found = restored(gather(latents, table, context), latent_scales)[:, 0]
        rope = restored(gather(rope_keys, table, context), rope_scales).expand(-1, heads, -1)
        keys, values = (part.transpose(0, 1) for part in expanded(found, weight.float(), heads, widths.key))
        attended = _attend(query[rows], torch.cat([keys, rope], dim=2), values, 0, scale)
        output[rows] = attended.to(output.dtype)
    return output


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[Any]:
    """Prepare the attention of a step. Return the argument `work` of `paged_attention` for each layer.

    `cu_seqlens_q` and `context_lens` are on the host. `put` copies an array to `device`. If all B sequences have one
    new token, the number and the shapes of the copied arrays depend only on B and `layers`, so that a CUDA graph can be
    replayed over new contents of these arrays.
    """
    return [None] * len(layers)  # the reference has nothing to prepare


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Write the keys [T, kv_heads, D] and values [T, kv_heads, Dv] of T new tokens to the cache in place.

    `slot_mapping` is int64 [T]. Slot s is offset s % block_size in block s // block_size. A token with a negative slot
    is padding, which is not written. No other slot may appear twice. `kv_scales` is as in `paged_attention`.
    """
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        as_bytes(cache)[blocks, :, offsets] = as_bytes(stored(new[real], cache.dtype, scales))


class SamplingParameter(IntEnum):
    """Row index in the `parameters` of `sample(...)`. Each column has the parameters of one row of logits."""

    TEMPERATURE = 0  # 0 for a greedy row
    TOP_K = 1  # 0 or less turns the filter off
    TOP_P = 2  # 1 turns the filter off
    MIN_P = 3  # 0 turns the filter off
    KEY_0 = 4  # first 32 bits of the row's random key
    KEY_1 = 5  # last 32 bits of the row's random key


#: Tokens per chunk of the race.
CHUNK = 256
#: A token's weight is its probability relative to the best token's, in units of 1 / WEIGHT_UNITS. Weights are integers,
#: so that no order of additions changes a sum: every row gets the same token in every batch.
WEIGHT_UNITS = 1 << 40
#: Scores below it give the weight 0.
MIN_SCORE = -28.0


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    """Sample a token id for each row of logits [R, V]. Return ids [R] (int64), -1 where the best logit is not finite.

    `parameters` is [6, R] (float64), with the rows of SamplingParameter. A row of temperature 0 gets its best token. In
    other rows, the temperature divides the logits, and these filters are applied one after the other:

    - min_p keeps tokens with at least min_p times the probability of the best token.
    - top_k keeps the k best tokens.
    - top_p keeps the fewest best tokens whose renormalised probabilities sum to top_p or more.

    Tokens with equal logits (common in bfloat16) are ordered by id. `race` draws one of the kept tokens.
    """
    temperature, top_k, top_p, min_p = parameters[: SamplingParameter.KEY_0].unsqueeze(2)
    logits = logits.float()
    best, greedy = logits.max(dim=1)
    scores = (logits - best[:, None]) / temperature.float()
    scores = torch.where(scores >= min_p.log().float(), scores, float("-inf"))
    weights = (scores.exp() * WEIGHT_UNITS).long()

    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked, ranks = weights.gather(1, order), torch.arange(logits.shape[1], device=logits.device)
    ranked[(top_k > 0) & (ranks >= top_k)] = 0
    wanted = (top_p * ranked.sum(dim=1, keepdim=True)).ceil().long()
    ranked[ranked.cumsum(dim=1) - ranked >= wanted] = 0
    drawn = race(torch.empty_like(weights).scatter_(1, order, ranked), parameters[SamplingParameter.KEY_0 :].T.long())
    return torch.where(best.isfinite(), torch.where(temperature[:, 0] > 0, drawn, greedy), -1)


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw one id per row, with probabilities proportional to weights [R, V] (int64).

    `keys` [R, 2] (int64) are random keys. Lower ids win ties. A token of weight 0 is drawn only if all weights are 0.

    Source: exponential races in C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NIPS 2014.
    """
    # The source also covers races between sets of tokens by the sums of their weights.
    # Each token has an independent exponential time E, and the token with the largest weight / E is drawn, which
    # happens with probability weight / sum. This is the Gumbel-max trick, because -log E is Gumbel noise. The race has
    # two rounds, to draw fewer random numbers: chunks of tokens compete with the sums of their weights, then the tokens
    # in the winning chunk. The draw hardly depends on rounding, because the times do not depend on the logits. If a
    # recomputation moves logits by 1e-6, about one draw in 1e6 changes. Inverting the cumulative distribution would
    # change far more draws, because each token's interval in [0, 1) would shift with the sum of the weights before it.
    rows, width = weights.shape
    chunks = torch.nn.functional.pad(weights, (0, -width % CHUNK)).view(rows, -1, CHUNK)
    sums = chunks.sum(dim=2)
    names = torch.arange(CHUNK + sums.shape[1], device=weights.device)
    uniform = (hashed(names, keys[:, :1], keys[:, 1:]).double() + 0.5) * 2.0**-32
    times = uniform.neg().log1p().neg()  # independent exponentially distributed samples (mean 1, above 0)
    chunk = (sums / times[:, CHUNK:]).argmax(dim=1)
    inside = chunks[torch.arange(rows, device=weights.device), chunk]
    return (chunk * CHUNK + (inside / times[:, :CHUNK]).argmax(dim=1)).clamp(max=width - 1)


#: Multipliers of `hashed`.
MIX_0, MIX_1 = 0x604BAA5D, 0x43D6CE97


def hashed(names: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return 32 pseudorandom bits for each integer in `names`, computed from it and the key (first, second).

    The arguments are broadcast together. They and the result are int64 in [0, 2**32). Source: C. Wellons, "Prospecting
    for hash functions", 2018.
    """
    # No product reaches 2**63, so all devices compute the same hashes. Of the source's multipliers below 2**31, these
    # are the two with the least bias.
    mixed = names ^ first
    mixed = ((mixed ^ mixed >> 16) * MIX_0) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15 ^ second) * MIX_1) & 0xFFFFFFFF
    return mixed ^ mixed >> 15


def gather(cache: Tensor, block_table: Tensor, context: int) -> Tensor:
    """Return the keys or values at the first `context` positions of a sequence, [context, kv_heads, head_dim]."""
    num_blocks = -(-context // cache.shape[2])
    blocks = as_bytes(cache)[block_table[:num_blocks].long()].view(cache.dtype)
    return blocks.transpose(1, 2).flatten(0, 1)[:context]


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    branch_weight: Tensor | None = None,
) -> Tensor:
    """Add `branch` [T, N], if given, to `residual` [T, N] in place. Return the normalised sum, [T, N].

    The RMS norm of a row x is x / sqrt(mean(x^2) + eps) * (weight + offset) + bias. `weight` and `bias` are [N]. Sums
    are computed in float32, and each result is rounded to the type of `residual`.

    - centred: the mean of the row is first subtracted from x, which gives LayerNorm.
    - branch_weight: [N]. The branch is normalised with these weights, without a bias, before the addition (Gemma-2).
    """
    if branch is not None:
        if branch_weight is not None:
            branch = norm(branch, branch_weight, eps=eps, offset=offset, centred=centred)
        residual += branch
    return norm(residual, weight, bias, eps=eps, offset=offset, centred=centred)


def norm(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, offset: float = 0.0, centred: bool = False
) -> Tensor:
    """Normalise the last dimension of `rows` as in `add_norm`. The result has the type of `rows`."""
    x = rows.float()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return (x if bias is None else x + bias.float()).to(rows.dtype)


def rotate_and_write(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    by_group: bool = False,
    neighbours: bool = False,
    norm_last: bool = False,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions, and write keys and values to the cache. Return the queries.

    - projected: [T, (heads + 2 x kv_heads) x D]. A row has the vectors of all query heads, then of all key heads, then
      of all value heads.
    - by_group: if True, a row has one group of vectors for each KV head: queries, key, value (BLOOM, Falcon, GPT-NeoX).
    - cos, sin: [T, R] in the type of `projected`, where R is even and at most D. The first R numbers x of a vector
      become x cos + (-x2, x1) sin, where x1 and x2 are the halves of x (rotary position embedding, Su et al. 2021).
    - neighbours: if True, x1 and x2 are the numbers at even and at odd places, and keep these places (GLM, Cohere).
    - slot_mapping: int64 [T], as in `write_kv`.
    - kv_scales: as in `paged_attention`.
    - query_weight, key_weight: [D]. Queries and keys are replaced by their RMS norms before the rotation (Qwen3).
    - norm_last: if True, they are replaced after the rotation instead (Hunyuan).

    Returns the rotated queries, [T, heads, D].
    """
    _, kv_heads, _, head_dim = key_cache.shape
    vectors = projected.view(len(projected), -1, head_dim)
    heads = vectors.shape[1] - 2 * kv_heads
    if by_group:
        groups = vectors.view(len(projected), kv_heads, -1, head_dim)
        query, key, value = (part.flatten(1, 2) for part in torch.split(groups, [heads // kv_heads, 1, 1], dim=2))
    else:
        query, key, value = torch.split(vectors, [heads, kv_heads, kv_heads], dim=1)

    def turned(part: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and not norm_last:
            part = norm(part, weight, eps=eps, offset=offset)
        part = rotate(part, cos, sin, neighbours)
        return norm(part, weight, eps=eps, offset=offset) if weight is not None and norm_last else part

    write_kv(turned(key, key_weight), value, key_cache, value_cache, slot_mapping, kv_scales=kv_scales)
    return turned(query, query_weight)


def rotate_and_write_latents(
    query: Tensor,
    compressed: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    interleaved: bool = False,
    kv_scales: Tensor | None = None,
) -> None:
    """Rotate queries in place, and write the latent vectors and rotary keys of T new tokens to the cache.

    - query: [T, heads, N + P]. The last P numbers of each head are rotated by the token's position.
    - compressed: [T, R + P]. In each row, the first R numbers become the latent vector by an RMS norm with `weight`
      [R], and the last P numbers become the rotary key by rotation.
    - cos, sin: [T, P], as in `rotate_and_write`.
    - interleaved: if True, the pairs that are rotated are neighbours, and the first numbers of all pairs come first in
      the result (DeepSeek-V3).
    - the other arguments: as in `latent_attention` and `write_kv`.
    """
    rows, key = rotated_latents(
        query, compressed, weight, cos, sin, latents.shape[3], eps=eps, offset=offset, interleaved=interleaved
    )
    write_kv(rows, key, latents, rope_keys, slot_mapping, kv_scales=kv_scales)


def rotated_latents(
    query: Tensor,
    compressed: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rank: int,
    *,
    eps: float,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do the same as `rotate_and_write_latents`, but return the latent vectors [T, 1, R] and rotary keys [T, 1, P]."""
    key, part = compressed[:, None, rank:], query[..., query.shape[2] - cos.shape[1] :]
    turned = part
    if interleaved:
        key, turned = (torch.cat([each[..., ::2], each[..., 1::2]], dim=2) for each in (key, part))
    part.copy_(rotate(turned, cos, sin))
    return norm(compressed[:, :rank], weight, eps=eps, offset=offset)[:, None], rotate(key, cos, sin)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Apply the rotary position embedding to `vectors` [T, heads, D], as `rotate_and_write` does."""
    size = cos.shape[1]
    x, half = vectors[..., :size].float(), size // 2
    if neighbours:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=3).flatten(2)
    else:
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=2)
    rotated = (x * cos.float()[:, None] + turned * sin.float()[:, None]).to(vectors.dtype)
    return torch.cat([rotated, vectors[..., size:]], dim=2)


def linear(rows: Tensor, weight: Tensor | Sequence[PackedMatrix], bias: Tensor | None) -> Tensor:
    """Return rows @ weight.T + bias, [T, M], for `rows` [T, N], `weight` [M, N] and `bias` [M] or None.

    If `weight` is a sequence of packed matrices, the rows of all these matrices together are the matrix [M, N].
    """
    if not isinstance(weight, Tensor):
        weight = torch.cat([part.unpacked() for part in weight]).to(rows.dtype)
    return F.linear(rows, weight, bias)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) x up, [T, N], for the halves gate and up of each row of `gate_up` [T, 2 N]."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def activated(rows: Tensor, activation: Activation) -> Tensor:
    """Return activation(rows) for `rows` [T, N], computed in float32."""
    return ACTIVATIONS[activation](rows.float()).to(rows.dtype)
