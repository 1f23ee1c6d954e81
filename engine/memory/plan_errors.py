"""Errors for memory plans that do not fit, with changes that would make them fit."""

from __future__ import annotations

import math

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.memory.plan import MAX_ADVISED_UTILISATION, MemoryPlan
from llmsched.engine.units import human_bytes


def no_room(plan: MemoryPlan, config: EngineConfig) -> ConfigError:
    """Return the error for a plan in which weights and other parts leave too little memory for one KV block."""
    blocks = plan.blocks_for(config.max_model_len or 1)
    need = plan.fixed_bytes + blocks * plan.block_bytes
    figures = f"{_parts(plan, blocks * plan.block_bytes)} need {human_bytes(need)}"
    if plan.device.kind == "cpu":
        return ConfigError("model", f"{figures}, {human_bytes(plan.device.free)} is free; {_or(_smaller(plan, need))}")
    budget = f"the budget is {human_bytes(plan.budget_bytes)} ({_budget(plan)})"
    return ConfigError("gpu_memory_utilization", f"{figures}, {budget}; {_or(_more_memory(plan, need))}")


def too_large(plan: MemoryPlan, config: EngineConfig, wanted: int) -> ConfigError:
    """Return the error for a plan with less free memory than the `wanted` bytes of KV."""
    need, free = plan.fixed_bytes + wanted, human_bytes(plan.device.free)
    figures = f"{_parts(plan, wanted)} need {human_bytes(need)}, {free} is free on {plan.device.name}"
    if plan.num_blocks == 0:
        return ConfigError("model", f"{figures}; {_or(_smaller(plan, need))}")
    if config.num_gpu_blocks_override is not None:
        return ConfigError("num_gpu_blocks_override", f"{figures}; use at most {plan.num_blocks}")
    most = f"{plan.available_kv_bytes >> 20}MiB"
    return ConfigError("kv_cache_memory_bytes", f"{figures}; use at most {most}")


def too_long(plan: MemoryPlan, config: EngineConfig) -> ConfigError:
    """Return the error for a plan in which one request of max_model_len tokens does not fit in KV memory."""
    blocks = plan.blocks_for(plan.max_model_len)
    need = blocks * plan.block_bytes
    figures = (
        f"one request of {plan.max_model_len} tokens needs {human_bytes(need)} of KV, "
        f"{human_bytes(plan.available_kv_bytes)} is available"
    )
    remedies = [f"use at most {plan.longest}"]
    if config.num_gpu_blocks_override is not None:
        remedies.append(f"raise {setting('num_gpu_blocks_override')} to at least {blocks}")
    elif config.kv_cache_memory_bytes is not None or plan.device.kind == "cpu":
        if plan.fixed_bytes + need <= plan.device.free:
            remedies.append(f"raise {setting('kv_cache_memory_bytes')} to at least {math.ceil(need / (1 << 20))}MiB")
    else:
        remedies += _more_memory(plan, plan.fixed_bytes + need)
    return ConfigError("max_model_len", f"{figures}; {_or(remedies)}")


def or_offload(problem: ConfigError, plan: MemoryPlan, room: int) -> ConfigError:
    """Return the error with one more remedy: the experts in `room` bytes of host memory, with which `plan` fits."""
    assert plan.offload is not None
    cost = plan.offload.cost(1, plan.device.name)
    remedy = (
        f"set {setting('expert_offload')} to {room >> 20}MiB (a decode of 1 sequence then copies {cost} of experts)"
    )
    return ConfigError(problem.field, f"{problem.message}; or {remedy}")


def _parts(plan: MemoryPlan, kv_bytes: int) -> str:
    return " + ".join(f"{name} {human_bytes(count)}" for name, count in (*plan.fixed_parts.items(), ("KV", kv_bytes)))


def _budget(plan: MemoryPlan) -> str:
    share = f"{plan.utilisation:g} of {human_bytes(plan.device.total)}"
    if plan.budget_bytes < math.floor(plan.device.total * plan.utilisation):
        return f"{share}, but other programs hold {human_bytes(plan.device.used_by_others)}"
    return share


def _more_memory(plan: MemoryPlan, need: int) -> list[str]:
    device = plan.device
    utilisation = math.ceil(100 * need / device.total) / 100
    remedies = []
    if utilisation <= MAX_ADVISED_UTILISATION:
        if utilisation > plan.utilisation:
            remedies.append(f"raise {setting('gpu_memory_utilization')} to at least {utilisation:.2f}")
        if need > device.free:
            names = ", ".join(f"{holder.name} {holder.pid}" for holder in device.holders)
            remedies.append(f"free memory that other programs hold{f' ({names})' if names else ''}")
        return [" and ".join(remedies)]
    room = MAX_ADVISED_UTILISATION * device.total - (need - plan.activation_bytes)
    if room > 0:
        remedies.append(f"lower {setting('max_num_batched_tokens')} and {setting('max_num_seqs')}")
    remedies += _smaller(plan, need)
    remedies[-1] += f" or a GPU with at least {human_bytes(need / MAX_ADVISED_UTILISATION)}"
    return remedies


def _smaller(plan: MemoryPlan, need: int) -> list[str]:
    device = plan.device
    room = device.free if device.kind == "cpu" else min(device.free, MAX_ADVISED_UTILISATION * device.total)
    unscaled = plan.context_bytes + plan.graph_bytes + plan.state_bytes
    if plan.dtype_bytes > 2 and unscaled + (need - unscaled) / 2 <= room:
        return [f"set {setting('dtype')} to {'bfloat16' if device.computes_bf16 else 'float16'}", "use a smaller model"]
    return ["use a smaller model"]


def _or(remedies: list[str]) -> str:
    return remedies[0] if len(remedies) == 1 else f"{', '.join(remedies[:-1])} or {remedies[-1]}"
