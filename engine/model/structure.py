"""Recognition of transformers models whose layers the fused decoder can compute."""
# A model is recognised by the modules that it consists of. The decoder also compares its logits with those of the
# model, because some models multiply by factors between modules.

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.engine.model.experts import ExpertParts, read_experts
from llmsched.engine.model.modules import (
    Linear,
    Norm,
    NormRule,
    UnknownStructureError,
    activation_of,
    children,
    first_of,
    linear,
    norm_of,
    norm_rule,
)
from llmsched.kernels.activations import Activation


class MlpParts(NamedTuple):
    up: tuple[Linear, ...]  # compute gate and up, alone or in one; without a gate, up alone
    down: Linear
    activation: Activation
    gated: bool  # True for an MLP with a gate


@dataclass(frozen=True, slots=True)
class LayerParts:
    attention_norm: Norm
    mlp_norm: Norm | None  # None if attention and MLP read the same norm
    branch_norms: tuple[Tensor | None, Tensor | None]  # weights of norms after attention and after the MLP
    projections: tuple[Linear, ...]  # compute queries, keys and values, each alone or several in one
    query_norm: Tensor | None  # [D], None if heads are not normalised
    key_norm: Tensor | None  # [D], None if heads are not normalised
    output: Linear
    mlp: MlpParts | None  # in a layer with experts, the MLP that every token passes through, if there is one
    experts: ExpertParts | None
    shared_gate: Linear | None  # one number per token: the sigmoid of it is the factor of the MLP beside the experts
    rotates: bool  # False without rotary embedding
    kind: str | None  # name of the rotary embedding, if the model has several
    clip: float | None  # limits the size of queries, keys and values


class LayerTraits(NamedTuple):
    """Properties that all layers of a model share."""

    by_group: bool  # see `rotate_and_write`
    half_tables: bool  # True if the rotary embedding gives only the first half of cosines and sines
    parallel: bool  # True if attention and MLP read the same residual and are added to it together
    after_norm: bool  # True if attention and MLP are added to the norm that they read


class Factors(NamedTuple):
    """Factors between modules (Granite)."""

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
        parts, found = _read_layer(layer, config, rules, None if kinds is None else kinds[index])
        layers.append(parts)
        traits.add(found)
    if len(rules) > 1:
        raise UnknownStructureError("norms differ in eps or offset")
    rule = rules.pop()
    if rule.centred and any(norm is not None for part in layers for norm in (part.query_norm, *part.branch_norms)):
        raise UnknownStructureError("a LayerNorm follows attention or MLP, or normalises heads")
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
        traits=traits.pop(),
        factors=Factors._make(
            float(getattr(config, name, None) or 1)
            for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        ),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _read_layer(layer: Any, config: Any, rules: set[NormRule], kind: str | None) -> tuple[LayerParts, LayerTraits]:
    """Return the parts and traits of a layer, and add the layer's norm rules to `rules`."""
    parts = children(layer, "a layer", "attention mlp attention_norm", "mlp_norm post_attention_norm post_mlp_norm")
    roles = "qkv grouped_qkv query key value query_norm key_norm"
    attention = children(parts["attention"], "attention", "output", roles, own="sinks")
    if getattr(parts["attention"], "is_causal", True) is not True:
        raise UnknownStructureError("attention is not causal")
    mlp, experts, shared_gate = _read_mlp(parts["mlp"], config)
    if "post_mlp_norm" not in parts and "post_attention_norm" in parts:  # Llama's name of the norm before the MLP
        parts["mlp_norm"] = parts.pop("post_attention_norm")
    rules |= {norm_rule(module) for name, module in (parts | attention).items() if name.endswith("norm")}
    after = [parts[name].weight if name in parts else None for name in ("post_attention_norm", "post_mlp_norm")]
    heads = [attention[name] for name in ("query_norm", "key_norm") if name in attention]
    projections = first_of(attention, "attention", "grouped_qkv", "qkv", "query key value")
    traits = LayerTraits(
        by_group=projections == ["grouped_qkv"],
        half_tables=_has_half_tables(parts["attention"]),
        parallel="mlp_norm" not in parts
        or any(getattr(config, name, False) for name in ("use_parallel_residual", "parallel_attn")),
        after_norm=getattr(config, "apply_residual_connection_post_layernorm", False),
    )
    made = LayerParts(
        attention_norm=norm_of(parts["attention_norm"]),
        mlp_norm=norm_of(parts["mlp_norm"]) if "mlp_norm" in parts else None,
        branch_norms=(after[0], after[1]),
        projections=tuple(linear(attention[name]) for name in projections),
        query_norm=heads[0].weight if heads else None,
        key_norm=heads[-1].weight if heads else None,
        output=linear(attention["output"]),
        mlp=mlp,
        experts=experts,
        shared_gate=shared_gate,
        rotates=bool(getattr(parts["attention"], "use_rope", True)),
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


def _has_half_tables(attention: nn.Module) -> bool:
    """Return True if rotary embeddings are given without repetition, as in gpt-oss.

    Raises UnknownStructureError if they pair neighbouring numbers, as in GLM, or scale queries, as in Ministral 3.
    """
    # In 16-bit types, the comparison of logits would not notice, and it has no positions at which scales change.
    module: Any = sys.modules[type(attention).__module__]
    if hasattr(module, "get_llama_4_attn_scale"):
        raise UnknownStructureError("queries are scaled by their positions")
    rotate, apply = getattr(module, "rotate_half", None), getattr(module, "_apply_rotary_emb", None)
    numbers = torch.arange(8.0)
    if rotate is not None:
        turned = rotate(numbers)
    elif apply is not None:
        turned = apply(numbers, torch.zeros(4), torch.ones(4))
    else:
        return False
    if not torch.equal(turned, torch.cat((-numbers[4:], numbers[:4]))):
        raise UnknownStructureError("rotary embeddings pair neighbouring numbers")
    return rotate is None
