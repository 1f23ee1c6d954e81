"""Memory that vLLM reserves at startup besides weights and KV, for plans of `kv-budget --emit vllm`.

vLLM runs a step of max_num_batched_tokens tokens, samples from max_num_seqs rows of logits, and reserves the peak:

    max(MLP as in activation_memory.py, sampler_copies x rows x vocabulary size x 4 bytes)
        + memory of libraries outside torch
"""
# The CUDA context is not in this sum: vLLM measures only what is added after the context exists. Logs of versions up to
# 0.15 show 9.6 fp32 copies of the rows, logs of 0.17 about 3.9. There is no log of 0.16, so plans for 0.16 count 9.6
# copies. The 3.9 copies are known only for up to 512 rows, the most in any log of 0.17.
# tests/memory/test_published_logs.py names the few logs to which these constants were fitted, and checks the sum
# against all others.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.device import DeviceMemory
from llmsched.engine.memory.activation_memory import mlp_bytes

#: What vLLM's libraries hold outside torch, in bytes; vLLM prints 0.05 to 0.13 GiB.
LIBRARY_BYTES = 130 << 20

#: Smallest GPU, in bytes, on which vLLM has the larger defaults. The A100 has the smaller ones.
_LARGE = 70 << 30


@dataclass(frozen=True, slots=True)
class VllmProfile:
    """Memory of the vLLM `versions` whose sampler holds `sampler_copies` fp32 copies of the logits at its peak."""

    versions: str
    sampler_copies: float

    def activation_bytes(self, shape: ModelShape, num_tokens: int, num_seqs: int, dtype_bytes: int) -> int:
        """Return the peak bytes of a step of `num_tokens` tokens that samples `num_seqs` rows of logits."""
        rows = min(num_seqs, num_tokens)
        return max(mlp_bytes(shape, num_tokens, dtype_bytes), int(self.sampler_copies * rows * shape.vocab_size * 4))


#: Profiles by the name that --emit takes. The first one is the larger, so its plan holds for every version.
VLLM_PROFILES: Mapping[str, VllmProfile] = {
    "vllm": VllmProfile("up to 0.16", 9.6),
    "vllm-0.17": VllmProfile("0.17 and later", 3.9),
}


def vllm_defaults(device: DeviceMemory) -> dict[str, int]:
    """Return the defaults of `vllm serve` for max_num_seqs and max_num_batched_tokens on `device`."""
    large = device.total >= _LARGE and "a100" not in device.name.lower()
    return {"max_num_seqs": 1024 if large else 256, "max_num_batched_tokens": 8192 if large else 2048}
