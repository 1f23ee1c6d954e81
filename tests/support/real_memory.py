"""How much a process grows when it loads models, beside what was planned: run in a process of its own.

    python real_memory.py TINY_MODEL MODEL ...     prints [{"planned": bytes, "grown": bytes}, ...]

The tiny model comes first and is not counted: it brings what every engine needs once, code and compiled kernels.
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
    """An engine whose KV cache has been written to: pages that nobody touched take no memory."""
    limits = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    settings = EngineConfig(model=model, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=kv_bytes, **limits)
    engine = build_engine(settings)
    executor: Any = engine.executor
    for tensor in (*executor._cache.keys, *executor._cache.values):
        tensor.fill_(0.5)
    return engine


def resident() -> int:
    """Bytes of this process in memory that no other shares, once freed memory has gone back."""
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
