"""Memory plan compared with the device's actual memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny_models import build_config, build_tokenizer
from transformers import AutoModelForCausalLM

from gpu_suite.rows import CheckRow
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.device import _nvml, _visible_gpu
from llmsched.engine.sampling_params import SamplingParams

MIB = 1 << 20
#: About 0.3 billion parameters, so that the plan's terms stand out from CUDA's rounding.
SIZE = {
    "vocab_size": 64_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
#: Allowance for torch's allocations besides weights, KV and graphs when an engine is ready: workspaces, buffers.
WORKSPACE_BYTES = 64 * MIB


def check_memory(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Build an engine by its plan, load it fully, and compare."""
    before = used_memory(device)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), {} if small else SIZE, device)
        limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4} if small else {}
        engine = build_engine(
            EngineConfig(
                model=folder,
                device="cuda" if device == "cuda" else "cpu",
                dtype="bfloat16",
                gpu_memory_utilization=0.5,
                max_model_len=256 if small else 2048,
                kv_cache_memory_bytes=MIB if small else None,
                **limits,
            )
        )
    plan = engine.plan
    assert plan is not None
    kv_bytes = engine.executor.kv_cache_bytes  # type: ignore[attr-defined]
    yield exactly("KV blocks", kv_bytes, plan.num_blocks * plan.block_bytes)
    if device == "cuda":
        yield from check_allocations(engine, kv_bytes, before)
    else:
        serve_full_steps(engine)


def check_allocations(engine: Engine, kv_bytes: int, before: int) -> Iterator[CheckRow]:
    plan = engine.plan
    assert plan is not None
    weights = torch.cuda.memory_allocated() - kv_bytes
    fits = plan.weights_bytes <= weights <= plan.weights_bytes + WORKSPACE_BYTES + plan.graph_bytes
    yield CheckRow("weights", mib(weights), mib(plan.weights_bytes), fits, both(weights, plan.weights_bytes))
    torch.cuda.reset_peak_memory_stats()
    serve_full_steps(engine)
    activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    yield at_most("activations of full steps", activations, plan.activation_bytes)
    everything = used_memory(device="cuda") - before
    context = everything - torch.cuda.memory_reserved()
    planned = plan.context_bytes + plan.graph_bytes
    yield CheckRow("CUDA context, kernels and graphs", mib(context), mib(planned), data=both(context, planned))
    yield at_most("everything", everything, plan.budget_bytes)


def save_model(path: Path, size: dict[str, int], device: str) -> None:
    """Save a Hugging Face directory with random weights, which are made on the device for speed."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(build_config("llama", **size), dtype=torch.bfloat16)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def serve_full_steps(engine: Engine) -> None:
    """Run steps full of prefill, then as many decodes as may run, all sampling with filters."""
    config = engine.config
    length = max(8, config.max_num_batched_tokens // config.max_num_seqs)
    for index in range(config.max_num_seqs):
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4, ignore_eos=True, seed=index)
        engine.add_request(str(index), [4 + (index * 31 + place) % 200 for place in range(length)], params)
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def used_memory(device: str) -> int:
    """Return the bytes in use on the GPU by all processes, as the driver counts; 0 on a CPU."""
    if device != "cuda":
        return 0
    with _nvml() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(_visible_gpu(nvml), version=nvml.nvmlMemory_v2).used)


def exactly(name: str, found: int, planned: int) -> CheckRow:
    return CheckRow(name, mib(found), mib(planned), found == planned, both(found, planned))


def at_most(name: str, found: int, planned: int) -> CheckRow:
    return CheckRow(name, mib(found), f"<= {mib(planned)}", found <= planned, both(found, planned))


def both(found: int, planned: int) -> dict[str, int]:
    return {"actual_bytes": found, "planned_bytes": planned}


def mib(count: int) -> str:
    return f"{count / MIB:,.0f} MiB"
