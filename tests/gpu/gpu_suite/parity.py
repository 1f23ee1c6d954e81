"""Engine compared with plain transformers: small models with random weights, every way of scheduling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tiny_models import MAX_POSITION, VOCAB_SIZE, build_model, build_tokenizer

from gpu_suite.rows import CheckRow, failure
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.parity.verification import LoadedModel, check_parity
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
)


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
                yield compare(name, arch, dtype, kv, device, tokenizer)
            except Exception as error:
                yield failure(name, error)


def compare(name: str, arch: str, dtype: torch.dtype, kv: str, device: str, tokenizer: Tokenizer) -> CheckRow:
    model = build_model(arch, seed=3).to(device=device, dtype=dtype)
    info = ModelInfo(arch, arch, VOCAB_SIZE, MAX_POSITION, frozenset({2}))
    subject = LoadedModel(model, info, tokenizer, device, dtype, kv_cache_dtype=kv)
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
