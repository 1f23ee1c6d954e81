"""Published measurement of a serving engine on a GPU, and the settings behind it.

Settings that a row does not state are the defaults of its engine. published_lines.py reads rows, and published_loads.py
runs their loads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from llmsched.engine.architecture.config_fields import read_config_file
from llmsched.engine.architecture.flops import ModelFlops, model_flops
from llmsched.engine.architecture.quantization import QUANTIZATIONS, quantised_config
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.profiles.gpus import GpuSpec

DATA = Path(__file__).parent.parent / "data"

#: Statistic of a time per token: mean of TPOT over requests, mean of ITL over tokens, median of ITL over tokens, or
#: mean of E2E / output tokens over requests.
TpotKind = Literal["request", "token", "median", "whole"]


class Tpot(NamedTuple):
    """Published time per output token in seconds. `kind` is its statistic."""

    kind: TpotKind
    seconds: float


@dataclass(frozen=True)
class PublishedRow:
    """Published result of one load. Lengths are mean numbers of tokens. `rate` is in requests per second."""

    id: str
    source: str
    gpu: GpuSpec
    engine: str
    model: str
    config: Path
    weights: str
    kv: str
    input_len: float
    output_len: float
    concurrency: int | None
    rate: float
    num_requests: int | None
    limits: Mapping[str, int]
    metrics: Mapping[str, float]

    @property
    def fitted(self) -> bool:
        """True if constants of the cost model may be fitted to the row. A hash of the id selects half of the rows."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0

    @property
    def static(self) -> bool:
        return self.engine == "tensorrt-llm-static"

    @property
    def long_tailed(self) -> bool:
        """True if the lengths vary widely, because the requests are conversations (ShareGPT)."""
        return (
            self.id.startswith("iog")
            or "sharegpt" in self.id
            or "202x214" in self.id
            or (self.id.startswith("gpustack") and 200 < self.input_len < 250)
        )

    @property
    def tpot(self) -> Tpot | None:
        """Published time per output token, or None."""
        names: list[tuple[TpotKind, str]] = [
            ("median", "token_latency_ms_p50"),
            ("request", "tpot_ms"),
            ("request", "tpot_ms_mean"),
            ("token", "itl_ms_mean"),
            ("whole", "ms_per_token_incl_prefill"),
            ("whole", "ms_per_output_token_incl_prefill_derived"),
        ]
        if self.long_tailed:  # short requests influence a mean over requests most, and their lengths are unknown
            names.sort(key=lambda each: each[1] != "itl_ms_mean")
        return next((Tpot(kind, self.metrics[name] / 1e3) for kind, name in names if name in self.metrics), None)

    @property
    def ttft(self) -> float | None:
        found = next(
            (self.metrics[name] for name in ("ttft_ms_mean", "batch_prefill_ms") if name in self.metrics), None
        )
        return None if found is None else found / 1e3

    @property
    def throughput(self) -> float | None:
        """Output tokens per second, or None if not published."""
        if "output_tok_s" in self.metrics:
            return self.metrics["output_tok_s"]
        if "total_tok_s" in self.metrics:
            return self.metrics["total_tok_s"] * self.output_len / (self.input_len + self.output_len)
        return None

    @property
    def dtype(self) -> str:
        return "float16" if self.weights == "fp16" else "bfloat16"

    def planner(self) -> ModelPlanner:
        content = read_config_file(self.config)
        if self.weights in QUANTIZATIONS:
            content = quantised_config(content, self.weights)
        return _planner(json.dumps(content, sort_keys=True))

    def work(self) -> ModelFlops:
        return model_flops(self.planner().content, dtype_bytes=2, kv_dtype_bytes=1 if self.kv == "fp8" else 2)

    def settings(self) -> EngineConfig:
        """Return settings for our scheduler: the limits that the row states, else the defaults of the row's engine."""
        large = self.gpu.architecture == "hopper"
        limits = {
            "vllm": (8192, 1024) if large else (2048, 256),
            "sglang": (8192, 1024),
            "lmdeploy": (8192, 256),
            "nim": (8192, 2048),
            "tensorrt-llm": (8192, 2048),
            "tensorrt-llm-static": (1 << 20, 4096),
        }
        tokens, seqs = limits[self.engine]
        tokens = self.limits.get("max_num_batched_tokens", tokens)
        seqs = self.limits.get("max_num_seqs", seqs)
        return EngineConfig(
            scheduling_policy="fcfs",
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            max_model_len=math.ceil(self.input_len + self.output_len) if not self.long_tailed else 2048,
            kv_cache_dtype="fp8" if self.kv == "fp8" else "auto",
            dtype=self.dtype,  # type: ignore[arg-type]
            enable_prefix_caching=False,
            gpu_memory_utilization=0.95 if self.engine == "tensorrt-llm" else 0.9,
        )

    @property
    def reserves(self) -> bool:
        """True if the engine admits a request only with all the KV that it may need (GUARANTEED_NO_EVICT)."""
        return self.engine in ("tensorrt-llm", "nim")

    @property
    def staggered(self) -> bool:
        """True if the requests of a closed loop do not all start together.

        If they did, the published TTFT could not be shorter than the prefill of all concurrent requests, but in these
        rows it is shorter.
        """
        return self.id.startswith("aic") and (self.concurrency or 1) > 1

    def plan(self, config: EngineConfig) -> MemoryPlan:
        """Return the memory plan of the row's model on its GPU."""
        return self.planner().plan(config, DeviceMemory("cuda", self.gpu.name, self.gpu.memory))


@cache
def _planner(content: str) -> ModelPlanner:
    return ModelPlanner(json.loads(content), packed=False)  # other engines hold weights as in the files
