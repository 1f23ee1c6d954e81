"""Remedies for a memory plan that does not meet a demand: changes to settings or hardware."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmsched.engine.architecture.dtypes import DTYPE_BYTES, kv_refusal
from llmsched.engine.architecture.online_formats import rounding_refusal
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.memory.expert_offload import smallest_offload
from llmsched.engine.memory.plan import MAX_ADVISED_UTILISATION, MemoryPlan
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.engine.units import human_bytes

#: Values of max_num_batched_tokens to compare.
STEP_SIZES = tuple(1 << power for power in range(8, 15))
_MIB = 1 << 20

#: Changes to 8 or 4 bits per number, the most bits first: what they cost, and their settings.
_FEWEST_BITS: tuple[tuple[str, dict[str, str]], ...] = (
    ("KV is rounded to 8 bits", {"kv_cache_dtype": "fp8"}),
    ("weights are rounded to 8 bits", {"quantization": "int8"}),
    ("weights and KV are rounded to 8 bits", {"quantization": "int8", "kv_cache_dtype": "fp8"}),
    ("weights are rounded to 4 bits", {"quantization": "int4"}),
    ("weights are rounded to 4 bits and KV to 8 bits", {"quantization": "int4", "kv_cache_dtype": "fp8"}),
)


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Demand for `users` simultaneous requests of `context` tokens (prompt and output; 0 means max_model_len)."""

    users: int = 1
    context: int = 0

    def length(self, plan: MemoryPlan) -> int:
        return self.context or plan.max_model_len

    def num_fitting(self, plan: MemoryPlan) -> int:
        """Return how many requests of the demanded length fit at the same time."""
        return plan.num_seqs_at(self.length(plan)) if plan.fits else 0

    def met_by(self, plan: MemoryPlan) -> bool:
        return self.num_fitting(plan) >= self.users

    def num_replicas(self, plan: MemoryPlan) -> int | None:
        """Return how many devices with this plan are needed, or None if no request fits on one device."""
        fitting = self.num_fitting(plan)
        return -(-self.users // fitting) if fitting else None

    def shortfall(self, plan: MemoryPlan) -> str | None:
        """Return a sentence that says why the plan does not meet the demand, or None if it does."""
        if plan.problem is not None:
            return plan.problem.text(setting)
        if self.met_by(plan):
            return None
        length = self.length(plan)
        each = plan.blocks_for(length)
        need = self.users * each
        return (
            f"{self.users:,} requests of {length:,} tokens need {self.users:,} x {each:,} = {need:,} blocks "
            f"({human_bytes(need * plan.block_bytes)}), there are {plan.num_blocks:,} "
            f"({human_bytes(plan.kv_bytes)}), which hold {plan.num_seqs_at(length):,}"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Change that makes a demand fit or lowers it: `what` to do, its `cost`, and the resulting `plan`."""

    what: str
    cost: str
    plan: MemoryPlan
    #: New values of EngineConfig fields or of "gpu".
    settings: Mapping[str, Any] = field(default_factory=dict)


def changes(
    planner: ModelPlanner,
    config: EngineConfig,
    device: DeviceMemory,
    demand: MemoryDemand,
    gpus: Sequence[tuple[str, DeviceMemory]] = (),
) -> list[Change]:
    """Return changes to settings or hardware with which `demand` fits, and smaller demands that fit.

    The cheapest come roughly first. `gpus` are the names and memory of other GPUs to try.
    """
    search = _Search(planner, config, device, demand)
    exact = [*search.more_memory(), *search.smaller_steps(), *search.fewer_states()]
    found = [*exact, *search.narrower_types(), *([] if exact else search.experts_on_host())]
    if not found:
        found += search.all_settings()
    less, wanted, fitting = search.shorter_context(), demand.length(search.plan), demand.num_fitting(search.plan)
    near = [change for change in less if 2 * change.plan.max_model_len >= wanted]
    replicas = []
    if (count := demand.num_replicas(search.plan) or 1) > 1:
        fewer = Change(f"let {fitting} run at the same time", "the others wait", search.plan, {"max_num_seqs": fitting})
        replicas = [Change(f"run {count} of {device.name}", f"{count} times the hardware", search.plan)]
        less.append(fewer)
        near += [fewer] if 2 * fitting >= demand.users else []
    return [*found, *near, *search.another_gpu(gpus), *replicas, *(change for change in less if change not in near)]


class _Search:
    """Search for changes to one configuration. Each method returns changes that meet the demand.

    Only `shorter_context` lowers the demand instead.
    """

    def __init__(self, planner: ModelPlanner, config: EngineConfig, device: DeviceMemory, demand: MemoryDemand) -> None:
        self.planner = planner
        self.config = config
        self.device = device
        self.demand = demand
        self.plan = planner.plan(config, device)
        #: True if no length was asked for. Then one block is enough, and the plan determines the length.
        self.any_length = config.max_model_len is None and not demand.context
        self.by_utilisation = (
            device.kind == "cuda" and config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None
        )
        self.half = "bfloat16" if device.computes_bf16 else "float16"
        self.fp8 = "fp8" if kv_refusal("fp8", device) is None else "fp8_e5m2"
        self.is_wide = DTYPE_BYTES[planner.dtype(config, device)] > 2
        #: True if the weights can be rounded while they are loaded.
        self.can_round = planner.given is None and planner.gguf is None and rounding_refusal(planner.content) is None

    def more_memory(self) -> list[Change]:
        plan, device = self.plan, self.device
        blocks = self.demand.users * plan.blocks_for(1 if self.any_length else self.demand.length(plan))
        need = blocks * plan.block_bytes
        if self.config.num_gpu_blocks_override is not None:
            return self._try("raise", "", num_gpu_blocks_override=blocks)
        if not self.by_utilisation:
            size = -(-need // _MIB) * _MIB
            cost = f"leaves {human_bytes(device.free - plan.fixed_bytes - size)} of what is free now"
            return self._try("set", cost, kv_cache_memory_bytes=size)
        share = math.ceil(100 * (plan.fixed_bytes + need) / device.total) / 100
        if not plan.utilisation < share <= MAX_ADVISED_UTILISATION:
            return []
        cost = f"leaves {human_bytes(device.total * (1 - share))} of the GPU for everything else"
        return self._try("raise", cost, gpu_memory_utilization=share)

    def smaller_steps(self) -> list[Change]:
        sizes = [size for size in STEP_SIZES if size < self.plan.max_num_batched_tokens]
        return self._largest("max_num_batched_tokens", sizes, "prompts take longer")

    def fewer_states(self) -> list[Change]:
        powers = range((self.plan.max_num_seqs_limit - 1).bit_length() if self.plan.state_bytes_per_seq else 0)
        counts = [1 << power for power in powers if 1 << power >= self.demand.users]
        return self._largest("max_num_seqs", counts, "state is reserved for fewer requests")

    def _largest(self, name: str, values: Sequence[Any], cost: str) -> list[Change]:
        tried = (self._try("lower", cost, **{name: value}) for value in reversed(values))
        return next(filter(None, tried), [])

    def narrower_types(self) -> list[Change]:
        found: list[Change] = []
        kv_bytes = DTYPE_BYTES[self.planner.kv_dtype(self.config, self.device)]
        if kv_bytes > 2:
            found += self._try("set", "KV is rounded to 16 bits", kv_cache_dtype=self.half)
        if self.is_wide:
            found += self._try("set", "weights and KV are rounded to 16 bits", dtype=self.half)
        for cost, settings in _FEWEST_BITS:
            if "kv_cache_dtype" in settings:
                settings = {**settings, "kv_cache_dtype": self.fp8}
            if (kv_bytes > 1 or "quantization" in settings) and (narrow := self._try("set", cost, **settings)):
                return found + narrow
        return found

    def experts_on_host(self) -> list[Change]:
        if self.device.kind == "cpu" or self.config.expert_offload:
            return []
        shape = self.planner.shape(self.config, self.device)
        room = smallest_offload(shape, lambda room: bool(self._try("set", "", expert_offload=room)))
        found = [] if room is None else self._try("set", "", expert_offload=room)
        return [replace(each, cost=_offload_cost(each.plan, self.demand.users)) for each in found]

    def all_settings(self) -> list[Change]:
        steps: dict[str, Any] = {"max_num_batched_tokens": min(STEP_SIZES[0], self.plan.max_num_batched_tokens)}
        if self.is_wide:
            steps["dtype"] = self.half
        settings: dict[str, Any] = {}
        if self.by_utilisation and self.plan.utilisation < MAX_ADVISED_UTILISATION:
            settings["gpu_memory_utilization"] = MAX_ADVISED_UTILISATION
        cost = "less margin, slower prompts, rounding"
        steps["kv_cache_dtype"] = self.fp8
        for name, value in steps.items():
            settings[name] = value
            if found := self._try("set", cost, **settings):
                return found
        return []

    def shorter_context(self) -> list[Change]:
        wanted = self.demand.length(self.plan)
        if self.any_length:
            return []
        context = longest_context(self.planner, self.config, self.device, self.demand.users, below=wanted)
        if context is None:
            return []
        plan = self.planner.plan(replace(self.config, max_model_len=context), self.device)
        what = f"shorten the context to {context:,} tokens"
        return [Change(what, f"instead of {wanted:,}", plan, {"max_model_len": context})]

    def another_gpu(self, gpus: Sequence[tuple[str, DeviceMemory]]) -> list[Change]:
        config = replace(self.config, device="auto", kv_cache_memory_bytes=None, num_gpu_blocks_override=None)
        for name, gpu in sorted(gpus, key=lambda each: each[1].total):
            if self.device.kind == "cuda" and gpu.total <= self.device.total:
                continue
            plan = self.planner.plan(config, gpu)
            if self.demand.met_by(plan):
                return [Change(f"use a GPU like {name}", f"{human_bytes(gpu.total)} of memory", plan, {"gpu": name})]
        return []

    def _try(self, verb: str, cost: str, **settings: Any) -> list[Change]:
        """Return the change to `settings` in a list; the list is empty if the change does not suffice.

        The change's `what` begins with `verb`, such as "raise".
        """
        if "quantization" in settings and not self.can_round:
            return []
        plan = self.planner.plan(replace(self.config, **settings), self.device)
        if not self.demand.met_by(plan):
            return []
        what = " and ".join(f"{setting(name)} to {_shown(name, value)}" for name, value in settings.items())
        return [Change(f"{verb} {what}", cost, plan, settings)]


def _offload_cost(plan: MemoryPlan, users: int) -> str:
    assert plan.offload is not None
    sequences = "1 sequence" if users == 1 else f"{users:,} sequences"
    return f"each decode of {sequences} copies {plan.offload.cost(users, plan.device.name)} of experts to the GPU"


def _shown(name: str, value: Any) -> str:
    if name in ("kv_cache_memory_bytes", "expert_offload"):
        return f"{value // _MIB}MiB"
    return f"{value:.2f}" if name == "gpu_memory_utilization" else str(value)


def longest_context(
    planner: ModelPlanner, config: EngineConfig, device: DeviceMemory, users: int, below: int | None = None
) -> int | None:
    """Return the largest max_model_len below `below` with which `users` sequences fit, or None if no context fits."""
    limit = (
        planner.shape(config, device).max_position or planner.plan(replace(config, max_model_len=1), device).num_tokens
    )
    low, high = 0, min(limit, below - 1) if below else limit
    while low < high:
        tried = (low + high + 1) // 2
        plan = planner.plan(replace(config, max_model_len=tried), device)
        if MemoryDemand(users, tried).met_by(plan):
            low = tried
        else:
            high = tried - 1
    return low or None


def step_sizes(planner: ModelPlanner, config: EngineConfig, device: DeviceMemory) -> list[MemoryPlan]:
    present = planner.plan(config, device).max_num_batched_tokens
    sizes = sorted({present, *STEP_SIZES})
    return [planner.plan(replace(config, max_num_batched_tokens=size), device) for size in sizes]


def config_for_demand(
    config: EngineConfig, given: Mapping[str, Any], users: int | None, context: int | None
) -> EngineConfig:
    """Return `config` with max_num_seqs set to `users` and max_model_len set to `context`.

    A setting that the user has given is not changed. Raises ConfigError if its value is below the demand.
    """
    demands: tuple[tuple[str, str, Any, bool, str], ...] = (
        ("max_model_len", "context", context, config.max_model_len is not None, " tokens"),
        ("max_num_seqs", "users", users, "max_num_seqs" in given, ""),
    )
    for name, field_name, wanted, is_chosen, unit in demands:
        if wanted is not None and not is_chosen:
            config = replace(config, **{name: wanted})
        elif wanted is not None and wanted > (limit := getattr(config, name)):
            raise ConfigError(field_name, f"{wanted}{unit} exceed {setting(name)} {limit}; raise it or leave it out")
    return config
