"""An engine that is not built: its memory plan and the cost of its steps, from which load can be simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack, cast

from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.device import DeviceMemory, gpu_device
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.roofline import roofline
from llmsched.engine.executor.simulated import StepCost
from llmsched.engine.kv.draft import ModelDraft
from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.swap import plan_swap
from llmsched.engine.kv.work import model_work
from llmsched.engine.simulation import SimulatedEngine
from llmsched.profiles.gpus import UnknownGpuError, find_gpu

if TYPE_CHECKING:
    from llmsched.engine.config import Device, DType, KVDType


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What `build_engine` would build for `config` (every value is filled in), without model or device.

    `cost` is the time of a step, `swap_seconds` that of copying so many bytes of KV to or from host memory.
    `calibration_error` is the cost's relative error on the device that it was fitted to, `published_error` its median
    one of TPOT against published measurements; None where that is not known.
    """

    config: EngineConfig
    plan: MemoryPlan
    cost: StepCost
    swap_seconds: Callable[[int], float]
    calibration_error: float | None = None
    published_error: float | None = None

    def engine(self, **limits: Unpack[Limits]) -> SimulatedEngine:
        """An engine as it is after its start, with other `limits` if given (see `Engine.reconfigure`)."""
        # Whoever asks for swap space on a machine that is not there has the memory for it.
        swap = plan_swap(self.config.swap_space, self.plan.block_bytes, self.config.swap_space)
        engine = SimulatedEngine(
            self.config,
            self.plan.num_blocks,
            self.cost,
            swap=swap,
            per_swapped_block=self.swap_seconds(self.plan.block_bytes),
        )
        engine.reconfigure(**limits)
        return engine


def gpu_blueprint(draft: ModelDraft, config: EngineConfig, name: str) -> Blueprint:
    """An engine on the GPU of that name; its cost is a roofline.

    Raises ConfigError for an unknown GPU, for settings that it cannot serve, and when the model does not fit.
    """
    try:
        gpu = find_gpu(name)
    except UnknownGpuError as unknown:
        raise ConfigError("--simulate", str(unknown)) from unknown
    if config.device == "cpu":
        raise ConfigError("device", f"cpu is asked for, and {gpu.key} is to be simulated; leave out one of them")
    device = gpu_device(gpu)
    config, plan = resolve(draft, config, device)
    work = model_work(
        draft.content,
        dtype_bytes=plan.dtype_bytes,
        kv_dtype_bytes=plan.kv_dtype_bytes,
        recall=draft.recall,
    )
    cost = roofline(work, gpu, dtype=config.dtype)
    return Blueprint(config, plan, cost, cost.swap_seconds, published_error=cost.error)


def resolve(draft: ModelDraft, config: EngineConfig, device: DeviceMemory) -> tuple[EngineConfig, MemoryPlan]:
    """The settings with every value filled in, and the memory plan. Raises ConfigError if the model does not fit."""
    plan = draft.plan(config, device)
    if plan.problem is not None:
        raise plan.problem
    resolved = replace(
        config,
        device=cast("Device", device.kind),
        dtype=cast("DType", draft.dtype(config, device)),
        kv_cache_dtype=cast("KVDType", draft.kv_dtype(config, device)),
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )
    return resolved, plan
