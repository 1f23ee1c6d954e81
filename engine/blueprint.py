"""An engine that is not built: its memory plan and the cost of its steps, from which load can be simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

from llmsched.engine.architecture.flops import model_flops
from llmsched.engine.config import EngineConfig, Limits, ResolvedConfig
from llmsched.engine.device import DeviceMemory, device_memory, gpu_device
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import StepCost, fitted_cost
from llmsched.engine.executor.roofline import Roofline
from llmsched.engine.kv.swap import plan_swap
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import ModelPlanner, model_name
from llmsched.engine.model.support import refusal
from llmsched.engine.provenance import Provenance
from llmsched.engine.simulated_engine import SimulatedEngine
from llmsched.profiles.calibrated import calibration_name, load_calibration
from llmsched.profiles.engines import find_engine
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.toml_files import ProfileError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What `build_engine` would build for `config` (every value is filled in), without model or device.

    `cost` is the time of a step, `swap_seconds` that of copying so many bytes of KV to or from host memory.
    `provenance` names the device (with the class of engines whose steps are simulated, if not this one) and the errors
    of `cost`. `notes` are warnings for the user.
    """

    config: ResolvedConfig
    plan: MemoryPlan
    cost: StepCost
    swap_seconds: Callable[[int], float]
    provenance: Provenance
    notes: tuple[str, ...] = ()

    def engine(self, **limits: Unpack[Limits]) -> SimulatedEngine:
        """An engine as it is after its start, with other `limits` if given (see `Engine.reconfigure`)."""
        # Whoever asks for swap space on a machine that is not there has the memory for it.
        swap = plan_swap(self.config.swap_space, self.plan.block_bytes, self.config.swap_space)
        engine = SimulatedEngine(
            self.config,
            self.plan.num_blocks,
            self.cost,
            swap=swap,
            layout=self.plan.layout,
            per_swapped_block=self.swap_seconds(self.plan.block_bytes),
        )
        engine.reconfigure(**limits)
        return engine


def gpu_blueprint(planner: ModelPlanner, config: EngineConfig, name: str) -> Blueprint:
    """An engine on the GPU of that name; its cost is a roofline, of this engine ("h100") or of a class that
    profiles/engines.toml knows ("h100:vllm"), whose steps the same scheduler then fills.

    Raises ConfigError for an unknown GPU or class, for settings that it cannot serve, and when the model does not fit.
    """
    gpu_name, colon, engine_name = name.partition(":")
    try:
        gpu, engine = find_gpu(gpu_name), find_engine(engine_name if colon else "default")
    except UnknownNameError as unknown:
        raise ConfigError("simulate", str(unknown)) from unknown
    if config.device == "cpu":
        raise ConfigError("device", f"cpu is asked for, and {gpu.key} is to be simulated; leave out one of them")
    device = gpu_device(gpu)
    resolved, plan = resolve(planner, config, device)
    work = model_flops(
        planner.content,
        dtype_bytes=plan.dtype_bytes,
        kv_dtype_bytes=plan.kv_dtype_bytes,
        cache=planner.cache,
    )
    cost = Roofline(work, gpu, engine, dtype=resolved.dtype)
    where = f"{gpu.name}, steps as of {engine.key}" if colon else gpu.name
    refused = refusal(planner.content, planner.cache)
    notes = () if refused is None else (f"simulated all the same, but serve does not take this model: {refused}",)
    provenance = Provenance(where, measured=False, published_error=cost.error, refused_by_serve=refused)
    return Blueprint(resolved, plan, cost, cost.swap_seconds, provenance, notes)


def local_blueprint(planner: ModelPlanner, config: EngineConfig) -> Blueprint:
    """An engine on this machine's device; its cost was fitted to what `llmsched calibrate` has measured here.

    Raises ConfigError when the model was not calibrated, or does not fit.
    """
    device = device_memory(config.device)
    resolved, plan = resolve(planner, config, device)
    name = calibration_name(model_name(config.model), device.name, resolved.dtype, resolved.kv_cache_dtype)
    remedy = f"run `llmsched calibrate {config.model} --dtype {resolved.dtype}"
    remedy += "`" if resolved.kv_cache_dtype == resolved.dtype else f" --kv-cache-dtype {resolved.kv_cache_dtype}`"
    try:
        found = load_calibration(name)
        cost = None if found is None else fitted_cost(found.cost, plan.window)
    except (ProfileError, TypeError) as problem:
        raise ConfigError("simulate", f"local: {problem}; {remedy}") from problem
    if found is None or cost is None:
        raise ConfigError(
            "simulate",
            f"local: {config.model} in {resolved.dtype} was never measured on {device.name}; {remedy}",
        )
    if found.model["digest"] != planner.digest:
        raise ConfigError(
            "simulate",
            f"local: calibration {name} is of another model of this name; {remedy}",
        )
    per_byte = found.swap_seconds_per_byte
    notes = _threads_differ(found.device.get("threads")) if device.kind == "cpu" else ()
    provenance = Provenance(device.name, measured=False, calibration_error=found.error, calibrated=found.created)
    return Blueprint(resolved, plan, cost, lambda count: count * per_byte, provenance, notes)


def _threads_differ(calibrated: object) -> tuple[str, ...]:
    """A remark if an engine started now would compute with another number of threads than was calibrated."""
    import torch

    if calibrated in (None, present := torch.get_num_threads()):
        return ()
    return (f"calibrated with {calibrated} threads, but torch would use {present} here (OMP_NUM_THREADS)",)


def resolve(planner: ModelPlanner, config: EngineConfig, device: DeviceMemory) -> tuple[ResolvedConfig, MemoryPlan]:
    """The settings with every value filled in, and the memory plan. Raises ConfigError if the model does not fit."""
    plan = planner.plan(config, device)
    if plan.problem is not None:
        raise plan.problem
    return plan.resolve(config, planner.dtype(config, device), planner.kv_dtype(config, device)), plan
