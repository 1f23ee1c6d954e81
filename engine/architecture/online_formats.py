"""Quantised formats to which `--quantization` rounds the matrices of an unquantised checkpoint while it is loaded.

Matrices in the layers get the chosen format. Embeddings and lm_head get int8 in every format, because their errors
reach all logits: with SmolLM2-135M, the mean KL divergence per token is 0.020 if only these matrices are rounded to
fp8, and below 0.001 with int8 (measured). In 16 bits, lm_head would be 46 % of the bytes that a decode in int4 reads.
Experts are rounded if the model holds the matrices of all experts of a layer in one tensor, and if the checkpoint has
them alone or in the same order. Routers, norms, biases, position embeddings and matrices that
expand latent vectors are not rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmsched.engine.architecture.quantised_layouts import expert_matrix
from llmsched.engine.architecture.quantised_matrix import EXPANDING, TIME_STEPS
from llmsched.engine.architecture.quantization import JOINED_EXPERTS, format_name, settings_of
from llmsched.engine.errors import ConfigError


class OnlineFormat(NamedTuple):
    """Format of a matrix. A scale belongs to `group` neighbouring numbers of a row, or to a whole row (0)."""

    name: str
    bits: int
    group: int
    scale_bytes: int  # of a scale and, if there is one, an offset

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix [M, N], or of several [E, M, N], in this format."""
        *counts, size = shape
        rows = math.prod(counts)
        return rows * (size * self.bits // 8 + size // (self.group or size) * self.scale_bytes)


#: Formats by the name that `--quantization` takes. Scales of rows are float32, scales and offsets of groups bfloat16,
#: whose range no weight leaves.
ONLINE_FORMATS: Mapping[str, OnlineFormat] = {
    "fp8": OnlineFormat("fp8", 8, 0, 4),
    "int8": OnlineFormat("int8", 8, 32, 2),
    "int4": OnlineFormat("int4", 4, 32, 4),
}
#: Rows of matrices with 4-bit codes consist of blocks of this size.
_BLOCK = 32
_KEPT = re.compile(
    rf"bias|norm|router|conv|\bgate\.|wpe|position|vis(ual|ion)|audio|projector|\b({EXPANDING}|{TIME_STEPS})\b"
)
_EXPERTS = re.compile(r"\.experts\b")
_JOINED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj")
_VOCABULARY = re.compile(r"lm_head|embed|\bwte\b")
#: Model types whose layers do not consist of torch's linear layers.
_OTHER_LAYERS = {"gpt2": "its layers are Conv1D modules"}


def format_of(name: str, shape: Sequence[int], quantization: str, model_type: str | None = None) -> OnlineFormat | None:
    """Return the format to which the tensor `name` of a checkpoint is rounded, or None if it is not rounded."""
    if _EXPERTS.search(name):
        return ONLINE_FORMATS[quantization] if _rounds_experts(name, shape, model_type) else None
    if len(shape) != 2 or shape[1] % _BLOCK or not name.endswith("weight") or _KEPT.search(name):
        return None
    return ONLINE_FORMATS["int8" if _VOCABULARY.search(name) else quantization]


def _rounds_experts(name: str, shape: Sequence[int], model_type: str | None) -> bool:
    """Return True if a tensor of experts is rounded. The answer is the same for all tensors of a layer's experts."""
    if expert_matrix(name, model_type) is not None:
        return len(shape) == 2 and not any(size % _BLOCK for size in shape)
    if len(shape) != 3 or model_type not in JOINED_EXPERTS or (match := _JOINED.search(name)) is None:
        return False
    rows = shape[1] // (2 if match[1] == "gate_up" else 1)
    return not rows % _BLOCK and not shape[2] % _BLOCK


def rounding_refusal(content: Mapping[str, Any], *, gguf: bool = False) -> str | None:
    """Return why a model with this config.json cannot be rounded, or None. `gguf`: its weights are a .gguf file."""
    if gguf:
        return "a .gguf file keeps its own format"
    if settings := settings_of(content):
        return f"the checkpoint is already quantised ({format_name(settings)})"
    return _OTHER_LAYERS.get(str(content.get("model_type")))


def check_quantisable(content: Mapping[str, Any], quantization: str, *, gguf: bool = False) -> None:
    """Raise ConfigError if `rounding_refusal` has a reason."""
    if reason := rounding_refusal(content, gguf=gguf):
        raise ConfigError("quantization", f"{quantization} cannot be applied: {reason}; leave it out")
