"""Construction of an engine from its configuration: plan memory, load the weights, reserve KV blocks, warm up."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.adapter_files import read_adapters
from llmsched.engine.architecture.dtypes import DTYPE_BYTES, check_kv_dtype, planned_kv_dtype
from llmsched.engine.architecture.shape import model_shape
from llmsched.engine.config import LIMITS, EngineConfig, ResolvedConfig, check_limits
from llmsched.engine.core import Engine
from llmsched.engine.device import cpu_memory, device_memory
from llmsched.engine.errors import ConfigError, ModelError, is_out_of_memory, setting
from llmsched.engine.garbage_collection import paused_collection
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.recurrent_state import num_state_slots
from llmsched.engine.kv.swap import SwapSpace, plan_swap
from llmsched.engine.memory.activation_memory import logits_limit
from llmsched.engine.memory.plan import MeasuredMemory, MemoryPlan
from llmsched.engine.memory.planner import gguf_weights, plan_memory, refit
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.loader import OpenModel, open_model
from llmsched.engine.progress import Progress, silent, with_remark
from llmsched.engine.threads import in_a_thread
from llmsched.engine.units import human_bytes
from llmsched.kernels.dispatch import starts_empty

if TYPE_CHECKING:
    import torch

    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Knobs that determine what is loaded and reserved; all others only affect scheduling.
RESERVING = frozenset(
    {
        *("model", "dtype", "kv_cache_dtype", "quantization", "device", "max_model_len", "block_size"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "swap_space", "model_impl"),
        *("enforce_eager", "expert_offload", "lora"),
    }
)

#: Most KV blocks during the warm-up on a GPU, whose measured memory then decides how many blocks there are.
WARMUP_BLOCKS = 256
#: Memory by which the second attempt to reserve KV blocks is smaller if the first one runs out of memory.
SPARE_BYTES = 512 << 20

#: The knob that limits the memory of KV blocks, by kind of device.
_FOR_BLOCKS = {"cuda": setting("gpu_memory_utilization"), "cpu": setting("kv_cache_memory_bytes")}


def build_engine(
    config: EngineConfig,
    progress: Progress = silent,
    metrics_prefix: str = "llmsched",
    served_model_name: str | None = None,
) -> Engine:
    """Load `config.model`, reserve its memory and return the engine. Settings are checked before weights are read.

    `served_model_name` is the model's name in metrics (None: the name in ModelInfo). Raises ModelError for a model or
    an adapter that cannot be loaded or served, and ConfigError for a setting that does not suit model or device.
    """
    adapters = read_adapters(config.lora)
    with _importing():
        opened = open_model(config, progress)
        import llmsched.engine.executor.torch_executor  # noqa: F401  # the rest of transformers
    name = served_model_name or opened.info.name
    if any(adapter.name == name for adapter in adapters):
        raise ConfigError("lora", f"{name} is the name of the model; give the adapter another one")
    dtype = str(opened.dtype).removeprefix("torch.")
    dtype_bytes = DTYPE_BYTES[dtype]
    path = opened.source.path if opened.source.kind == "directory" else None
    packed_file = opened.source.gguf if config.quantization is None else None
    weights = gguf_weights(packed_file, dtype_bytes) if packed_file else None
    shape = model_shape(
        opened.config, dtype_bytes=dtype_bytes, path=path, weights=weights, rounding=config.quantization
    )
    memory = device_memory(opened.device)
    kv_dtype = planned_kv_dtype(config, dtype, memory, checkpoint_fp8=shape.fp8_kv)
    check_kv_dtype(kv_dtype, memory)
    plan = plan_memory(shape, config, memory, dtype_bytes=dtype_bytes, kv_dtype_bytes=DTYPE_BYTES[kv_dtype])
    resolved = plan.resolve(config, dtype, kv_dtype)
    free = cpu_memory().free
    if plan.device.kind == "cpu":
        free -= plan.fixed_bytes + plan.kv_bytes
    states: dict[str, Any] = {"state_bytes": plan.state_bytes_per_seq, "max_num_seqs": config.max_num_seqs}
    swap = plan_swap(config.swap_space, plan.block_bytes, free, **states)
    # A thread that has run torch keeps its OpenMP workers until it ends. With more workers than cores, libgomp lets all
    # of them sleep between parallel regions, which costs a decode step of a small model as much again. And torch hands
    # the cuBLAS handle of a thread that has ended on to the next thread, here the engine's.
    executor, plan = in_a_thread(lambda: _load(opened, config, resolved, plan, swap, progress), "llmsched-warm-up")
    resolved = replace(plan.resolve(config, dtype, kv_dtype), model_impl=executor.model_impl)
    metrics = EngineMetrics(name, plan.block_size, plan.num_blocks, metrics_prefix)
    kv = make_kv(resolved, plan.num_blocks, swap, plan.layout)
    return Engine(resolved, opened.info, opened.tokenizer, executor, kv, plan=plan, metrics=metrics)


def engine_beside(engine: Engine, **knobs: Any) -> Engine:
    """Return a new engine with the executor of `engine`, an empty cache, and the same settings except for `knobs`.

    Afterwards `engine` must not compute steps. Raises ConfigError for a knob that determines what is loaded and
    reserved, and for a limit above the value for which memory was reserved.
    """
    if wrong := sorted(RESERVING & knobs.keys()):
        raise ConfigError(wrong[0], "determines what is loaded and reserved; build a new engine to change it")
    check_limits(engine.config, knobs)
    config = replace(engine.config, **{name: value for name, value in knobs.items() if name not in LIMITS or value})
    old = engine.scheduler.kv
    swap = SwapSpace(old.swap.num_blocks, old.swap.block_bytes, old.swap.states.count)
    num_states = None if old.states is None else old.states.pool.num_blocks
    kv = make_kv(config, old.pool.num_blocks, swap, old.layout, num_states)
    return Engine(config, engine.model, engine.tokenizer, engine.executor, kv, plan=engine.plan)


def _load(
    opened: OpenModel,
    config: EngineConfig,
    resolved: ResolvedConfig,
    plan: MemoryPlan,
    swap: SwapSpace,
    progress: Progress,
) -> tuple[TorchExecutor, MemoryPlan]:
    """Load the model, reserve KV blocks and warm up; return the executor, and `plan` with the measured memory.

    On a GPU, the plan gets the number of blocks that fits beside the measured weights, activations and graphs.
    """
    from llmsched.engine.executor.torch_executor import TorchExecutor
    from llmsched.engine.model.adapters import Adapters
    from llmsched.engine.model.kv_scales import KV_TYPES

    with _within_memory(
        plan, "loading the weights", "free memory that other programs use, or choose a smaller model or dtype"
    ):
        model = opened.load(progress, host_layers=() if plan.offload is None else plan.offload.layers)
    if starts_empty(opened.device):
        progress = with_remark(progress, "compiling CPU kernels; later starts find them on disk")
    progress("preparing the layers", 0, 1)
    measures = plan.device.kind == "cuda"
    with _within_memory(
        plan, "reserving KV blocks", f"lower {_FOR_BLOCKS[plan.device.kind]} (or {setting('swap_space')})"
    ):
        adapters = read_adapters(resolved.lora)
        executor = TorchExecutor(
            model,
            num_blocks=min(plan.num_blocks, WARMUP_BLOCKS) if measures else plan.num_blocks,
            block_size=plan.block_size,
            device=opened.device,
            kv_dtype=KV_TYPES[resolved.kv_cache_dtype],
            max_model_len=plan.max_model_len,
            num_host_blocks=0 if measures else swap.num_blocks,
            num_states=num_state_slots(config.max_num_seqs, enable_prefix_caching=config.enable_prefix_caching),
            num_host_states=0 if measures else swap.states.count,
            layout=plan.layout,
            model_impl=resolved.model_impl,
            adapters=Adapters.fit(model, adapters) if adapters else None,
            logits_bytes=logits_limit(plan.device.total),
            checkpoint_scales=opened.kv_scales() if plan.kv_dtype_bytes == 1 else {},
        )
    progress("preparing the layers", 1, 1)
    remedy = f"lower {setting('max_num_batched_tokens')}, {setting('max_num_seqs')} or {_FOR_BLOCKS[plan.device.kind]}"
    if plan.graph_bytes:
        remedy += f", or set {setting('enforce_eager')}"

    def warm_up() -> tuple[MemoryPlan, MeasuredMemory]:
        peak = executor.warmup(plan.max_num_batched_tokens, config.max_num_seqs, plan.max_model_len, progress)
        states = executor.state_bytes if plan.state_bytes else None
        measured = MeasuredMemory(tensor_bytes(model), executor.kv_cache_bytes, peak, states=states)
        if not measures and not config.enforce_eager:
            executor.capture(config.max_num_seqs, plan.max_model_len, progress)
        return _fit(executor, config, plan, measured, swap, progress) if measures else (plan, measured)

    with _within_memory(plan, "computing the largest steps", remedy):
        plan, measured = warm_up()
    return executor, replace(plan, measured=replace(measured, kv=executor.kv_cache_bytes))


def _fit(
    executor: TorchExecutor,
    config: EngineConfig,
    plan: MemoryPlan,
    measured: MeasuredMemory,
    swap: SwapSpace,
    progress: Progress,
) -> tuple[MemoryPlan, MeasuredMemory]:
    """Capture graphs on a warm executor and reserve the KV blocks that fit into the remaining memory.

    Returns the plan with the number of reserved blocks, and the measured memory. Graphs are captured twice: first with
    a few blocks in the cache, to measure the memory of the graphs, and then with all blocks. If the blocks take more
    memory than planned, their number is lowered once.
    """
    rows, chosen = min(config.max_num_seqs, plan.max_num_batched_tokens), config.kv_cache_memory_bytes
    limit = plan.budget_bytes if chosen is None and config.num_gpu_blocks_override is None else plan.device.free
    progress("measuring memory", 0, 1)
    # The driver reports one sum: torch's memory, the CUDA context, and what other programs hold (see the plan).
    context = max(0, executor.used_bytes() - executor.reserved_bytes() - plan.device.used_by_others)
    # What torch keeps after the warm-up, such as workspaces of libraries, was counted with the activations.
    activations = max(plan.activation_bytes, measured.activations or 0)
    kept = executor.reserved_bytes() - measured.weights - plan.adapter_bytes - executor.kv_cache_bytes
    kept -= measured.states or 0
    activations -= min(max(0, kept), activations)
    progress("measuring memory", 1, 1)
    eager = config.enforce_eager or config.expert_offload > 0
    graphs = None if eager else executor.capture(rows, plan.max_model_len, progress)
    captured = executor.used_bytes()
    executor.reserve(executor.num_blocks)
    to_capture = captured - executor.used_bytes()  # the driver may keep a part of the dropped graphs
    measured = replace(measured, context=context, graphs=graphs)
    for attempts_left in (1, 0):
        fitted = refit(plan, config, measured)
        if fitted.problem is not None:
            raise fitted.problem
        try:
            executor.reserve(fitted.num_blocks)
            excess = executor.used_bytes() - plan.device.used_by_others + to_capture + activations - limit
        except Exception as error:
            if not attempts_left or not is_out_of_memory(error):
                raise
            excess = SPARE_BYTES
        if excess <= 0:
            break
        measured = replace(measured, context=context + excess + plan.block_bytes)  # KV is rounded down to blocks
    with _within_memory(plan, "reserving host memory", f"lower {setting('swap_space')}"):
        executor.reserve_host(swap.num_blocks, swap.states.count)
    if graphs is not None:
        again = executor.capture(rows, fitted.max_model_len, progress)
        graphs = again and again._replace(num_bytes=max(graphs.num_bytes, again.num_bytes))
    return fitted, replace(measured, context=context, graphs=graphs)


@contextmanager
def _importing() -> Iterator[None]:
    # The collector would scan again and again the objects that large imports create, and they stay until the end.
    with paused_collection():
        yield
        if not gc.get_freeze_count():
            gc.freeze()
            atexit.register(gc.unfreeze)  # else libraries written in C++ report leaks at exit


@contextmanager
def _within_memory(plan: MemoryPlan, doing: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation inside the `with` block, or a missing C compiler, into a ModelError.

    `doing` names the work that failed, and `remedy` says what to do.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "C compiler" in str(error):
            raise ModelError(
                f"{doing} failed: Triton builds the launchers of GPU kernels with a C compiler and found none; install "
                f"gcc or clang, or set CC to the path of a compiler"
            ) from error
        if not is_out_of_memory(error):
            raise
        parts = {**plan.fixed_parts, "KV": plan.kv_bytes}
        planned = ", ".join(f"{human_bytes(count)} for {part}" for part, count in parts.items())
        raise ModelError(
            f"out of memory while {doing}; planned on {plan.device.name} were {planned}, "
            f"of {human_bytes(plan.budget_bytes)}; {remedy}"
        ) from error


def tensor_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers on its device, counting shared storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    storages = {}
    for tensor in tensors:
        if on_gpu and not tensor.is_cuda:  # experts in host memory
            continue
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
