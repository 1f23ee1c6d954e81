"""Published measurements (measurements*.jsonl in tests/data), and what the engines and GPUs behind them were.

What a row does not state is what its engine does by default. How its load is run is in published_loads.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.kv.draft import ModelDraft
from llmsched.engine.kv.fields import read_config_file
from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.work import ModelWork, model_work
from llmsched.profiles.gpus import GpuSpec, find_gpu

DATA = Path(__file__).parent.parent / "data"

#: Files of model_configs by a part of the model's name, the more special ones first.
MODELS = {
    "Distill-Llama-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Distill-Qwen-14B": "Qwen--Qwen2.5-14B-Instruct",
    "Distill-Qwen-7B": "Qwen--Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Llama-3-8B": "meta-llama--Meta-Llama-3-8B",
    "70B": "meta-llama--Llama-3.1-70B",
    "Llama-2-7B": "meta-llama--Llama-2-7b",
    "Llama-2-13B": "meta-llama--Llama-2-13b",
    "Mistral-7B": "mistralai--Mistral-7B-Instruct-v0.2",
    "Mixtral-8x7B": "mistralai--Mixtral-8x7B-v0.1",
    "gpt-oss-20b": "openai--gpt-oss-20b",
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B",
    "Qwen3-0.6B": "Qwen--Qwen3-0.6B",
    "Qwen3-8B": "Qwen--Qwen3-8B",
    "Qwen3-14B": "Qwen--Qwen3-14B",
    "Qwen3-32B": "Qwen--Qwen3-32B",
    "Qwen2.5-7B": "Qwen--Qwen2.5-7B-Instruct",
    "Qwen2.5-14B": "Qwen--Qwen2.5-14B-Instruct",
    "Qwen2.5-32B": "Qwen--Qwen2.5-32B-Instruct",
}
#: Keys of gpus.toml by how the rows begin, the more special ones first.
GPUS = {
    "A100 PCIe": "a100-80gb-pcie",
    "A100": "a100-80gb",
    "H100 PCIe": "h100-pcie",
    "H100": "h100",
    "H200": "h200",
    "H20": "h20",
    "L40S": "l40s",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "RTX 4070 Laptop": "laptop-rtx4070",
}
#: Classes of engines.toml by how the rows begin.
ENGINES = {
    "TensorRT-LLM 0.9": "tensorrt-llm-static",
    "TensorRT-LLM": "tensorrt-llm",
    "NVIDIA NIM": "nim",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "LMDeploy": "lmdeploy",
}

#: Mean over requests of TPOT; mean over tokens (ITL); median over tokens; mean of E2E / output tokens.
TpotKind = Literal["request", "token", "median", "whole"]


class Tpot(NamedTuple):
    """`seconds` per output token, taken in one of several ways."""

    kind: TpotKind
    seconds: float


@dataclass(frozen=True)
class Row:
    """One published result, with what it leaves out filled in."""

    id: str
    source: str
    gpu: GpuSpec
    engine: str
    model: str
    weights: str
    kv: str
    input_len: float
    output_len: float
    concurrency: int | None
    rate: float
    num_requests: int | None
    metrics: Mapping[str, float]

    @property
    def fitted(self) -> bool:
        """Whether the constants may be fitted to it: half of the rows, by a hash of the id."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0

    @property
    def static(self) -> bool:
        return self.engine == "tensorrt-llm-static"

    @property
    def long_tailed(self) -> bool:
        """Whether the lengths are means of conversations (ShareGPT)."""
        return (
            self.id.startswith("iog")
            or "sharegpt" in self.id
            or "202x214" in self.id
            or (self.id.startswith("gpustack") and 200 < self.input_len < 250)
        )

    @property
    def tpot(self) -> Tpot | None:
        """What was published of the time per output token."""
        names: list[tuple[TpotKind, str]] = [
            ("median", "token_latency_ms_p50"),
            ("request", "tpot_ms"),
            ("request", "tpot_ms_mean"),
            ("token", "itl_ms_mean"),
            ("whole", "ms_per_token_incl_prefill"),
            ("whole", "ms_per_output_token_incl_prefill_derived"),
        ]
        if self.long_tailed:  # what a mean over requests is depends on the short ones, of which nothing is known
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
        """Output tokens per second."""
        if "output_tok_s" in self.metrics:
            return self.metrics["output_tok_s"]
        if "total_tok_s" in self.metrics:
            return self.metrics["total_tok_s"] * self.output_len / (self.input_len + self.output_len)
        return None

    @property
    def dtype(self) -> str:
        return "float16" if self.weights == "fp16" else "bfloat16"

    def draft(self) -> ModelDraft:
        content = read_config_file(DATA / "model_configs" / f"{self.model}_config.json")
        if self.weights.startswith("fp8"):
            blocks = {"weight_block_size": [128, 128]} if self.weights == "fp8_block" else {}
            content["quantization_config"] = {"quant_method": "fp8"} | blocks
        return _drafts(json.dumps(content, sort_keys=True))

    def work(self) -> ModelWork:
        return model_work(self.draft().content, dtype_bytes=2, kv_dtype_bytes=1 if self.kv == "fp8" else 2)

    def settings(self) -> EngineConfig:
        """The scheduler's settings that come nearest to what the engine does by default."""
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
        """Whether a request is admitted only when all that it may ever need is free (GUARANTEED_NO_EVICT)."""
        return self.engine in ("tensorrt-llm", "nim")

    @property
    def staggered(self) -> bool:
        """Whether a closed loop is in its steady state. The measured times to the first token of these are shorter than
        the prefill of one wave of requests, so that they did not come in waves.
        """
        return self.id.startswith("aic") and (self.concurrency or 1) > 1

    def plan(self, config: EngineConfig) -> MemoryPlan:
        """The GPU's memory, with the model on it."""
        return self.draft().plan(config, DeviceMemory("cuda", self.gpu.name, self.gpu.memory))


@cache
def _drafts(content: str) -> ModelDraft:
    return ModelDraft(json.loads(content))


def read_rows() -> list[Row]:
    """All rows, in the order of the files."""
    texts = ((DATA / name).read_text(encoding="utf-8") for name in ("measurements.jsonl", "measurements_more.jsonl"))
    return [_row(json.loads(line)) for text in texts for line in text.splitlines()]


def _row(line: dict[str, Any]) -> Row:
    engine = _by_beginning(ENGINES, line["engine"])
    metrics = dict(line["metrics"])
    if "token_latency_s_p50" in metrics:
        metrics["token_latency_ms_p50"] = metrics.pop("token_latency_s_p50") * 1e3
    weights = line["weights_dtype"].split()[0]
    if weights == "fp8" and "Qwen3" in line["model"]:
        weights = "fp8_block"  # the checkpoints that Qwen published
    lengths = line.get("input_len"), line.get("output_len")
    if lengths == (None, None):
        mean = metrics["output_tok_s"] / metrics["req_s"]
        lengths = mean * (metrics["total_tok_s"] / metrics["output_tok_s"] - 1), mean
    concurrency = line.get("concurrency") or line.get("batch")
    return Row(
        id=line["id"],
        source=line["id"].split("-")[0],
        gpu=find_gpu(_by_beginning(GPUS, line["gpu"])),
        engine=engine,
        model=next(file for part, file in MODELS.items() if part in line["model"]),
        weights=weights,
        kv=_kv(line["kv_dtype"], weights),
        input_len=lengths[0] or 32,
        output_len=lengths[1],
        concurrency=concurrency,
        rate=float(line.get("request_rate", "inf")),
        num_requests=line.get("num_requests"),
        metrics=metrics,
    )


def _kv(stated: str, weights: str) -> str:
    """fp8 or 16 bits; where it is not known, that of the weights."""
    if stated.startswith("unknown"):
        return "fp8" if weights.startswith("fp8") else "16 bits"
    return "fp8" if stated.startswith("fp8") else "16 bits"


def _by_beginning(names: Mapping[str, str], name: str) -> str:
    return next(value for beginning, value in names.items() if name.startswith(beginning))
