"""From a configuration to an engine that is ready to serve: locate, plan, load, allocate, warm up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.dtypes import DTYPE_BYTES, check_servable, planned_kv_dtype
from llmsched.engine.architecture.shape import model_shape
from llmsched.engine.config import EngineConfig, ResolvedConfig, check_knob
from llmsched.engine.core import Engine
from llmsched.engine.device import cpu_memory, device_memory
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.kv.swap import SwapSpace, plan_swap
from llmsched.engine.measure import measured_memory, tensor_bytes
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import plan_memory
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.loader import OpenModel, open_model
from llmsched.engine.out_of_memory import within_memory
from llmsched.engine.progress import Progress, silent

if TYPE_CHECKING:
    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Knobs that say what is loaded and reserved; all others only say what is decided.
RESERVING = frozenset(
    {
        *("model", "dtype", "kv_cache_dtype", "device", "max_model_len", "block_size", "gpu_memory_utilization"),
        *("kv_cache_memory_bytes", "num_gpu_blocks_override", "swap_space"),
    }
)
#: Knobs that memory is reserved by, and that may be less than that.
LIMITS = frozenset({"max_num_batched_tokens", "max_num_seqs"})

#: The knob that bounds the memory of KV blocks, by the kind of device.
_FOR_BLOCKS = {"cuda": setting("gpu_memory_utilization"), "cpu": setting("kv_cache_memory_bytes")}


def build_engine(config: EngineConfig, progress: Progress = silent, metrics_prefix: str = "llmsched") -> Engine:
    """Load `config.model` and reserve its memory; what can be refused is refused before the weights are read.

    The engine's config has every value filled in. Raises ModelError, ConfigError.
    """
    check_servable(config)
    opened = open_model(config, progress)
    dtype = str(opened.dtype).removeprefix("torch.")
    kv_dtype = planned_kv_dtype(config, dtype)
    plan = _plan(opened, config, dtype, kv_dtype)
    swap = _swap(config, plan)
    resolved = plan.resolve(config, dtype, kv_dtype)
    executor, plan = _load(opened, resolved, plan, swap, progress)
    metrics = EngineMetrics(opened.info.name, plan.block_size, plan.num_blocks, metrics_prefix)
    return Engine(
        resolved,
        opened.info,
        opened.tokenizer,
        executor,
        plan.num_blocks,
        plan=plan,
        swap=swap,
        layout=plan.layout,
        metrics=metrics,
    )


def engine_beside(engine: Engine, **knobs: Any) -> Engine:
    """An engine with other settings and nothing cached on the executor of `engine`, which must not be used any more.

    Raises ConfigError for a knob of RESERVING, and for a limit above what memory is reserved for.
    """
    if wrong := sorted(RESERVING & knobs.keys()):
        raise ConfigError(wrong[0], "decides what is loaded and reserved; that takes an engine built anew")
    for name in LIMITS & knobs.keys():
        if knobs[name] is not None:
            check_knob(name, knobs[name], {**EngineConfig.knob_rule(name), "high": getattr(engine.config, name)})
    kv = engine.scheduler.kv
    return Engine(
        replace(engine.config, **{name: value for name, value in knobs.items() if name not in LIMITS or value}),
        engine.model,
        engine.tokenizer,
        engine.executor,
        kv.pool.num_blocks,
        plan=engine.plan,
        swap=SwapSpace(kv.swap.num_blocks, kv.swap.block_bytes),
        layout=kv.layout,
    )


def _load(
    opened: OpenModel, config: ResolvedConfig, plan: MemoryPlan, swap: SwapSpace, progress: Progress
) -> tuple[TorchExecutor, MemoryPlan]:
    """The executor, warmed up, and the plan with what it has really taken."""
    import torch

    from llmsched.engine.executor.torch_executor import TorchExecutor

    with within_memory(plan, "loading the weights", "free memory that others use, or choose a smaller model or dtype"):
        model = opened.load(progress)
    with within_memory(
        plan, "reserving KV blocks", f"lower {_FOR_BLOCKS[plan.device.kind]} (or {setting('swap_space')})"
    ):
        executor = TorchExecutor(
            model,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            device=opened.device,
            kv_dtype=getattr(torch, config.kv_cache_dtype),
            max_model_len=plan.max_model_len,
            num_host_blocks=swap.num_blocks,
            layout=plan.layout,
        )
    remedy = f"lower {setting('max_num_batched_tokens')}, {setting('max_num_seqs')} or {_FOR_BLOCKS[plan.device.kind]}"
    progress("warming up", 0, 1)
    with within_memory(plan, "computing the largest steps", remedy):
        peak = executor.warmup(plan.max_num_batched_tokens, config.max_num_seqs, plan.max_model_len)
    progress("warming up", 1, 1)
    return executor, replace(plan, measured=measured_memory(tensor_bytes(model), executor, plan, peak))


def _plan(opened: OpenModel, config: EngineConfig, dtype: str, kv_dtype: str) -> MemoryPlan:
    path = opened.source.path if opened.source.kind == "directory" else None
    dtype_bytes, kv_dtype_bytes = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    shape = model_shape(opened.config, dtype_bytes=dtype_bytes, path=path)
    memory = device_memory(opened.device)
    plan = plan_memory(shape, config, memory, dtype_bytes=dtype_bytes, kv_dtype_bytes=kv_dtype_bytes)
    if plan.problem is not None:
        raise plan.problem
    return plan


def _swap(config: EngineConfig, plan: MemoryPlan) -> SwapSpace:
    """Swap space lies in host memory; on a CPU that is what the plan is about as well."""
    free = cpu_memory().free
    if plan.device.kind == "cpu":
        free -= plan.fixed_bytes + plan.kv_bytes
    return plan_swap(config.swap_space, plan.block_bytes, free)
