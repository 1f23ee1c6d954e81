"""Recognition of transformers models whose layers the fused decoder can compute.

A model is recognised by the modules that it consists of. If the class or name of a module does not say what the module
computes, the module is run on test values: RMS norms differ in an offset of their weights, and activation functions
have many names. The decoder also compares its logits with those of the model, because some models multiply by factors
between modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmsched.kernels import reference
from llmsched.kernels.reference import Activation

#: Modules that change nothing in evaluation mode.
_IDLE = (nn.Dropout, nn.Identity)
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
#: Names of a layer's norms: before attention, after attention, before the MLP, after the MLP. Those after are optional.
_PLAIN_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_SANDWICH_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class UnknownStructureError(Exception):
    """Error for a model that the fused decoder does not know. The message says what is unknown."""


class NormRule(NamedTuple):
    """Constants of all RMS norms of a model; see `reference.add_norm`."""

    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules and norm weights of one layer.

    `projections` compute queries, keys and values; `gate_up` compute gate and up. In both tuples, one module may have
    the rows of all. `query_norm` and `key_norm` [D] are None if heads are not normalised. `branch_norms` are the
    weights of the norms after attention and after the MLP, each None if there is no such norm. `rotates` is False if
    the layer has no rotary embedding. `kind` names the layer's rotary embedding if the model has several.
    """

    attention_norm: Tensor
    mlp_norm: Tensor
    branch_norms: tuple[Tensor | None, Tensor | None]
    projections: tuple[nn.Linear, ...]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    rotates: bool
    kind: str | None


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Modules of a model; `softcap` limits its logits."""

    embed: nn.Module
    rotary: nn.Module
    layers: list[LayerParts]
    norm: Tensor
    head: nn.Linear
    rule: NormRule
    activation: Activation
    softcap: float | None


def read_structure(model: PreTrainedModel) -> DecoderParts:
    """Return the parts of a model in evaluation mode. Raises UnknownStructureError, which says what is unknown."""
    top = children(model, "the model", {"model", "lm_head"})
    inner = children(top["model"], "the decoder", {"embed_tokens", "layers", "norm", "rotary_emb"})
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) if hasattr(inner["rotary_emb"], "layer_types") else None
    norms: list[NormRule] = [norm_rule(inner["norm"])]
    activations: set[Activation] = set()
    layers = []
    for index, layer in enumerate(inner["layers"].children()):
        layers.append(_read_layer(layer, norms, activations, None if kinds is None else kinds[index]))
    if len(set(norms)) > 1:
        raise UnknownStructureError("RMS norms differ in eps or offset")
    if len(activations) != 1:
        raise UnknownStructureError("layers have different activation functions")
    types = {parameter.dtype for parameter in model.parameters()}
    if len(types) > 1:
        raise UnknownStructureError(f"parameters have several types: {', '.join(sorted(map(str, types)))}")
    return DecoderParts(
        embed=inner["embed_tokens"],
        rotary=inner["rotary_emb"],
        layers=layers,
        norm=inner["norm"].weight,
        head=linear(top["lm_head"]),
        rule=norms[0],
        activation=activations.pop(),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _read_layer(layer: Any, norms: list[NormRule], activations: set[Activation], kind: str | None) -> LayerParts:
    """Return a layer's parts. Add the rules of its norms to `norms`, and its activation function to `activations`."""
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    names = _SANDWICH_NORMS if sandwich else _PLAIN_NORMS
    parts = children(layer, "a layer", {"self_attn", "mlp", *(name for name in names if name)})
    whole = "qkv_proj" in parts["self_attn"]._modules
    projections = ("qkv_proj",) if whole else ("q_proj", "k_proj", "v_proj")
    head_norms = ("q_norm", "k_norm") if "q_norm" in parts["self_attn"]._modules else ()
    attention = children(parts["self_attn"], "attention", {*projections, *head_norms, "o_proj"})
    if getattr(parts["self_attn"], "is_causal", True) is not True:
        raise UnknownStructureError("attention is not causal")
    gate_up = ("gate_up_proj",) if "gate_up_proj" in parts["mlp"]._modules else ("gate_proj", "up_proj")
    mlp = dict(parts["mlp"].named_children())
    act = next((name for name in ("act_fn", "activation_fn") if name in mlp), "act_fn")
    mlp = children(parts["mlp"], "the MLP", {*gate_up, "down_proj", act})
    activations.add(activation_of(mlp[act]))
    norms += [norm_rule(parts[name]) for name in names if name]
    norms += [norm_rule(attention[name]) for name in head_norms]
    weights: list[Any] = [None if name is None else parts[name].weight for name in names]
    query_norm, key_norm = (attention[name].weight for name in head_norms) if head_norms else (None, None)
    return LayerParts(
        attention_norm=weights[0],
        mlp_norm=weights[2],
        branch_norms=(weights[1], weights[3]),
        projections=tuple(linear(attention[name]) for name in projections),
        query_norm=query_norm,
        key_norm=key_norm,
        output=linear(attention["o_proj"]),
        gate_up=tuple(linear(mlp[name]) for name in gate_up),
        down=linear(mlp["down_proj"]),
        rotates=bool(getattr(parts["self_attn"], "use_rope", True)),
        kind=kind,
    )


def children(module: nn.Module, what: str, expected: set[str]) -> dict[str, Any]:
    """Return the module's children by name. Raises UnknownStructureError if the names differ from `expected`."""
    found = {name: child for name, child in module.named_children() if not isinstance(child, _IDLE)}
    if unlike := sorted(found.keys() ^ expected):
        raise UnknownStructureError(f"{what} ({type(module).__name__}) has or lacks {', '.join(unlike)}")
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise UnknownStructureError(f"{what} ({type(module).__name__}) has parameters of its own: {', '.join(own)}")
    return found


def linear(module: Any) -> nn.Linear:
    """Return the module if it is a plain nn.Linear; raise UnknownStructureError otherwise."""
    if type(module) is not nn.Linear:
        raise UnknownStructureError(f"a projection is a {type(module).__name__}, not a plain matrix")
    return module


def norm_rule(module: Any) -> NormRule:
    """Return the rule of an RMS norm. Raises UnknownStructureError if the module computes anything else."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [name for name, _ in module.named_parameters()] != ["weight"] or module.weight.ndim != 1 or eps is None:
        raise UnknownStructureError(f"{type(module).__name__} is no RMS norm")
    weight = module.weight
    rows = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    with torch.inference_mode():
        found = module(rows).float()
        for offset in (0.0, 1.0):
            expected = reference.rms_norm(rows, weight, eps, offset).float()
            if torch.allclose(found, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6):
                return NormRule(eps, offset)
    raise UnknownStructureError(f"{type(module).__name__} is no RMS norm")


def activation_of(module: Any) -> Activation:
    """Return the name of an activation function. Raises UnknownStructureError if it is unknown."""
    x = torch.linspace(-6, 6, 97)
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(module(x), function(x), rtol=0, atol=1e-6):
            return name
    raise UnknownStructureError(f"activation {type(module).__name__} is unknown")
