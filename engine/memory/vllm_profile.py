"""Memory that vLLM sets aside when it starts, besides weights and KV, for plans of `kv-budget --emit vllm`.

vLLM computes a step of max_num_batched_tokens tokens, samples max_num_seqs full rows of logits, and reserves the peak:

    max(MLP as in activations.py, sampler_copies x sequences x vocab x 4 bytes) + what libraries hold outside torch

The CUDA context is not in this sum: vLLM measures only what is added after the context exists. Up to version 0.15 the
sampler sorts all rows in fp32; from 0.16 on it does not. Both constants of a version are fitted to the few logs that
tests/memory/test_published_logs.py names, and are checked against all others in tests/data/memory_logs.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.device import DeviceMemory
from llmsched.engine.memory.activations import mlp_bytes

#: Smallest GPU, in bytes, on which vLLM has the larger defaults. The A100 has the smaller ones.
_LARGE = 70 << 30


@dataclass(frozen=True, slots=True)
class VllmProfile:
    """Start-up profile of the vLLM versions that `versions` names; `library_bytes` are held outside torch."""

    versions: str
    sampler_copies: float
    library_bytes: int

    def activation_bytes(self, shape: ModelShape, num_tokens: int, num_seqs: int, dtype_bytes: int) -> int:
        """Return the peak bytes of the profile's step of `num_tokens` tokens and its `num_seqs` rows of logits."""
        rows = min(num_seqs, num_tokens)
        return max(mlp_bytes(shape, num_tokens, dtype_bytes), int(self.sampler_copies * rows * shape.vocab_size * 4))


#: Profiles by the name that --emit takes. The first one is the larger, so its plan holds for every version.
VLLM_PROFILES: Mapping[str, VllmProfile] = {
    "vllm": VllmProfile("up to 0.15", 9.6, 105 << 20),
    "vllm-0.16": VllmProfile("0.16 and later", 3.5, 190 << 20),
}


def vllm_defaults(device: DeviceMemory) -> dict[str, int]:
    """Return max_num_seqs and max_num_batched_tokens of `vllm serve` on a GPU of this size, if they are not given."""
    large = device.total >= _LARGE and "a100" not in device.name.lower()
    return {"max_num_seqs": 1024 if large else 256, "max_num_batched_tokens": 8192 if large else 2048}
