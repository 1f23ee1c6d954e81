"""Latent attention (MLA) of transformers models: it hands latent vectors, not keys and values, to the engine."""
# The attention modules of all these models call their method `expand_kv` with latent vectors and rotary keys, and give
# its results, keys and values of all heads, to the attention function. While the engine's attention functions are set,
# the method returns its arguments.

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.engine.errors import ModelError
from llmsched.engine.model.modules import Linear, Norm, NormRule, UnknownStructureError, children, norm_of, norm_rule
from llmsched.kernels import reference

#: Largest difference of queries, latent vectors and scores, relative to their size, in float32 and in 16-bit types.
TOLERANCE, TOLERANCE_16 = 1e-3, 0.03
#: Attention functions with this prefix take latent vectors and rotary keys.
PREFIX = "llmsched_"


def keep_latents(model: PreTrainedModel) -> None:
    """Make latent attention give latent vectors and rotary keys to attention functions whose names have PREFIX.

    Raises ModelError if the model has latent attention of another kind.
    """
    found, modules = 0, list[Any](model.modules())
    for module in modules:
        if not hasattr(module, "expand_kv") or not isinstance(getattr(module, "kv_b_proj", None), nn.Linear):
            continue
        found += 1
        if "expand_kv" not in vars(module):
            module.expand_kv = MethodType(_expand_unless_kept, module)
    if not found and getattr(model.config.get_text_config(), "kv_lora_rank", None):
        raise ModelError(f"{type(model).__name__} has latent attention of an unknown kind: it cannot be served")


def _expand_unless_kept(module: Any, latents: Tensor, rope_keys: Tensor) -> Any:
    if str(module.config._attn_implementation).startswith(PREFIX):
        return latents, rope_keys
    return type(module).expand_kv(module, latents, rope_keys)


def latent_weight(module: Any) -> Tensor | None:
    """Return the matrix that expands the latent vectors of an attention module; None for other attention."""
    weight: Tensor | None = module.kv_b_proj.weight if "expand_kv" in vars(module) else None
    return weight


class NarrowQuery(NamedTuple):
    """Norm and second matrix of queries, where two matrices compute the queries."""

    norm: Norm
    rule: NormRule
    expand: Linear


class LatentParts(NamedTuple):
    """Parts of latent attention, see `reference.rotate_and_write_latents`."""

    query: Linear
    narrow: NarrowQuery | None  # None if `query` computes the queries
    compress: Linear
    norm: Norm  # of latent vectors
    rule: NormRule
    weight: Tensor
    interleaved: bool

    def queries(self, rows: Tensor) -> Tensor:
        """Return the queries of all heads before their rotation, as transformers computes them."""
        found: Tensor = self.query(rows)
        if self.narrow is not None:
            found = self.narrow.expand(reference.norm(found, *self.narrow.norm, **self.narrow.rule._asdict()))
        return found


def read_latent_parts(module: nn.Module, rotary: nn.Module | None) -> tuple[LatentParts, Linear]:
    """Return the parts of a module with latent attention, and the matrix of its outputs.

    `rotary` computes the rotary embeddings. Raises UnknownStructureError for a module that cannot be computed.
    """
    needed, optional = "compress latent_norm expand output", "query narrow_query narrow_norm wide_query"
    parts = children(module, "latent attention", needed, optional)
    names = sorted(parts.keys() & set(optional.split()))
    narrow = None
    if names == ["narrow_norm", "narrow_query", "wide_query"]:
        norm = parts["narrow_norm"]
        narrow = NarrowQuery(norm_of(norm), norm_rule(norm), parts["wide_query"])
    elif names != ["query"]:
        raise UnknownStructureError(f"latent attention has {', '.join(names) or 'no queries'}")
    norm, rule = norm_of(parts["latent_norm"]), norm_rule(parts["latent_norm"])
    if rule.centred or norm.bias is not None:
        raise UnknownStructureError("latent vectors are not normalised with an RMS norm")
    query, weight = parts["narrow_query" if narrow else "query"], parts["expand"].weight.detach()
    made = LatentParts(query, narrow, parts["compress"], norm, rule, weight, interleaved=False)
    return made._replace(interleaved=_is_interleaved(module, made, rotary)), parts["output"]


def tables_of(embeddings: Any) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines in the result of a model's rotary embedding, which may be complex numbers."""
    if not isinstance(embeddings, Tensor):
        cos, sin = embeddings
        return cos, sin
    return embeddings.real.repeat(1, 1, 2), embeddings.imag.repeat(1, 1, 2)


class _Recorder:
    """Stand-in for a PagedContext that keeps the arguments of latent attention."""

    numbers = None

    def attend_latents(
        self, layer: int, query: Tensor, latents: Tensor, rope_keys: Tensor, weight: Tensor, scale: float
    ) -> Tensor:
        self.query, self.latents, self.rope_keys = query, latents, rope_keys
        heads, width = query.shape[1], query.shape[2] - rope_keys.shape[2]
        return query.new_zeros(len(query), heads, len(weight) // heads - width)


def _is_interleaved(module: Any, parts: LatentParts, rotary: nn.Module | None) -> bool:
    """Return True if the module rotates pairs of neighbours, see `reference.rotate_and_write_latents`."""
    # The module is run on random rows. Its order of the rotated numbers does not matter, so scores are compared.
    count, device = 5, parts.weight.device
    positions = 97 * torch.arange(count, device=device)
    rows = torch.randn(count, module.config.hidden_size, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device, parts.norm.weight.dtype)
    recorder = _Recorder()
    with torch.inference_mode():
        if rotary is None:
            raise UnknownStructureError("latent attention has no rotary embedding")
        embeddings = rotary(rows[None], positions[None])
        module(
            hidden_states=rows[None],
            position_embeddings=embeddings,
            attention_mask=None,
            position_ids=positions[None],
            paged_context=recorder,
        )
        cos, sin = (table[0] for table in tables_of(embeddings))
        expected = _scores(recorder.query, recorder.latents[:, 0], recorder.rope_keys[:, 0])
        errors = {}
        for interleaved in (False, True):
            query = parts.queries(rows).view_as(recorder.query).clone()
            caches = (rows.new_zeros(1, 1, count, width.shape[2]) for width in (recorder.latents, recorder.rope_keys))
            latents, rope_keys = caches
            reference.rotate_and_write_latents(
                query, parts.compress(rows), parts.norm.weight, cos, sin, latents, rope_keys,
                torch.arange(count, device=device), eps=parts.rule.eps, offset=parts.rule.offset,
                interleaved=interleaved,
            )  # fmt: skip
            found = _scores(query, latents[0, 0], rope_keys[0, 0])
            errors[interleaved] = max(
                float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
            )
    best = min(errors, key=lambda interleaved: errors[interleaved])
    if not errors[best] <= (TOLERANCE if rows.dtype == torch.float32 else TOLERANCE_16):
        raise UnknownStructureError(f"queries and latent vectors would differ by {errors[best]:.2g}")
    return best


def _scores(query: Tensor, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries without their rotary part, latent vectors, and scores of the rotary parts, in float32."""
    width = query.shape[2] - rope_keys.shape[1]
    plain, rope = query[..., :width].float(), query[..., width:].float()
    return plain, latents.float(), torch.einsum("qhd,kd->hqk", rope, rope_keys.float())
