"""Roofline against microsoft/vidur's profiles of single layers: matrix products and the rest."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from llmsched.engine.architecture.flops import model_flops
from llmsched.profiles.gpus import find_gpu

FILE = Path(__file__).parent.parent / "data" / "op_profiles.jsonl"
PROFILES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
GPUS = {"a100": "a100-80gb", "h100": "h100", "a40": "a40"}
#: Shares of matrix rate and bandwidth, fitted to the profiles.
SHARES = {"a100": (0.734, 0.809), "h100": (0.725, 0.922), "a40": (0.757, 0.795)}
LAUNCH = 26e-6
#: (hidden_size, intermediate_size) of those with gated MLPs.
WIDTHS = {
    "meta-llama/Llama-2-7b-hf": (4096, 11008),
    "meta-llama/Meta-Llama-3-8B": (4096, 14336),
    "internlm/internlm-20b": (5120, 13824),
    "codellama/CodeLlama-34b-Instruct-hf": (8192, 22016),
    "meta-llama/Llama-2-70b-hf": (8192, 28672),
}


def test_products_take_the_hypot_of_arithmetic_and_reading() -> None:
    sizes = []
    for profile in PROFILES:
        gpu = find_gpu(GPUS[profile["gpu"]])
        matrix, bandwidth = SHARES[profile["gpu"]]
        numbers = profile["weights_params_per_layer"]
        arithmetic = 2 * numbers * profile["num_tokens"] / (gpu.fp16_flops * matrix)
        reading = 2 * numbers / (gpu.bandwidth * bandwidth)
        predicted = (arithmetic**2 + reading**2) ** 0.5 + LAUNCH
        sizes.append(abs(predicted / (profile["gemm_ms_per_layer"] * 1e-3) - 1))
    assert len(sizes) == 272
    assert median(sizes) < 0.031
    assert quantiles(sizes, n=10)[-1] < 0.09


def test_the_rest_of_a_layer_moves_vectors() -> None:
    """The A40 takes half of the predicted time, because its cache is large for its bandwidth."""
    checked = 0
    for profile in PROFILES:
        if profile["num_tokens"] < 1024 or profile["gpu"] == "a40" or profile["model"] not in WIDTHS:
            continue
        hidden, inner = WIDTHS[profile["model"]]
        config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": hidden, "intermediate_size": inner}
        config |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}
        gpu = find_gpu(GPUS[profile["gpu"]])
        moved = model_flops(config, dtype_bytes=2).vector_bytes * profile["num_tokens"]
        predicted = moved / (gpu.bandwidth * SHARES[profile["gpu"]][1])
        published = profile["other_ms_per_layer"] * 1e-3
        assert abs(predicted / published - 1) < 0.2, profile
        checked += 1
    assert checked > 40
