"""Peak memory of a step besides weights and KV, as a function of its numbers of tokens, sequences and context tokens.

A step runs MLPs or experts, attention and the sampler one after the other, so the peak in bytes is the largest of

    MLP        tokens x (4 x hidden + 3 x inner + 2 x head_dim) x dtype
               (residual, its normalised copy, two vectors of attention; gate, up and their product; rotary tables)
    experts    tokens x (4 x hidden + chosen x (hidden + expert)) x dtype + tokens x chosen x 12
               (residual, its normalised copy, output of the shared MLP, sum; inputs and outputs of the second products
               of all experts; numbers, weights and order of the experts). On a CPU, where one expert after the other
               computes: tokens x ((4 x hidden + 3 x expert) x dtype + 2 x hidden x 4)
               (the third and fourth are rows and outputs of one expert; gate, up and their product; sums in fp32)
    attention  tokens x ((2 x hidden + 3 x query + 2 x kv + 2 x head_dim) x dtype + 2 x query x 4)
               + context x bytes per token of the keys and values that one layer gathers for one sequence
    latent     tokens x (2 x hidden + heads x (N + P + 2 x M)) x dtype
    attention  + the larger of tokens x heads x (3 x R + P) x dtype and, for the keys and values that are expanded,
               (context x (R + P) + context x heads at once x (N + M + 2 x max(N + P, M))) x dtype
               (for the letters see kernels/latents.py, which limits the heads at once to 128 MiB)
    sampler    sequences x vocab x dtype + 3 x min(sequences x vocab x 4, limit)
               (the second term is for sequences with penalties or log-probabilities; the others are sampled without a
               copy, but on a CPU each thread needs vocab x 8 bytes, which are not counted)

`dtype` is the size of one number in bytes; `limit` is 1/1024 of the device's memory, but at least 16 MiB; chosen is the
number of routed experts per token and expert the width of one; hidden, inner, query, kv, head_dim and vocab are sizes
of the model. A CPU without bfloat16 instructions computes products of 16-bit numbers in fp32 and then rounds them, so
the MLP needs tokens x inner x 6 bytes more, because gate and up are computed as one product. Where matrices stay
quantised, a CPU needs 2 MiB more for the MLP, into which parts of them are unpacked. The term of attention that is not
latent applies only to CPUs, because the GPU kernel reads KV in place. Tests compare these terms with the bytes that
torch allocates. graph_memory.py has the memory of CUDA graphs. Recordings of decodes on a CPU keep the activations of
up to 36 tokens, which are not counted (see executor/recorded_decodes.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llmsched.engine.architecture.geometry import LayerGroup
from llmsched.kernels.latents import EXPANDED_BYTES, LatentWidths
from llmsched.kernels.packed_matrix import TILE_NUMBERS

if TYPE_CHECKING:
    from llmsched.engine.architecture.shape import ModelShape

#: Limit on the bytes of one fp32 copy of logits, if the memory of the device is not known.
LOGITS_BYTES = 32 << 20

#: Number of fp32 copies of logits at the peak: copies of the rows that are sampled at a time (measured 2 to 2.5), and
#: the logits from which prompt tokens get their log-probabilities.
LOGITS_COPIES = 3

#: Number of queries for which the CPU kernel holds a mask, and scores if needed, at one time.
CHUNK_TILE = 128

_FLOAT32 = 4
#: Bytes of an expert's number, of the weight of its output, and of the place of both in the order of all pairs.
_PAIR_BYTES = 12


def logits_limit(device_bytes: int) -> int:
    """Return the most bytes that one fp32 copy of logits may take on a device with `device_bytes` of memory."""
    return max(16 << 20, device_bytes >> 10)


def activation_bytes(
    shape: ModelShape,
    num_tokens: int,
    num_seqs: int,
    dtype_bytes: int,
    *,
    kind: Literal["cuda", "cpu"] = "cuda",
    context: int = 0,
    float32_products: bool = False,
    logits_bytes: int = LOGITS_BYTES,
) -> int:
    """Return the peak bytes of a step of `num_tokens` tokens and `num_seqs` sequences of at most `context` tokens.

    `float32_products` is True if the device computes products of 16-bit numbers in fp32. `logits_bytes` limits the size
    of one fp32 copy of logits (see `logits_limit`).
    """
    mlp = mlp_bytes(shape, num_tokens, dtype_bytes)
    if shape.weights.packed_types and kind == "cpu":
        mlp += TILE_NUMBERS * _FLOAT32
    if float32_products:
        mlp += num_tokens * shape.inner_size * (2 * _FLOAT32 - dtype_bytes)
    mlp = max(mlp, expert_bytes(shape, num_tokens, dtype_bytes, kind))
    logits = num_seqs * shape.vocab_size
    sampler = logits * dtype_bytes + LOGITS_COPIES * min(_FLOAT32 * logits, logits_bytes)
    attention = [0]
    for group in shape.geometry.groups:
        if group.latent is not None:
            attention.append(_latent_bytes(shape, group.latent, num_tokens, dtype_bytes, context, kind))
        elif group.kind != "state" and kind == "cpu":
            attention.append(_attention_bytes(shape, group, num_tokens, dtype_bytes, context))
    return max(mlp, sampler, *attention)


def mlp_bytes(shape: ModelShape, num_tokens: int, dtype_bytes: int) -> int:
    groups = shape.geometry.groups
    head_dim = max(group.head_dim_k if group.latent is None else group.latent.rope for group in groups)
    return num_tokens * (4 * shape.hidden_size + 3 * shape.inner_size + 2 * head_dim) * dtype_bytes


def expert_bytes(shape: ModelShape, num_tokens: int, dtype_bytes: int, kind: Literal["cuda", "cpu"] = "cuda") -> int:
    hidden, chosen, size = shape.hidden_size, shape.experts_per_token, shape.expert_size
    if not chosen:
        return 0
    if kind == "cpu":
        return num_tokens * ((4 * hidden + 3 * size) * dtype_bytes + 2 * hidden * _FLOAT32)
    return num_tokens * ((4 * hidden + chosen * (hidden + size)) * dtype_bytes + chosen * _PAIR_BYTES)


def _latent_bytes(
    shape: ModelShape,
    widths: LatentWidths,
    num_tokens: int,
    dtype_bytes: int,
    context: int,
    kind: Literal["cuda", "cpu"],
) -> int:
    rows = 2 * shape.hidden_size + shape.heads * (widths.key + widths.rope + 2 * widths.value)
    absorbed = num_tokens * shape.heads * (3 * widths.rank + widths.rope) * dtype_bytes
    of_head = context * widths.expanded * dtype_bytes
    expanded = max(EXPANDED_BYTES, of_head)
    if kind == "cpu":  # a GPU expands the contexts of several sequences at one time
        expanded = min(shape.heads * of_head, expanded)
    expanded += context * (widths.rank + widths.rope) * dtype_bytes + CHUNK_TILE * context * (1 + dtype_bytes)
    return num_tokens * rows * dtype_bytes + max(absorbed, expanded)


def _attention_bytes(shape: ModelShape, group: LayerGroup, num_tokens: int, dtype_bytes: int, context: int) -> int:
    """Return the peak bytes of one layer's attention on a CPU, which gathers the context of one sequence at a time."""
    keys, values = group.kv_widths
    queries = 2 * shape.hidden_size + 3 * shape.query_size + keys + values + 2 * group.head_dim_k
    visible = context if group.window is None else min(context, group.window + num_tokens)
    if shape.whole_scores:
        converted = max(keys, values) * _FLOAT32 if dtype_bytes < _FLOAT32 else 0
        scores = 2 * shape.heads * CHUNK_TILE * _FLOAT32  # scores and their softmax
        gathered = (keys + values) * dtype_bytes + converted + scores + CHUNK_TILE
    else:
        masks = CHUNK_TILE * (1 + dtype_bytes)  # as booleans, and as numbers that are added to scores
        gathered = max((keys + 2 * values) * dtype_bytes, (keys + values) * dtype_bytes + masks)
    return num_tokens * (queries * dtype_bytes + 2 * shape.query_size * _FLOAT32) + visible * gathered
