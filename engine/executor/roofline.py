"""Roofline model of the time of a step, from a model's shape and the rates that an engine reaches on a GPU.

The time is the sum of these parts:

    launch      constants per step, per layer and per sampled token, and reading of recurrent states
    matrices    dense, experts, head: hypot(operations / matrix rate, bytes / bandwidth)
    vectors     norms, residuals, activations: bytes / bandwidth
    attention   of prefills and of decodes: hypot(operations / attention rate, KV bytes / KV bandwidth)
"""
# hypot(a, b) is close to the larger of a and b, but higher where both are similar, because then arithmetic and memory
# traffic slow each other down. The part "matrices" was compared with microsoft/vidur's profiles of matrix products
# (A100, H100, A40; 1 to 4,096 tokens; 2.7B to 70B). With 26 microseconds per layer, 73 to 76 % of the matrix rate and
# 79 to 92 % of the bandwidth, the median error is 3 % and the P90 error 9 % (tests/executor/test_op_profiles.py). The
# shares of the rates come from profiles/engines.toml.

from __future__ import annotations

from collections.abc import Iterable

from llmsched.engine.architecture.flops import Matrices, ModelFlops
from llmsched.engine.architecture.quantization import Arithmetic
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import StepShape
from llmsched.profiles.engines import Efficiency, EngineSpec
from llmsched.profiles.gpus import GpuSpec


class Roofline:
    """StepCost of a language model on a GPU, for a kind of engine such as vLLM.

    Raises ConfigError for a `dtype` in which the GPU cannot multiply.
    """

    def __init__(self, work: ModelFlops, gpu: GpuSpec, engine: EngineSpec, *, dtype: str = "bfloat16") -> None:
        share = engine.on(gpu)
        self.window = work.window
        #: Median relative error of TPOT against published measurements that the fit did not use.
        self.error = share.error
        bandwidth = gpu.bandwidth * share.bandwidth
        kinds: tuple[Arithmetic, ...] = ("bf16", "fp8", "fp8_block")
        rates = {kind: _matrix_rate(gpu, share, dtype, kind) for kind in kinds}
        self._launch = engine.step_seconds + engine.layer_seconds * work.layers
        self._per_row = engine.row_seconds + work.state_bytes / bandwidth
        self._per_token = work.vector_bytes / bandwidth
        self._dense = _seconds(work.dense, rates, bandwidth)
        self._experts = _seconds(work.experts, rates, bandwidth * share.experts, share.experts)
        self._chosen = work.experts_per_token / work.num_experts if work.num_experts else 0.0
        self._head = _seconds(work.head, rates, bandwidth)
        attention_rate = _matrix_rate(gpu, share, dtype, "bf16") * share.attention
        self._prefill = _sums((a.windowed, a.prefill_flops / attention_rate) for a in work.attention)
        decode_rate = gpu.fp32_flops * share.decode
        self._decode = _sums(
            (a.windowed, a.decode_flops / (attention_rate if a.latent else decode_rate)) for a in work.attention
        )
        self._kv = _sums((a.windowed, a.kv_bytes / (gpu.bandwidth * share.kv)) for a in work.attention)
        self._swap = 1 / (gpu.host_bandwidth * 0.8)  # copies from page-locked memory reach 80 % of the link's rate

    def seconds(self, shape: StepShape) -> float:
        """Return the time of a step in seconds. If the fields of `shape` are arrays, the result is an array as well."""
        prefill_tokens, decodes, kv, prefill_kv, pairs, window_kv, window_prefill_kv, window_pairs, sampled = shape
        tokens = prefill_tokens + decodes
        (a, b), (c, d) = self._dense, self._head
        seconds = self._launch + self._per_token * tokens + self._per_row * sampled
        seconds += _both(a * tokens, b) + _both(c * sampled, d * (sampled > 0))
        if self._chosen:
            a, b = self._experts
            seconds += _both(a * self._chosen * tokens, b * (1 - (1 - self._chosen) ** tokens))
        (full, windowed), (p, wp), (q, wq) = self._kv, self._prefill, self._decode
        seconds += _both(p * pairs + wp * window_pairs, full * prefill_kv + windowed * window_prefill_kv)
        kv, window_kv = kv - prefill_kv, window_kv - window_prefill_kv
        return seconds + _both(q * kv + wq * window_kv, full * kv + windowed * window_kv)

    def swap_seconds(self, num_bytes: int) -> float:
        return num_bytes * self._swap


def _both(arithmetic: float, reading: float) -> float:
    """Return the seconds that arithmetic and reading take together, if they partly overlap."""
    total: float = (arithmetic * arithmetic + reading * reading) ** 0.5
    return total


def _matrix_rate(gpu: GpuSpec, share: Efficiency, dtype: str, arithmetic: Arithmetic) -> float:
    """Return the operations per second that matrix products reach. Raises ConfigError for an unsupported `dtype`."""
    if arithmetic != "bf16" and gpu.fp8_flops:
        return gpu.sustained * gpu.fp8_flops * (share.matrix_fp8 if arithmetic == "fp8" else share.matrix_fp8_block)
    flops = {"bfloat16": gpu.bf16_flops, "float16": gpu.fp16_flops, "float32": gpu.fp32_flops}.get(dtype, 0.0)
    if not flops:
        raise ConfigError("dtype", f"{gpu.name} cannot multiply {dtype}; use float16")
    return gpu.sustained * flops * share.matrix


def _seconds(
    matrices: Matrices, rates: dict[Arithmetic, float], bandwidth: float, share: float = 1.0
) -> tuple[float, float]:
    """Return the seconds of arithmetic per token, and the seconds to read all the weights once."""
    return 2 * matrices.numbers / (rates[matrices.arithmetic] * share), matrices.size / bandwidth


def _sums(parts: Iterable[tuple[bool, float]]) -> tuple[float, float]:
    """Return the sum for full-attention layers and the sum for sliding-window layers.

    Each of `parts` is a pair: whether its layers have a sliding window, and the number to add.
    """
    full = windowed = 0.0
    for is_windowed, value in parts:
        full, windowed = (full, windowed + value) if is_windowed else (full + value, windowed)
    return full, windowed
