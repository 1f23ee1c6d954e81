"""Engine compared with plain transformers: small models with random weights, every way of scheduling.

The weights of quantised checkpoints are compared with the same weights dequantised.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quantised_files import save_quantised
from tiny_models import MAX_POSITION, VOCAB_SIZE, build_model, build_tokenizer, save_tiny_model

from gpu_suite.rows import CheckRow, failure
from llmsched.engine.config import EngineConfig
from llmsched.engine.model.loader import ModelInfo, open_model
from llmsched.engine.parity.verification import LoadedModel, check_parity, load_for_parity
from llmsched.engine.text.tokenizer import Tokenizer

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_neox",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "glm4_moe",
    "bloom",
    "mpt",
    "falcon",
    "falcon_alibi",
    "falcon_new",
    "smollm3",
    "phi",
    "stablelm",
    "stablelm with norms",
    "glm4",
    "cohere2",
    "hunyuan",
    "nemotron",
    "olmo2",
    "gemma3n",
    "gemma4",
)
#: Quantised formats whose products differ: types of codes, groups, offsets, tables and orders of columns.
FORMATS = ("fp8 block", "awq", "gptq sym", "gptq order", "gptq int8 sym order", "bnb int8", "nf4 nested", "nvfp4")


def check_models(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Return one row for each architecture, dtype and type of the KV cache."""
    tokenizer = Tokenizer(build_tokenizer())
    for dtype, kv in (
        (torch.float32, "auto"),
        (torch.bfloat16, "auto"),
        (torch.float32, "fp8"),
        (torch.bfloat16, "fp8"),
    ):
        for arch in ARCHITECTURES[:1] if small else ARCHITECTURES:
            name = f"{arch} {str(dtype).removeprefix('torch.')}{'' if kv == 'auto' else f', KV in {kv}'}"
            try:
                model = build_model(arch, seed=3).to(device=device, dtype=dtype)
                info = ModelInfo(arch, arch, VOCAB_SIZE, MAX_POSITION, frozenset({2}))
                yield compare(name, LoadedModel(model, info, tokenizer, device, dtype, kv_cache_dtype=kv))
            except Exception as error:
                yield failure(name, error)
    for case in FORMATS[:1] if small else FORMATS:
        name = f"llama float32, weights in {case}"
        try:
            with tempfile.TemporaryDirectory() as directory:
                path = save_quantised(Path(directory), case).path
                where: Any = torch.device(device).type
                subject = load_for_parity(EngineConfig(model=str(path), device=where, dtype="float32"))
            yield compare(name, subject)
        except Exception as error:
            yield failure(name, error)

    yield check_host_experts(device)


def check_host_experts(device: str) -> CheckRow:
    """Check a model whose experts in two layers stay in host memory."""
    name = "qwen3_moe float32, experts in host memory"
    try:
        with tempfile.TemporaryDirectory() as directory:
            path, where = save_tiny_model(Path(directory), "qwen3_moe", seed=3), torch.device(device).type
            opened = open_model(EngineConfig(model=str(path), device=where, dtype="float32"))
            model = opened.load(host_layers=(1, 2))
        return compare(name, LoadedModel(model, opened.info, opened.tokenizer, device, torch.float32))
    except Exception as error:
        return failure(name, error)


def compare(name: str, subject: LoadedModel) -> CheckRow:
    report = check_parity(subject, num_prompts=2, num_tokens=6)
    worst = max((check.max_abs_logit_diff or 0.0) for check in report.checks)
    parted = sum(len(check.divergences) for check in report.checks)
    failed = [check.name for check in report.checks if not check.ok]
    found = f"{worst:.2g}, {f'{parted} near ties' if parted else 'tokens equal'}"
    if failed:
        found = f"{worst:.2g}, failed: {'; '.join(failed)}"
    checks = {
        check.name: {
            "ok": check.ok,
            "max_abs_logit_diff": check.max_abs_logit_diff,
            "tokens_equal": check.tokens_equal,
            "problems": check.problems,
        }
        for check in report.checks
    }
    limit = min(check.tolerance for check in report.checks)
    return CheckRow(name, found, f"<= {limit:.2g}", report.ok, {"checks": checks, "spread": report.spread})
