"""Building an engine, and the messages when memory runs out at each stage."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

from llmsched.engine import build
from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model import loader as opening
from llmsched.engine.model.paged_cache import KVCache
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler.baselines import StaticScheduler

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
def test_out_of_memory_is_reported_with_the_plan_and_a_remedy(
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
def test_other_errors_are_not_converted(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, doing: str) -> None:
    failing(monkeypatch, doing, RuntimeError("no kernel image is available"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        build_engine(config(tiny_model))


def test_triton_without_a_c_compiler_is_reported_with_a_remedy(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "computing the largest steps", RuntimeError("Failed to find C compiler. Please ..."))
    with pytest.raises(ModelError, match=r"computing the largest steps failed: .* install gcc or clang, or set CC"):
        build_engine(config(tiny_model))


def test_the_garbage_collector_does_not_scan_what_is_imported(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = build.open_model
    seen: list[bool] = []

    def opening(*given: Any) -> Any:
        seen.append(gc.isenabled())
        return opened(*given)

    monkeypatch.setattr(build, "open_model", opening)
    gc.unfreeze()
    build_engine(config(tiny_model))
    frozen = gc.get_freeze_count()
    assert (seen, gc.isenabled()) == ([False], True)
    assert frozen > 100_000
    build_engine(config(tiny_model))
    assert gc.get_freeze_count() <= frozen  # an engine that exists is not frozen: it may end
    gc.unfreeze()


@pytest.mark.parametrize("starts_empty", [False, True])
def test_the_stages_of_a_start_say_what_takes_long(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, starts_empty: bool
) -> None:
    monkeypatch.setattr(build, "starts_empty", lambda _: starts_empty)
    stages: dict[str, None] = {}
    build_engine(config(tiny_model), lambda stage, *_: stages.setdefault(stage))
    first, loading, preparing, *warming = stages
    assert first == "importing torch and transformers"
    assert loading.startswith("loading")
    remark = " (compiling CPU kernels; later starts find them on disk)" if starts_empty else ""
    assert preparing == f"preparing the layers{remark}"
    assert warming
    assert all(stage.startswith("warming up: ") and stage.endswith(f"{remark}") for stage in warming)


def test_engine_beside_changes_settings_and_shares_the_executor(tiny_model: Any) -> None:
    built = build_engine(config(tiny_model))
    prompt = list(range(4, 24))

    def tokens(engine: Engine) -> list[int]:
        engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        found = [token for _ in range(5) for output in engine.step() for token in output.token_ids]
        assert not engine.has_work()
        return found

    expected = tokens(built)
    beside = engine_beside(built, scheduling_policy="static", max_num_seqs=2, max_num_batched_tokens=64)
    assert isinstance(beside.scheduler, StaticScheduler)
    assert (beside.config.max_num_seqs, beside.config.max_num_batched_tokens) == (2, 64)
    assert beside.executor is built.executor
    assert beside.stats().blocks_cached == 0
    assert tokens(beside) == expected


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block_size": 8}, "block_size: determines what is loaded and reserved"),
        ({"max_num_seqs": 129}, "max_num_seqs: 129 is out of range; allowed is from 1 to 128"),
    ],
)
def test_engine_beside_refuses_to_take_more_memory(tiny_model: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_beside(build_engine(config(tiny_model)), **knobs)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process in /proc")
def test_building_leaves_no_openmp_workers(tiny_model: Any) -> None:
    # Workers of a thread that computes no steps would make libgomp let the engine's workers sleep between kernels.
    # They end a moment after their thread.
    model = str(tiny_model("llama"))
    code = f"""
import os, time, torch
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
most, until = count() + 2, time.monotonic() + 60
build_engine(EngineConfig(model={model!r}, dtype="float32", device="cpu", num_gpu_blocks_override=40))
while count() > most and time.monotonic() < until:
    time.sleep(0.01)
print(count() - most)
"""
    assert int(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout) <= 0
