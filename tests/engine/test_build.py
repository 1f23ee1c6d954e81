"""Building an engine: what goes wrong with memory is told in one line, whatever it is at that moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model import open as opening
from llmsched.engine.model.paged import KVCache

ON_THE_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity")
ON_THE_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
PLACES = {
    "loading the weights": (opening, "load_model", "choose a smaller model"),
    "reserving KV blocks": (KVCache, "allocate", "lower kv_cache_memory_bytes"),
    "computing the largest steps": (TorchExecutor, "warmup", "lower max_num_batched_tokens, max_num_seqs or "),
}


def failing(monkeypatch: pytest.MonkeyPatch, doing: str, error: Exception) -> str:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    owner, name, remedy = PLACES[doing]
    monkeypatch.setattr(owner, name, fail)
    return remedy


def config(tiny_model: Any) -> EngineConfig:
    return EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu", num_gpu_blocks_override=40)


@pytest.mark.parametrize("error", [ON_THE_GPU, ON_THE_CPU, MemoryError()], ids=["GPU", "CPU", "Python"])
@pytest.mark.parametrize("doing", PLACES)
def test_out_of_memory_is_one_line_with_the_plan_and_what_to_lower(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, doing: str, error: Exception
) -> None:
    remedy = failing(monkeypatch, doing, error)
    with pytest.raises(ModelError) as caught:
        build_engine(config(tiny_model))
    message = str(caught.value)
    assert message.startswith(f"out of memory while {doing}; planned on ")
    assert "for weights, " in message
    assert "480 KiB for KV, of " in message  # 40 blocks of 16 tokens, 3 layers, keys and values of 2 x 16 floats
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize("doing", PLACES)
def test_other_errors_stay_what_they_are(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, doing: str) -> None:
    failing(monkeypatch, doing, RuntimeError("no kernel image is available"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        build_engine(config(tiny_model))
