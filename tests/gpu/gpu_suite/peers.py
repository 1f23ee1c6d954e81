"""The same model in transformers' generate with a static cache, which compiles a step with torch.compile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from gpu_suite.limits import attempt
from gpu_suite.llama import SMALL, Size, fitting, make_model
from gpu_suite.rows import CheckRow

#: Servers that are only named if they are installed.
OTHERS = ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
NEW_TOKENS = 65


def measure_peers(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Measure decode steps of generate, which keeps all rows in one batch from the first to the last token."""
    yield CheckRow("other servers installed", ", ".join(name for name in OTHERS if find_spec(name)) or "none")
    size = fitting(SMALL if small else Size(), device)
    model = make_model(size, device)
    for batch in (1, size.many):
        name = f"generate, static cache, {batch} rows of {size.context}"
        yield attempt(name, lambda name=name, batch=batch: generate_row(name, model, size, batch, device, small))


def generate_row(name: str, model: Any, size: Size, batch: int, device: str, small: bool) -> CheckRow:
    ids = torch.randint(4, size.vocab, (batch, size.context), device=device)
    new_tokens = 4 if small else NEW_TOKENS

    def run(count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            # Inductor takes minutes for a CPU, and says nothing about a GPU.
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0, eos_token_id=None, cache_implementation="static", disable_compile=small,
            )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    first = run(new_tokens)
    run(new_tokens)
    whole, prefill = run(new_tokens), run(1)
    step = (whole - prefill) / (new_tokens - 1)
    data = {"step_s": step, "tokens_per_s": batch / step, "first_call_s": first, "prefill_s": prefill, "rows": batch}
    found = f"{1e3 * step:.3g} ms a step, {batch / step:,.0f} tokens/s, first call {first:.0f} s"
    return CheckRow(name, found, data=data)
