"""Growth of a process that loads models, compared with their memory plans. Run this file in a new process.

    python real_memory.py TINY_MODEL MODEL ...     prints [{"planned": bytes, "grown": bytes}, ...]

The process loads TINY_MODEL first and does not report it, because the first engine also loads code and compiled kernels
that all engines share.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import psutil
import torch

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.model.loader import load_tokenizer
from llmsched.engine.model.source import locate

KV_BYTES = 512 << 20


def loaded(model: str, kv_bytes: int) -> Any:
    """Return an engine on `model`. Its whole KV cache was written to, because untouched pages take no memory."""
    limits = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    settings = EngineConfig(model=model, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=kv_bytes, **limits)
    engine = build_engine(settings)
    executor: Any = engine.executor
    for tensor in (*executor._cache.keys, *executor._cache.values):
        tensor.fill_(0.5)
    return engine


def resident() -> int:
    """Return the unshared memory of this process in bytes, after a garbage collection."""
    gc.collect()
    time.sleep(0.1)
    return int(psutil.Process().memory_full_info().uss)


def main(tiny: str, *models: str) -> None:
    torch.set_num_threads(1)
    kept: list[Any] = [loaded(tiny, 1 << 20)]
    kept += [load_tokenizer(locate(model)) for model in models]
    found = []
    for model in models:
        before = resident()
        engine = loaded(model, KV_BYTES)
        plan = engine.plan
        found.append(
            {
                "planned": plan.weights_bytes + plan.num_blocks * plan.block_bytes,
                "grown": resident() - before,
            }
        )
        kept.append(engine)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
