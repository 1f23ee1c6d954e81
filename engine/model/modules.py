"""Recognition of single modules of transformers models: what they compute, and which role their children have."""
# If the class or name of a module does not say what the module computes, the module is run on test values: norms differ
# in an offset of their weights, and activation functions have many names.

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    "mlp": "mlp ffn block_sparse_moe",
    "attention_norm": "input_layernorm norm_1 ln_attn",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm norm_2 ln_mlp",
    "post_self_attention_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm post_mlp_layernorm",
    "qkv": "qkv_proj Wqkv",
    "grouped_qkv": "query_key_value",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "narrow_query": "q_a_proj",
    "narrow_norm": "q_a_layernorm",
    "wide_query": "q_b_proj",
    "compress": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "expand": "kv_b_proj",
    "query_norm": "q_norm q_layernorm",
    "key_norm": "k_norm k_layernorm",
    "late_query_norm": "query_layernorm",
    "late_key_norm": "key_layernorm",
    "output": "o_proj dense out_proj",
    "gate_up": "gate_up_proj",
    "gate": "gate_proj",
    "up": "up_proj dense_h_to_4h fc1 c_fc",
    "down": "down_proj dense_4h_to_h fc2 c_proj",
    "activation": "act_fn activation_fn act gelu_impl",
    "router": "router gate",
    "experts": "experts",
    "shared": "shared_expert shared_experts shared_mlp",
    "shared_gate": "shared_expert_gate",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}


class UnknownStructureError(Exception):
    """Error for a model that the fused decoder cannot compute. The message says why."""


#: Plain matrices with an optional bias.
Linear = nn.Linear | PackedLinear


class NormRule(NamedTuple):
    """Arguments of `reference.add_norm(...)` that are the same for all norms of a model."""

    eps: float
    offset: float
    centred: bool


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def children(module: nn.Module, what: str, needed: str, optional: str = "", own: str = "") -> dict[str, Any]:
    """Return the children of a module by role, such as "query" or "mlp_norm".

    Raises UnknownStructureError if a role in `needed` has no child, if a child has no role in `needed` or `optional`,
    or if the module has parameters of its own other than `own`. Dropout and Identity need no role.
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
    if others := [name for name, _ in module.named_parameters(recurse=False) if name != own]:
        raise UnknownStructureError(f"{what} ({type(module).__name__}) has parameters of its own: {', '.join(others)}")
    return found


def first_of(found: Mapping[str, Any], what: str, *choices: str) -> list[str]:
    """Return the first choice whose names are all in `found`. A choice is a string of names separated by spaces."""
    for choice in map(str.split, choices):
        if all(name in found for name in choice):
            return choice
    raise UnknownStructureError(f"{what} has none of these modules: {'; '.join(choices)}")


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


def norm_of(module: Any) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))


def norm_rule(module: Any) -> NormRule:
    """Return the rule of an RMS norm or LayerNorm. Raises UnknownStructureError for any other module."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if names not in (["weight"], ["weight", "bias"]) or eps is None:
        raise UnknownStructureError(f"{type(module).__name__} is no RMS norm or LayerNorm")
    weight, bias = norm_of(module)
    rows = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device).view(1, *weight.shape)
    with torch.inference_mode():
        found = module(rows).float()
        for offset, centred in product((0.0, 1.0), (False, True)):
            rule = NormRule(eps, offset, centred)
            expected = reference.norm(rows, weight, bias, **rule._asdict()).float()
            if torch.allclose(found, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6):
                return rule
    raise UnknownStructureError(f"{type(module).__name__} is no RMS norm or LayerNorm")


def head_norm_of(module: Any) -> tuple[Tensor, NormRule]:
    """Return the weights and the rule of a norm of queries or keys.

    The weights are [D] if all heads share them, [heads, D] if each head has its own, or [heads x D] if the norm is over
    all heads together. Raises UnknownStructureError for any other module.
    """
    of_heads = getattr(module, "norms", None)  # StableLM has one module for each head
    norms = [module] if of_heads is None else list(of_heads)
    rule, *others = {norm_rule(norm) for norm in norms}
    weights: Tensor = module.weight if of_heads is None else torch.stack([norm.weight for norm in norms])
    if others or any(norm_of(norm).bias is not None for norm in norms) or (rule.centred and weights.ndim == 1):
        raise UnknownStructureError(f"{type(module).__name__} normalises heads in an unknown way")
    return weights.detach(), rule


def activation_of(module: Any) -> Activation:
    """Return the name of an activation function. Raises UnknownStructureError for an unknown function."""
    x = torch.linspace(-6, 6, 97)
    for name, function in reference.ACTIVATIONS.items():
        if torch.allclose(module(x), function(x), rtol=0, atol=1e-6):
            return name
    raise UnknownStructureError(f"activation {type(module).__name__} is unknown")
