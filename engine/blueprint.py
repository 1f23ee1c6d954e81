"""Blueprints of simulated engines: settings, memory plan and step times, for a GPU or this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

from llmsched.engine.architecture.dtypes import kv_refusal
from llmsched.engine.architecture.flops import model_flops
from llmsched.engine.architecture.quantization import quantised_config
from llmsched.engine.config import EngineConfig, Limits, ResolvedConfig
from llmsched.engine.device import device_memory, gpu_device
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import FittedCost, StepCost
from llmsched.engine.executor.roofline import Roofline
from llmsched.engine.kv.manager import make_kv
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
    """Description of the engine that `build_engine(...)` would build for `config`, made without loading the model."""

    config: ResolvedConfig
    plan: MemoryPlan
    cost: StepCost  # predicts the seconds of a step
    #: Returns the seconds for copying a number of bytes of KV to or from host memory.
    swap_seconds: Callable[[int], float]
    provenance: Provenance  # device, and the error of `cost`
    notes: tuple[str, ...] = ()  # warnings for the user

    def engine(self, **limits: Unpack[Limits]) -> SimulatedEngine:
        # A simulated machine is assumed to have the host memory that swap_space asks for.
        space, per_seq = self.config.swap_space, self.plan.state_bytes_per_seq
        swap = plan_swap(
            space, self.plan.block_bytes, space, state_bytes=per_seq, max_num_seqs=self.config.max_num_seqs
        )
        kv = make_kv(self.config, self.plan.num_blocks, swap, self.plan.layout)
        per_block = self.swap_seconds(self.plan.block_bytes)
        engine = SimulatedEngine(self.config, kv, self.cost, per_swapped_block=per_block)
        engine.reconfigure(**limits)
        return engine


def gpu_blueprint(planner: ModelPlanner, config: EngineConfig, name: str) -> Blueprint:
    """Return the blueprint of an engine on the GPU `name`, with step times from a roofline model.

    With `name` "h100:vllm" instead of "h100", steps take as long as in vLLM. Raises ConfigError for an unknown GPU or
    kind of engine, and for settings or a model that do not suit the GPU.
    """
    gpu_name, colon, engine_name = name.partition(":")
    try:
        gpu, engine = find_gpu(gpu_name), find_engine(engine_name if colon else "default")
    except UnknownNameError as unknown:
        raise ConfigError("simulate", str(unknown)) from unknown
    if config.expert_offload:
        raise ConfigError("expert_offload", "is not simulated; leave it out")
    if config.device == "cpu":
        raise ConfigError("device", f"cpu is requested, but {gpu.key} is to be simulated; leave out one of them")
    device, planner = gpu_device(gpu), replace(planner, packed=not colon)
    resolved, plan = planner.resolve(config, device)
    content, cache = planner.content, planner.cache
    if config.quantization is not None:
        # Weights in fp8 are multiplied in the model's type, as int8 weights are.
        content, cache = quantised_config(content, "int4" if config.quantization == "int4" else "int8"), None
    work = model_flops(
        content,
        dtype_bytes=plan.dtype_bytes,
        kv_dtype_bytes=plan.kv_dtype_bytes,
        cache=cache,
        packed=planner.packed,
    )
    cost = Roofline(work, gpu, engine, dtype=resolved.dtype)
    where = f"{gpu.name}, steps as of {engine.key}" if colon else gpu.name
    refused = refusal(planner.content, planner.cache) or kv_refusal(resolved.kv_cache_dtype, device)
    notes = () if refused is None else (f"simulated, although serve does not support this: {refused}",)
    provenance = Provenance(where, measured=False, published_error=cost.error, refused_by_serve=refused)
    return Blueprint(resolved, plan, cost, cost.swap_seconds, provenance, notes)


def local_blueprint(planner: ModelPlanner, config: EngineConfig) -> Blueprint:
    """Return the blueprint of an engine on this machine's device, with step times measured by `llmsched calibrate`.

    Raises ConfigError if this model was not measured on this device, or if the model does not fit.
    """
    if config.quantization is not None:
        raise ConfigError("quantization", "applies to a simulated GPU; local was calibrated with the model as it is")
    device = device_memory(config.device)
    resolved, plan = planner.resolve(config, device)
    name = calibration_name(model_name(config.model), device.name, resolved.dtype, resolved.kv_cache_dtype)
    remedy = f"run `llmsched calibrate {config.model} --dtype {resolved.dtype}"
    remedy += "`" if resolved.kv_cache_dtype == resolved.dtype else f" --kv-cache-dtype {resolved.kv_cache_dtype}`"

    def unusable(reason: str) -> ConfigError:
        return ConfigError("simulate", f"local: {reason}; {remedy}")

    try:
        found = load_calibration(name)
        if found is None:
            raise unusable(f"{config.model} in {resolved.dtype} was never measured on {device.name}")
        cost = FittedCost(**found.cost, window=plan.window)
    except (ProfileError, TypeError) as problem:
        raise unusable(str(problem)) from problem
    if found.model["digest"] != planner.digest:
        raise unusable(f"calibration {name} belongs to another model of the same name")
    per_byte = found.swap_seconds_per_byte
    notes = []
    if device.kind == "cpu":
        import torch

        calibrated, present = found.device.get("threads"), torch.get_num_threads()
        if calibrated not in (None, present):
            notes = [f"calibrated with {calibrated} threads, but torch would use {present} here (OMP_NUM_THREADS)"]
    provenance = Provenance(device.name, measured=False, calibration_error=found.error, calibrated=found.created)
    return Blueprint(resolved, plan, cost, lambda count: count * per_byte, provenance, tuple(notes))
