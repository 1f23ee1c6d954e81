"""Recognition of mixtures of experts: which rule a router follows, and modules that are left to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmsched.engine.model.modules import UnknownStructureError
from llmsched.engine.model.structure import _read_mlp
from llmsched.kernels.experts import Gate, Routing

SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "initializer_range": 0.3, "pad_token_id": 0}
MANY = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16)
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0}
GROUPS |= {"n_shared_experts": 1, "num_key_value_heads": 4}
#: Family -> (changes to the config, rule).
RULES: dict[str, tuple[dict[str, Any], Routing]] = {
    "mixtral": ({}, Routing(3)),
    "qwen2_moe": ({"shared_expert_intermediate_size": 40}, Routing(3, normalised=False)),
    "qwen3_moe": ({"norm_topk_prob": True}, Routing(3)),
    "olmoe": ({}, Routing(3, normalised=False)),
    "gpt_oss": ({}, Routing(3)),
    "granitemoe": ({}, Routing(3)),
    "minimax_m2": ({}, Routing(3, "sigmoid")),
    "dots1": (GROUPS, Routing(3, "sigmoid", False, 2.5, 4, 2, 2)),
    "glm4_moe": ({**GROUPS, "norm_topk_prob": True}, Routing(3, "sigmoid", True, 2.5, 4, 2, 2)),
    "deepseek_v3": ({**GROUPS, "norm_topk_prob": True}, Routing(3, "sigmoid", True, 2.5, 4, 2, 2)),
    "deepseek_v2": ({**GROUPS, "topk_method": "group_limited_greedy"}, Routing(3, "softmax", False, 2.5, 4, 2, 1)),
    "deepseek_v2, greedy": ({**GROUPS, "topk_method": "greedy"}, Routing(3, "softmax", False, 2.5)),
}


def mixture(family: str, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """Return a layer's mixture of experts with random weights, and the model's config."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.partition(",")[0], **{**SIZES, **MANY, **changes})
    model: Any = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0]
    block = getattr(layer, "mlp", None) or layer.block_sparse_moe
    with torch.no_grad():
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            if "bias" in name:
                tensor.normal_(std=0.2)
    return block.to(dtype).eval(), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", RULES)
def test_the_rule_is_found(family: str, dtype: torch.dtype) -> None:
    changes, rule = RULES[family]
    block, config = mixture(family, dtype, **changes)
    mlp, experts, shared_gate = _read_mlp(block, config)
    assert experts is not None
    assert experts.routing == rule
    assert experts.gate == (Gate("silu", True, 1.702, 7.0, 1.0) if family == "gpt_oss" else Gate("silu"))
    wide = family.startswith(("deepseek", "glm4", "dots1"))
    assert experts.router_type == (torch.float32 if wide else dtype)
    assert (mlp is not None) is (wide or family == "qwen2_moe")
    assert (shared_gate is not None) is (family == "qwen2_moe")
    assert (experts.correction is not None) is (rule.score == "sigmoid")


def test_a_router_without_a_known_rule_is_refused() -> None:
    block, config = mixture("phimoe", torch.float32, num_experts_per_tok=2)  # SparseMixer
    with pytest.raises(UnknownStructureError, match="router of PhimoeSparseMoeBlock follows no known rule"):
        _read_mlp(block, config)


def test_factors_in_the_module_are_noticed() -> None:
    block, config = mixture("qwen3_moe", torch.bfloat16)
    forward = block.forward
    block.forward = lambda rows: 1.1 * forward(rows)
    with pytest.raises(UnknownStructureError, match=r"outputs of Qwen3MoeSparseMoeBlock would differ by 0\.0[89]"):
        _read_mlp(block, config)


def test_another_gate_is_refused() -> None:
    block, config = mixture("gpt_oss", torch.float32)
    block.experts._apply_gate = lambda rows: rows[..., ::2] * rows[..., 1::2]
    with pytest.raises(UnknownStructureError, match="gate of GptOssExperts is unknown"):
        _read_mlp(block, config)
