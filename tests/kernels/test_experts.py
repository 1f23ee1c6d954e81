"""Ops of mixtures of experts: the reference against transformers' modules, the CPU's against the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import normal
from mixtures import MIXTURES, OSS, dense_weights, inputs, mixture_difference, routing_difference
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops
from llmsched.kernels.experts import Routing

HIDDEN = 48
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": 40, "num_local_experts": 40, "num_experts_per_tok": 5}
GROUPS: dict[str, Any] = {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "norm_topk_prob": False}
#: Name -> (router, its settings, rule).
ROUTERS: dict[str, tuple[Any, dict[str, Any], Routing]] = {
    "Qwen3-MoE": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, Routing(5)),
    "OLMoE": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, Routing(5, normalised=False)),
    "gpt-oss": (GptOssTopKRouter, {}, Routing(5)),
    "DeepSeek-V2": (
        DeepseekV2TopkRouter,
        {**GROUPS, "topk_method": "group_limited_greedy"},
        Routing(5, "softmax", False, 16.0, 8, 3, 1),
    ),
    "DeepSeek-V3": (
        DeepseekV3TopkRouter,
        {**GROUPS, "norm_topk_prob": True},
        Routing(5, "sigmoid", True, 16.0, 8, 3, 2),
    ),
}


def router(name: str) -> nn.Module:
    kind, changes, _ = ROUTERS[name]
    made: nn.Module = kind(SimpleNamespace(**SIZES, **changes))
    for seed, tensor in enumerate((*made.parameters(), *made.buffers())):
        tensor.data = 0.3 * normal(*tensor.shape, seed=seed)
    return made


@pytest.mark.parametrize("name", ROUTERS)
def test_reference_chooses_as_transformers_does(name: str) -> None:
    made, rows = router(name), normal(200, HIDDEN, seed=9)
    with torch.no_grad():
        logits, weights, experts = made(rows)
    found = dense_weights(
        *reference.route(logits, ROUTERS[name][2], getattr(made, "e_score_correction_bias", None)), 40
    )
    torch.testing.assert_close(found, dense_weights(experts.int(), weights, 40))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_equal_scores_are_resolved_as_transformers_does(name: str, kind: torch.dtype) -> None:
    """Many experts have the same weights in the router, so most choices are between equal scores."""
    made, rows = router(name).to(kind), normal(60, HIDDEN, seed=9, dtype=kind)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(tensor[:2].repeat(20, *[1] * (tensor.ndim - 1)))
        logits, _, experts = made(rows)
    correction = getattr(made, "e_score_correction_bias", None)
    for module in (reference, ops):
        found, _ = module.route(logits, ROUTERS[name][2], correction)
        assert torch.equal(found.sort(dim=1).values, experts.int().sort(dim=1).values)


@pytest.mark.parametrize("biased", [False, True])
def test_reference_experts_are_those_of_transformers(biased: bool) -> None:
    sizes = {"num_local_experts": 6, "hidden_size": 48, "intermediate_size": 40, "hidden_act": "silu"}
    config = SimpleNamespace(**sizes, swiglu_alpha=1.702, swiglu_limit=1.5, _experts_implementation="eager")
    experts: Any = (GptOssExperts if biased else MixtralExperts)(config)
    experts.limit = 1.5
    case = MIXTURES["gpt-oss" if biased else "random"]
    (rows, chosen, weights, up, down), options = inputs(case, torch.float32)
    names = {"gate_up_proj": up, "down_proj": down}
    if biased:
        assert case.gate == OSS
        names = {name: weight.transpose(1, 2).contiguous() for name, weight in names.items()}
        names |= {"gate_up_proj_bias": options["up_bias"], "down_proj_bias": options["down_bias"]}
    assert names.keys() == dict(experts.named_parameters()).keys()
    for name, weight in names.items():
        setattr(experts, name, nn.Parameter(weight))
    with torch.no_grad():
        expected = experts(rows, chosen.long(), weights)
    torch.testing.assert_close(reference.run_experts(rows, chosen, weights, up, down, **options), expected)
    assert float((rows @ up[0].T).abs().max()) > 2, "the limit has an effect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", MIXTURES)
def test_experts_on_the_cpu(case: str, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert mixture_difference(ops, reference, case, dtype) <= limit


def test_a_wrong_expert_would_be_seen() -> None:
    def swapped(rows: Any, experts: Any, *others: Any, **options: Any) -> torch.Tensor:
        return ops.run_experts(rows, experts.flip(1).contiguous(), *others, **options)

    def shifted(logits: Any, routing: Routing, correction: Any) -> Any:
        return reference.route(logits, routing._replace(group_best=1), correction)

    wrong = SimpleNamespace(run_experts=swapped, route=shifted)
    assert mixture_difference(wrong, reference, "random", torch.float32) > 0.1
    assert routing_difference(wrong, reference, "groups by two best", 50, torch.float32) > 0.1


def test_no_token_needs_no_expert() -> None:
    (rows, experts, weights, up, down), options = inputs(MIXTURES["random"], torch.float32)
    found = ops.run_experts(rows[:0], experts[:0], weights[:0], up, down, **options)
    assert found.shape == (0, 48)
