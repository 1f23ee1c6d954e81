"""Loss of quantisation: how far the logits of rounded weights are from those of the checkpoint's own weights."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from llmsched.engine.model.packed_experts import PackedExperts
from llmsched.engine.model.packed_modules import PackedModule
from llmsched.engine.parity.cases import TEXTS
from llmsched.engine.parity.logit_comparison import Reference, kl_divergence
from llmsched.engine.text.tokenizer import Tokenizer

#: Greedy tokens with which the unquantised model continues each text.
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class QuantizationLoss:
    """Comparison of two models' distributions of the next token."""

    mean_kl: float  # mean of KL(unquantised || quantised) over all positions, in nats
    same_token: float  # share of positions at which both models have the same most probable token
    num_positions: int


def measure_loss(quantised: PreTrainedModel, unquantised: PreTrainedModel, tokenizer: Tokenizer) -> QuantizationLoss:
    """Measure the loss on fixed texts and their greedy continuations.

    Afterwards, `unquantised` has the dequantised weights of `quantised`.
    """
    reference = Reference(unquantised)
    sequences = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        sequences.append([*ids, *reference.continuation(ids, NUM_TOKENS).token_ids])
    expected = [reference.logits(ids, 1) for ids in sequences]
    dequantise(quantised, unquantised)
    return compare_logits(expected, [reference.logits(ids, 1) for ids in sequences])


def dequantise(quantised: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the numbers of all packed matrices of `quantised` to the weights of `target`."""
    weights = dict(target.named_parameters(remove_duplicate=False))
    for name, module in quantised.named_modules():
        if isinstance(module, PackedExperts):
            for matrix, part in ((module.up.matrix, "gate_up_proj"), (module.down.matrix, "down_proj")):
                weight = weights[f"{name}.{part}"]
                weight.data.copy_(matrix.unpacked().view_as(weight))
        elif isinstance(module, PackedModule) and f"{name}.weight" in weights:
            weights[f"{name}.weight"].data.copy_(module.matrix.unpacked())


def compare_logits(expected: ListLike[torch.Tensor], found: ListLike[torch.Tensor]) -> QuantizationLoss:
    """Compare logits [positions, V] of some sequences."""
    pairs = list(zip(expected, found, strict=True))
    divergence = torch.cat([kl_divergence(*pair) for pair in pairs])
    equal = torch.cat([one.argmax(1) == other.argmax(1) for one, other in pairs])
    return QuantizationLoss(float(divergence.mean()), float(equal.double().mean()), len(divergence))
