"""Recognition of transformers models whose layers the fused decoder can compute."""
# A model is recognised by the modules that it consists of. If the class or name of a module does not say what the
# module computes, the module is run on test values: norms differ in an offset of their weights, and activation
# functions have many names. The decoder also compares its logits with those of the model, because some models multiply
# by factors between modules.

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.engine.model.packed_modules import PackedLinear
from llmsched.kernels import reference
from llmsched.kernels.reference import Activation

#: Modules that change nothing in evaluation mode.
_IDLE = (nn.Dropout, nn.Identity)
#: Names that models give to a module, by what the module does.
_NAMES: Mapping[str, str] = {
    "decoder": "model transformer gpt_neox",
    "head": "lm_head",
    "embed": "embed_tokens word_embeddings wte embed_in",
    "embed_norm": "word_embeddings_layernorm",
    "layers": "layers h blocks",
    "norm": "norm ln_f norm_f final_layer_norm final_layernorm",
    "rotary": "rotary_emb",
    "attention": "self_attn self_attention attn attention",
    "mlp": "mlp ffn",
    "attention_norm": "input_layernorm norm_1 ln_attn",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm norm_2 ln_mlp",
    "post_mlp_norm": "post_feedforward_layernorm",
    "qkv": "qkv_proj Wqkv",
    "grouped_qkv": "query_key_value",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "output": "o_proj dense out_proj",
    "gate_up": "gate_up_proj",
    "gate": "gate_proj",
    "up": "up_proj dense_h_to_4h fc1 c_fc",
    "down": "down_proj dense_4h_to_h fc2 c_proj",
    "activation": "act_fn activation_fn act gelu_impl",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}


#: Plain matrices with an optional bias.
Linear = nn.Linear | PackedLinear


class UnknownStructureError(Exception):
    """Error for a model that the fused decoder cannot compute. The message says why."""


class NormRule(NamedTuple):
    """Arguments of `reference.add_norm(...)` that are the same for all norms of a model."""

    eps: float
    offset: float
    centred: bool


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    attention_norm: Norm
    mlp_norm: Norm | None  # None if attention and MLP read the same norm
    branch_norms: tuple[Tensor | None, Tensor | None]  # weights of norms after attention and after the MLP
    projections: tuple[Linear, ...]  # compute queries, keys and values, each alone or several in one
    query_norm: Tensor | None  # [D], None if heads are not normalised
    key_norm: Tensor | None  # [D], None if heads are not normalised
    output: Linear
    up: tuple[Linear, ...]  # compute gate and up, alone or in one; without a gate, up alone
    down: Linear
    rotates: bool  # False without rotary embedding
    kind: str | None  # name of the rotary embedding, if the model has several
    clip: float | None  # limits the size of queries, keys and values


class LayerTraits(NamedTuple):
    """Properties that all layers of a model share."""

    activation: Activation
    by_group: bool  # see `rotate_and_write`
    gated: bool  # True for an MLP with a gate
    parallel: bool  # True if attention and MLP read the same residual and are added to it together
    after_norm: bool  # True if attention and MLP are added to the norm that they read


@dataclass(frozen=True, slots=True)
class DecoderParts:
    embed: nn.Module
    rotary: nn.Module | None
    layers: list[LayerParts]
    norm: Norm
    head: Linear
    rule: NormRule
    traits: LayerTraits
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
    types = {parameter.dtype for parameter in model.parameters()}
    if len(types) > 1:
        raise UnknownStructureError(f"parameters have several types: {', '.join(sorted(map(str, types)))}")
    return DecoderParts(
        embed=embed,
        rotary=inner.get("rotary"),
        layers=layers,
        norm=_norm(inner["norm"]),
        head=linear(top["head"]),
        rule=rule,
        traits=traits.pop(),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _read_layer(layer: Any, config: Any, rules: set[NormRule], kind: str | None) -> tuple[LayerParts, LayerTraits]:
    """Return the parts and traits of a layer, and add the layer's norm rules to `rules`."""
    parts = children(layer, "a layer", "attention mlp attention_norm", "mlp_norm post_attention_norm post_mlp_norm")
    attention = children(
        parts["attention"], "attention", "output", "qkv grouped_qkv query key value query_norm key_norm"
    )
    mlp = children(parts["mlp"], "the MLP", "down activation", "gate_up gate up")
    if getattr(parts["attention"], "is_causal", True) is not True:
        raise UnknownStructureError("attention is not causal")
    _check_rotation(parts["attention"])
    if "post_mlp_norm" not in parts and "post_attention_norm" in parts:  # Llama's name of the norm before the MLP
        parts["mlp_norm"] = parts.pop("post_attention_norm")
    rules |= {norm_rule(module) for name, module in (parts | attention).items() if name.endswith("norm")}
    after = [parts[name].weight if name in parts else None for name in ("post_attention_norm", "post_mlp_norm")]
    heads = [attention[name] for name in ("query_norm", "key_norm") if name in attention]
    projections = _first_of(attention, "attention", "grouped_qkv", "qkv", "query key value")
    up = _first_of(mlp, "the MLP", "gate_up", "gate up", "up")
    traits = LayerTraits(
        activation=activation_of(mlp["activation"]),
        by_group=projections == ["grouped_qkv"],
        gated=up != ["up"],
        parallel="mlp_norm" not in parts
        or any(getattr(config, name, False) for name in ("use_parallel_residual", "parallel_attn")),
        after_norm=getattr(config, "apply_residual_connection_post_layernorm", False),
    )
    made = LayerParts(
        attention_norm=_norm(parts["attention_norm"]),
        mlp_norm=_norm(parts["mlp_norm"]) if "mlp_norm" in parts else None,
        branch_norms=(after[0], after[1]),
        projections=tuple(linear(attention[name]) for name in projections),
        query_norm=heads[0].weight if heads else None,
        key_norm=heads[-1].weight if heads else None,
        output=linear(attention["output"]),
        up=tuple(linear(mlp[name]) for name in up),
        down=linear(mlp["down"]),
        rotates=bool(getattr(parts["attention"], "use_rope", True)),
        kind=kind,
        clip=getattr(parts["attention"], "clip_qkv", None),
    )
    return made, traits


def _check_rotation(attention: nn.Module) -> None:
    """Raise UnknownStructureError if rotary embeddings pair neighbouring numbers, as in GLM."""
    # In 16-bit types, the comparison of logits would not notice.
    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    numbers = torch.arange(8.0)
    if rotate is not None and not torch.equal(rotate(numbers), torch.cat((-numbers[4:], numbers[:4]))):
        raise UnknownStructureError("rotary embeddings pair neighbouring numbers")


def children(module: nn.Module, what: str, needed: str, optional: str = "") -> dict[str, Any]:
    """Return the children of a module by role, such as "query" or "mlp_norm".

    Raises UnknownStructureError if a role in `needed` has no child, if a child has no role in `needed` or `optional`,
    or if the module has parameters of its own. Dropout and Identity need no role.
    """
    found: dict[str, Any] = {}
    unlike = []
    for name, child in module.named_children():
        role = _ROLES.get(name)
        if role is not None and role in f"{needed} {optional}".split():
            found[role] = child
        elif not isinstance(child, _IDLE):
            unlike.append(name)
    if unlike := sorted([*unlike, *(set(needed.split()) - found.keys())]):
        raise UnknownStructureError(f"{what} ({type(module).__name__}) has or lacks {', '.join(unlike)}")
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise UnknownStructureError(f"{what} ({type(module).__name__}) has parameters of its own: {', '.join(own)}")
    return found


def _first_of(found: Mapping[str, Any], what: str, *choices: str) -> list[str]:
    """Return the first choice whose names are all in `found`. A choice is a string of names separated by spaces."""
    for choice in map(str.split, choices):
        if all(name in found for name in choice):
            return choice
    raise UnknownStructureError(f"{what} has none of: {', '.join(choices)}")


def linear(module: Any) -> Linear:
    """Return the module if it is a plain linear layer, packed or not. Raises UnknownStructureError otherwise."""
    if type(module) not in (nn.Linear, PackedLinear) and not (isinstance(module, nn.Linear) and _is_linear(module)):
        raise UnknownStructureError(f"a projection is a {type(module).__name__}, not a plain matrix")
    found: Linear = module
    return found


def _is_linear(module: nn.Linear) -> bool:
    weight = module.weight
    row = torch.linspace(-1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
    with torch.inference_mode():
        found, expected = module(row), F.linear(row, weight, module.bias)
    return torch.allclose(found, expected, rtol=8 * torch.finfo(weight.dtype).eps, atol=1e-2)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))


def norm_rule(module: Any) -> NormRule:
    """Return the rule of an RMS norm or LayerNorm. Raises UnknownStructureError for any other module."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if names not in (["weight"], ["weight", "bias"]) or module.weight.ndim != 1 or eps is None:
        raise UnknownStructureError(f"{type(module).__name__} is no RMS norm or LayerNorm")
    weight, bias = _norm(module)
    rows = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.inference_mode():
        found = module(rows).float()
        for offset, centred in ((0.0, False), (1.0, False), (0.0, True)):
            rule = NormRule(eps, offset, centred)
            expected = reference.norm(rows, weight, bias, **rule._asdict()).float()
            if torch.allclose(found, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6):
                return rule
    raise UnknownStructureError(f"{type(module).__name__} is no RMS norm or LayerNorm")


def activation_of(module: Any) -> Activation:
    """Return the name of an activation function. Raises UnknownStructureError for an unknown function."""
    x = torch.linspace(-6, 6, 97)
    for name, function in reference.ACTIVATIONS.items():
        if torch.allclose(module(x), function(x), rtol=0, atol=1e-6):
            return name
    raise UnknownStructureError(f"activation {type(module).__name__} is unknown")
