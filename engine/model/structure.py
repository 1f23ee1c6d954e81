"""Recognition of transformers models whose layers the fused decoder can compute."""
# A model is recognised by the modules that it consists of. The decoder also compares its logits with those of the
# model, because some models multiply by factors between modules.

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.engine.model.experts import ExpertParts, read_experts
from llmsched.engine.model.latent_attention import LatentParts, latent_weight, read_latent_parts
from llmsched.engine.model.modules import (
    Linear,
    Norm,
    NormRule,
    UnknownStructureError,
    activation_of,
    children,
    first_of,
    head_norm_of,
    linear,
    norm_of,
    norm_rule,
)
from llmsched.kernels import reference
from llmsched.kernels.activations import Activation


class MlpParts(NamedTuple):
    up: tuple[Linear, ...]  # compute gate and up, alone or in one; without a gate, up alone
    down: Linear
    activation: Activation
    gated: bool  # True for an MLP with a gate


@dataclass(frozen=True, slots=True)
class LayerParts:
    attention_norm: Norm | None  # None if attention reads the residual itself
    mlp_norm: Norm | None  # None if the MLP reads the residual itself or, in a parallel layer, the norm of attention
    branch_norms: tuple[Tensor | None, Tensor | None]  # weights of norms after attention and after the MLP
    latent: LatentParts | None  # in a layer with latent attention
    projections: tuple[Linear, ...]  # compute queries, keys and values, each alone or several in one
    head_norms: tuple[Tensor, ...]  # weights of norms of queries and keys, see `head_norm_of`; empty without norms
    output: Linear
    mlp: MlpParts | None  # in a layer with experts, the MLP that every token passes through, if there is one
    experts: ExpertParts | None
    shared_gate: Linear | None  # one number per token: the sigmoid of it is the factor of the MLP beside the experts
    kind: str | None  # name of the rotary embedding, if the model has several
    clip: float | None  # limits the size of queries, keys and values


class Rotation(NamedTuple):
    """Way in which a model applies rotary embeddings."""

    neighbours: bool  # see `rotate_and_write`
    tables: Callable[[Tensor], Tensor]  # converts the model's tables [1, T, N] to those of `rotate_and_write`


class LayerTraits(NamedTuple):
    """Properties that all layers of a model share."""

    by_group: bool  # see `rotate_and_write`
    norm_last: bool  # see `rotate_and_write`
    parallel: bool  # True if attention and MLP read the same residual and are added to it together
    after_norm: bool  # True if attention and MLP are added to the norm that they read


class Factors(NamedTuple):
    """Constants by which a model multiplies results between its modules (Granite, MiniCPM3)."""

    embedding: float
    residual: float  # of what attention and MLP add to the residual
    logits: float  # logits are divided by it


@dataclass(frozen=True, slots=True)
class DecoderParts:
    embed: nn.Module
    rotary: nn.Module | None
    layers: list[LayerParts]
    norm: Norm
    head: Linear
    rule: NormRule
    rotation: Rotation
    traits: LayerTraits
    factors: Factors
    softcap: float | None  # limits the logits


def read_structure(model: PreTrainedModel) -> DecoderParts:
    """Find the parts of a model in evaluation mode. Raises UnknownStructureError if a part is missing or unknown."""
    top = children(model, "the model", "decoder head")
    inner = children(top["decoder"], "the decoder", "embed layers norm", "embed_norm rotary")
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) if hasattr(inner.get("rotary"), "layer_types") else None
    layers, traits, rules = [], set(), {norm_rule(inner["norm"])}
    embed = inner["embed"]
    if "embed_norm" in inner:
        embed = nn.Sequential(embed, inner["embed_norm"])
    for index, layer in enumerate(inner["layers"].children()):
        parts, found = _read_layer(layer, config, rules, None if kinds is None else kinds[index], inner.get("rotary"))
        layers.append(parts)
        traits.add(found)
    if len(rules) > 1:
        raise UnknownStructureError("norms differ in eps or offset")
    rule = rules.pop()
    if rule.centred and any(norm is not None for part in layers for norm in part.branch_norms):
        raise UnknownStructureError("a LayerNorm follows attention or MLP")
    if len(traits) != 1:
        raise UnknownStructureError("layers differ in activation function or arrangement")
    routers = {layer.experts.router.data_ptr() for layer in layers if layer.experts is not None}
    types = {parameter.dtype for parameter in model.parameters() if parameter.data_ptr() not in routers}
    if len(types) > 1:
        raise UnknownStructureError(f"parameters have several types: {', '.join(sorted(map(str, types)))}")
    return DecoderParts(
        embed=embed,
        rotary=inner.get("rotary"),
        layers=layers,
        norm=norm_of(inner["norm"]),
        head=linear(top["head"]),
        rule=rule,
        rotation=_rotation_of(next(inner["layers"].children()), inner.get("rotary"), kinds),
        traits=traits.pop(),
        factors=Factors(
            float(getattr(config, "embedding_multiplier", None) or 1),
            float(getattr(config, "residual_multiplier", None) or getattr(layer, "residual_scale", None) or 1),
            float(getattr(config, "logits_scaling", None) or 1 / (getattr(model, "logit_scale", None) or 1)),
        ),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _read_layer(
    layer: Any, config: Any, rules: set[NormRule], kind: str | None, rotary: nn.Module | None
) -> tuple[LayerParts, LayerTraits]:
    """Return the parts and traits of a layer, and add the layer's norm rules to `rules`."""
    norms = "attention_norm post_attention_norm post_self_attention_norm mlp_norm post_mlp_norm"
    parts = children(layer, "a layer", "attention mlp", norms)
    roles = "qkv grouped_qkv query key value query_norm key_norm late_query_norm late_key_norm"
    latent = None
    if latent_weight(parts["attention"]) is None:
        attention = children(parts["attention"], "attention", "output", roles, own="sinks")
        projections = first_of(attention, "attention", "grouped_qkv", "qkv", "query key value")
    else:
        latent, output = read_latent_parts(parts["attention"], rotary)
        attention, projections = {"output": output}, []
    if getattr(parts["attention"], "is_causal", True) is not True:
        raise UnknownStructureError("attention is not causal")
    mlp, experts, shared_gate = _read_mlp(parts["mlp"], config)
    before_mlp = "post_mlp_norm" not in parts or "post_self_attention_norm" in parts  # Llama's name, and GLM-4's
    if before_mlp and "post_attention_norm" in parts:
        parts["mlp_norm"] = parts.pop("post_attention_norm")
    if "post_self_attention_norm" in parts:
        parts["post_attention_norm"] = parts.pop("post_self_attention_norm")
    rules |= {norm_rule(module) for name, module in parts.items() if name.endswith("norm")}
    after = [parts[name].weight if name in parts else None for name in ("post_attention_norm", "post_mlp_norm")]
    late = "late_query_norm" in attention
    names = ("late_query_norm", "late_key_norm") if late else ("query_norm", "key_norm")
    heads = [head_norm_of(attention[name]) for name in names if name in attention]
    rules |= {rule for _, rule in heads}
    traits = LayerTraits(
        by_group=projections == ["grouped_qkv"],
        norm_last=late,
        parallel=not parts.keys() & {"mlp_norm", "post_mlp_norm"}
        or any(getattr(config, name, False) for name in ("use_parallel_residual", "parallel_attn")),
        after_norm=getattr(config, "apply_residual_connection_post_layernorm", False),
    )
    made = LayerParts(
        attention_norm=norm_of(parts["attention_norm"]) if "attention_norm" in parts else None,
        mlp_norm=norm_of(parts["mlp_norm"]) if "mlp_norm" in parts else None,
        branch_norms=(after[0], after[1]),
        latent=latent,
        projections=tuple(linear(attention[name]) for name in projections),
        head_norms=tuple(weights for weights, _ in heads),
        output=linear(attention["output"]),
        mlp=mlp,
        experts=experts,
        shared_gate=shared_gate,
        kind=kind,
        clip=getattr(parts["attention"], "clip_qkv", None) or getattr(config, "clip_qkv", None),
    )
    return made, traits


def _read_mlp(module: nn.Module, config: Any) -> tuple[MlpParts | None, ExpertParts | None, Linear | None]:
    """Return the MLP that every token passes through, the experts, and the gate of the MLP beside experts."""
    if not hasattr(module, "experts"):
        mlp = children(module, "the MLP", "down activation", "gate_up gate up")
        up = first_of(mlp, "the MLP", "gate_up", "gate up", "up")
        matrices, activation = tuple(linear(mlp[name]) for name in up), activation_of(mlp["activation"])
        return MlpParts(matrices, linear(mlp["down"]), activation, up != ["up"]), None, None
    parts = children(module, "the mixture of experts", "router experts", "shared shared_gate")
    experts = read_experts(module, parts, config)
    shared = _read_mlp(parts["shared"], config)[0] if "shared" in parts else None
    return shared, experts, linear(parts["shared_gate"]) if "shared_gate" in parts else None


def _as_given(table: Tensor) -> Tensor:
    return table


def _repeated(table: Tensor) -> Tensor:
    return table.repeat(1, 1, 2)


def _spread(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


_LLAMA, _GPT_OSS = Rotation(False, _as_given), Rotation(False, _repeated)
_COHERE, _GLM = Rotation(True, _as_given), Rotation(True, _spread)


def _rotation_of(layer: nn.Module, rotary: nn.Module | None, kinds: Sequence[str] | None) -> Rotation:
    """Return the way in which the layers apply rotary embeddings, found by a trial.

    Raises UnknownStructureError for an unknown way, or if queries are scaled by their positions, as in Ministral 3.
    """
    # In 16-bit types, the comparison of logits would not notice, and it has no positions at which scales change.
    attention = next(child for name, child in layer.named_children() if "attention" in name or "attn" in name)
    module: Any = sys.modules[type(attention).__module__]
    if hasattr(module, "get_llama_4_attn_scale"):
        raise UnknownStructureError("queries are scaled by their positions")
    apply = getattr(module, "apply_rotary_pos_emb", None)
    if rotary is None or apply is None:
        return _LLAMA
    device = next(layer.parameters()).device
    row, positions = torch.zeros(1, 5, 1, device=device), torch.arange(5, device=device)[None]
    cos, sin = rotary(row, positions, **({} if kinds is None else {"layer_type": kinds[0]}))
    for rotation in (_LLAMA, _GPT_OSS, _COHERE, _GLM):
        tables = [rotation.tables(table.float()) for table in (cos, sin)]
        vectors = torch.linspace(-1, 2, 5 * tables[0].shape[2], device=device).view(1, 1, 5, -1)
        expected = reference.rotate(vectors[0, 0, :, None], tables[0][0], tables[1][0], rotation.neighbours)[:, 0]
        try:
            found = apply(vectors, vectors, cos.float(), sin.float())[0]
        except (RuntimeError, TypeError):
            continue  # the tables have another width
        if found.shape == vectors.shape and torch.allclose(found[0, 0], expected, atol=1e-5):
            return rotation
    raise UnknownStructureError("rotary embeddings are applied in an unknown way")
