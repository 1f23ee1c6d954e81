"""What else could be done with the memory: which changes would make a demand fit, and what larger steps would cost.

Every answer is a plan that was really made with the change in it, never an estimate beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmsched.engine.architecture.dtypes import DTYPE_BYTES
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.plan_errors import MAX_ADVISED_UTILISATION
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.engine.units import human_bytes

#: Values of max_num_batched_tokens that are compared.
STEP_SIZES = tuple(1 << power for power in range(8, 15))
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Sequences that shall run at the same time, each of up to `context` tokens; 0 tokens: of max_model_len."""

    users: int = 1
    context: int = 0

    def met_by(self, plan: MemoryPlan) -> bool:
        return plan.fits and plan.num_seqs_at(self.context or plan.max_model_len) >= self.users

    def bytes_needed(self, plan: MemoryPlan) -> int:
        """KV that the demand takes."""
        return self.users * plan.blocks_for(self.context or plan.max_model_len) * plan.block_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a demand fit: what to do, what it costs, and the plan that it gives.

    `settings` are knobs of EngineConfig, and `users` or `gpu` where the demand or the hardware changes. `servable` is
    False for what this engine can plan and not do.
    """

    what: str
    cost: str
    plan: MemoryPlan
    settings: Mapping[str, Any] = field(default_factory=dict)
    servable: bool = True


def changes(
    planner: ModelPlanner,
    config: EngineConfig,
    device: DeviceMemory,
    demand: MemoryDemand,
    gpus: Sequence[tuple[str, DeviceMemory]] = (),
) -> list[Change]:
    """The changes that would make `demand` fit, the cheapest first; none where nothing does.

    In this order: settings that cost nothing but margin or prefill speed; narrower types; both together where no single
    one suffices; a context that is shorter, but not by half; another GPU (the smallest of `gpus` that suffices);
    several of the same; and what no longer is what was asked for, fewer users or a context of less than half.
    """
    search = _Search(planner, config, device, demand)
    found = [*search.more_memory(), *search.smaller_steps(), *search.narrower_types()]
    if not found:
        found += search.all_settings()
    shorter, wanted = search.shorter_context(), demand.context or search.plan.max_model_len
    near = [change for change in shorter if 2 * change.plan.max_model_len >= wanted]
    found += [*near, *search.another_gpu(gpus), *search.replicas(), *search.fewer_users()]
    return found + [change for change in shorter if change not in near]


class _Search:
    """Tries changes to one configuration."""

    def __init__(self, planner: ModelPlanner, config: EngineConfig, device: DeviceMemory, demand: MemoryDemand) -> None:
        self.planner = planner
        self.config = config
        self.device = device
        self.demand = demand
        self.plan = planner.plan(config, device)
        #: No length was asked for: whatever holds a block will do, and the length follows.
        self.any_length = config.max_model_len is None and not demand.context
        self.by_utilisation = (
            device.kind == "cuda" and config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None
        )

    def more_memory(self) -> list[Change]:
        """The setting that says how much memory KV gets, raised to what the demand needs."""
        plan, device = self.plan, self.device
        least = self.demand.users * plan.blocks_for(1) * plan.block_bytes
        need = least if self.any_length else self.demand.bytes_needed(plan)
        if self.config.num_gpu_blocks_override is not None:
            blocks = -(-need // plan.block_bytes)
            return self._try(
                f"raise {setting('num_gpu_blocks_override')} to {blocks}", "", num_gpu_blocks_override=blocks
            )
        if not self.by_utilisation:
            size = -(-need // _MIB)
            cost = f"leaves {human_bytes(device.free - plan.fixed_bytes - size * _MIB)} of what is free now"
            return self._try(
                f"set {setting('kv_cache_memory_bytes')} to {size}MiB", cost, kv_cache_memory_bytes=size * _MIB
            )
        share = math.ceil(100 * (plan.fixed_bytes + need) / device.total) / 100
        if not plan.utilisation < share <= MAX_ADVISED_UTILISATION:
            return []
        cost = f"leaves {human_bytes(device.total * (1 - share))} of the GPU for everything else"
        return self._try(
            f"raise {setting('gpu_memory_utilization')} to {share:.2f}", cost, gpu_memory_utilization=share
        )

    def smaller_steps(self) -> list[Change]:
        """The largest power of two of max_num_batched_tokens that suffices."""
        for size in reversed([size for size in STEP_SIZES if size < self.plan.max_num_batched_tokens]):
            what = f"lower {setting('max_num_batched_tokens')} to {size}"
            if found := self._try(what, "prompts take longer", max_num_batched_tokens=size):
                return found
        return []

    def narrower_types(self) -> list[Change]:
        """Half the bytes for weights and KV, or for KV alone."""
        half, found = self._half, []
        kv_bytes = DTYPE_BYTES[self.planner.kv_dtype(self.config, self.device)]
        if kv_bytes > 2:
            found += self._try(
                f"set {setting('kv_cache_dtype')} to {half}", "KV is rounded to 16 bits", kv_cache_dtype=half
            )
        if self._is_wide:
            found += self._try(f"set {setting('dtype')} to {half}", "weights and KV are rounded to 16 bits", dtype=half)
        if kv_bytes > 1:
            cost = "KV is rounded to 8 bits; this engine does not serve it, vLLM and SGLang do"
            found += self._try(f"set {setting('kv_cache_dtype')} to fp8", cost, servable=False, kv_cache_dtype="fp8")
        return found

    def all_settings(self) -> list[Change]:
        """The settings above one after the other, each beside those before it, until they suffice."""
        steps: list[tuple[str, Any]] = [
            ("max_num_batched_tokens", min(STEP_SIZES[0], self.plan.max_num_batched_tokens)),
            ("kv_cache_dtype", "fp8"),
        ]
        if self._is_wide:
            steps.insert(1, ("dtype", self._half))
        settings: dict[str, Any] = {}
        if self.by_utilisation and self.plan.utilisation < MAX_ADVISED_UTILISATION:
            settings["gpu_memory_utilization"] = MAX_ADVISED_UTILISATION
        for name, value in steps:
            settings[name] = value
            what = "set " + " and ".join(f"{setting(knob)} to {value}" for knob, value in settings.items())
            servable = name != "kv_cache_dtype"
            cost = "less margin, slower prompts, rounding" + ("" if servable else "; fp8 KV is not served here")
            if found := self._try(what, cost, servable=servable, **settings):
                return found
        return []

    @property
    def _half(self) -> str:
        """The 16-bit type that the device computes in."""
        return "bfloat16" if self.device.computes_bf16 else "float16"

    @property
    def _is_wide(self) -> bool:
        return DTYPE_BYTES[self.planner.dtype(self.config, self.device)] > 2

    def shorter_context(self) -> list[Change]:
        """The longest context that the users can have."""
        wanted = self.demand.context or self.plan.max_model_len
        if self.any_length:
            return []
        context = longest_context(self.planner, self.config, self.device, self.demand.users, below=wanted)
        if context is None:
            return []
        plan = self.planner.plan(replace(self.config, max_model_len=context), self.device)
        what = f"shorten the context to {context:,} tokens"
        return [Change(what, f"instead of {wanted:,}", plan, {"max_model_len": context})]

    def another_gpu(self, gpus: Sequence[tuple[str, DeviceMemory]]) -> list[Change]:
        """The smallest of the GPUs that suffices."""
        config = replace(self.config, device="auto", kv_cache_memory_bytes=None, num_gpu_blocks_override=None)
        for name, gpu in sorted(gpus, key=lambda each: each[1].total):
            if self.device.kind == "cuda" and gpu.total <= self.device.total:
                continue
            plan = self.planner.plan(config, gpu)
            if self.demand.met_by(plan):
                return [Change(f"use a GPU like {name}", f"{human_bytes(gpu.total)} of memory", plan, {"gpu": name})]
        return []

    def replicas(self) -> list[Change]:
        """Several of the same device."""
        count = replicas(self.plan, self.demand)
        if count is None or count == 1:
            return []
        return [Change(f"run {count} of {self.device.name}", f"{count} times the hardware", self.plan)]

    def fewer_users(self) -> list[Change]:
        """As many users as fit at the whole context."""
        fitting = self.plan.num_seqs_at(self.demand.context or self.plan.max_model_len) if self.plan.fits else 0
        if not 0 < fitting < self.demand.users:
            return []
        return [Change(f"let {fitting} run at the same time", "the others wait", self.plan, {"max_num_seqs": fitting})]

    def _try(self, what: str, cost: str, *, servable: bool = True, **settings: Any) -> list[Change]:
        """The change, if the demand is met with it."""
        plan = self.planner.plan(replace(self.config, **settings), self.device)
        return [Change(what, cost, plan, settings, servable)] if self.demand.met_by(plan) else []


def shortfall(plan: MemoryPlan, demand: MemoryDemand) -> str | None:
    """Why the plan does not meet the demand, with the numbers; None if it does."""
    if plan.problem is not None:
        return plan.problem.text(setting)
    if demand.met_by(plan):
        return None
    length = demand.context or plan.max_model_len
    each = plan.blocks_for(length)
    need = demand.users * each
    return (
        f"{demand.users:,} requests of {length:,} tokens need {demand.users:,} x {each:,} = {need:,} blocks "
        f"({human_bytes(need * plan.block_bytes)}), there are {plan.num_blocks:,} "
        f"({human_bytes(plan.num_blocks * plan.block_bytes)}), which hold {plan.num_seqs_at(length):,}"
    )


def replicas(plan: MemoryPlan, demand: MemoryDemand) -> int | None:
    """Devices like this one that the demand takes together; None where not a single user fits."""
    each = plan.num_seqs_at(demand.context or plan.max_model_len) if plan.fits else 0
    return -(-demand.users // each) if each else None


def longest_context(
    planner: ModelPlanner, config: EngineConfig, device: DeviceMemory, users: int, below: int | None = None
) -> int | None:
    """The longest max_model_len with which `users` sequences of it fit at the same time, None if none does.

    At most the model's limit, and less than `below` where that is given. Found by halving: longer contexts never leave
    room for more sequences.
    """
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
    """Plans with max_num_batched_tokens at each of STEP_SIZES and at its present value."""
    present = planner.plan(config, device).max_num_batched_tokens
    sizes = sorted({present, *STEP_SIZES})
    return [planner.plan(replace(config, max_num_batched_tokens=size), device) for size in sizes]


def asked_for(config: EngineConfig, given: Mapping[str, Any], users: int | None, context: int | None) -> EngineConfig:
    """The settings of a server for `users` requests of `context` tokens; knobs that were `given` stay.

    Raises ConfigError where they contradict the demand.
    """
    if context is not None:
        if (limit := config.max_model_len) is not None and context > limit:
            raise ConfigError(
                "context", f"{context} tokens are beyond {setting('max_model_len')} {limit}; raise it or leave it out"
            )
        if config.max_model_len is None:
            config = replace(config, max_model_len=context)
    if users is not None:
        if "max_num_seqs" not in given:
            return replace(config, max_num_seqs=users)
        if users > config.max_num_seqs:
            raise ConfigError(
                "users", f"{users} are beyond {setting('max_num_seqs')} {config.max_num_seqs}; raise it or leave it out"
            )
    return config
