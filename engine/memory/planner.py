"""Memory model: the bytes that a device holds besides KV, and the number of KV blocks that fit in the rest.

    GPU   budget    = min(total x gpu_memory_utilization, total - what other programs hold)
          KV        = budget - weights - adapters - activations - CUDA context - CUDA graphs - recurrent state
    CPU   KV        = min(4 GiB, a quarter of the available memory, what the other parts leave)
    both  blocks    = KV // (block_size x bytes per token that the layers of one group cache)

num_gpu_blocks_override or kv_cache_memory_bytes, if set, determines KV instead.

A sequence of n tokens needs ceil((n - 1) / block_size) blocks: the last token is sampled, but its KV is not computed.
If layers are cached in groups (engine/kv/layout.py), the sequence needs this number of blocks in each full-attention
group, and at most ceil((window - 1) / block_size) + 1 blocks in each sliding-window group. Sequences may use every
block of the pool.

`llmsched kv-budget` prints the plan that results from this model, and `llmsched serve` allocates memory by this plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmsched.engine.architecture.adapter_files import AdapterSizes, adapter_sizes, read_adapters
from llmsched.engine.architecture.config_fields import ConfigCache, read_config_file
from llmsched.engine.architecture.context_limit import UNLIMITED_LENGTH
from llmsched.engine.architecture.dtypes import DTYPE_BYTES, planned_dtype, planned_kv_dtype
from llmsched.engine.architecture.geometry import Geometry
from llmsched.engine.architecture.online_formats import check_quantisable
from llmsched.engine.architecture.quantization import (
    named_format,
    quantised_config,
    settings_of,
    with_quantization_file,
)
from llmsched.engine.architecture.shape import ModelShape, model_shape
from llmsched.engine.architecture.text_part import text_config
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.config import DEFAULT_CPU_KV_BYTES, DEFAULT_TOKEN_BUDGET, EngineConfig, ResolvedConfig
from llmsched.engine.device import CONTEXT_BYTES, DeviceMemory
from llmsched.engine.errors import ConfigError, ModelError, setting
from llmsched.engine.kv.layout import group_layers
from llmsched.engine.kv.recurrent_state import num_state_slots
from llmsched.engine.memory import plan_errors
from llmsched.engine.memory.activation_memory import activation_bytes, logits_limit
from llmsched.engine.memory.expert_offload import plan_offload, smallest_offload
from llmsched.engine.memory.graph_memory import graph_bytes
from llmsched.engine.memory.plan import MeasuredMemory, MemoryPlan
from llmsched.engine.memory.vllm_profile import LIBRARY_BYTES, VllmProfile
from llmsched.engine.model.source import cached_config, fetch_config, locate
from llmsched.engine.model_files import cache_directory
from llmsched.engine.progress import Progress, silent
from llmsched.profiles.shipped_models import shipped_configs

#: Origin of a config.json that is not on this machine but is shipped with llmsched.
SHIPPED = "a copy shipped with llmsched"

#: End of the note on a max_model_len that the plan chose.
_LOWERED = " what the KV memory holds for one request"


def token_budget(config: EngineConfig, kind: str) -> int:
    return config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[kind]


def plan_memory(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceMemory,
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int | None = None,
    profile: VllmProfile | None = None,
    adapters: AdapterSizes | None = None,
) -> MemoryPlan:
    """Return the memory plan of a model on a device. If the model does not fit, the plan's `problem` says why.

    If max_model_len is not set, the plan uses the model's limit, or the longest sequence that fits if that is shorter.
    With `profile`, a plan for a GPU reserves the memory that vLLM reserves besides weights and KV. `adapters` replace
    those of the setting lora. Raises ConfigError for a max_model_len above the model's limit, and ModelError for a
    model that needs neither KV nor recurrent state.
    """
    limit = shape.max_position
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} is beyond the {limit} positions that the model can be served with",
        )
    if not shape.geometry.caches_kv and not shape.geometry.state_bytes_per_seq:
        raise ModelError("the model has neither attention layers nor a recurrent state that is known")
    if config.expert_offload and device.kind == "cpu":
        raise ConfigError("expert_offload", "is for GPUs: on a CPU, experts are in host memory anyway; leave it out")
    kv_bytes = kv_dtype_bytes or dtype_bytes
    adapters = adapters or adapter_sizes(read_adapters(config.lora))
    _check_recurrent(config, shape.geometry, adapters)
    plan_for_context = partial(_plan_for_context, shape, config, device, dtype_bytes, kv_bytes, adapters)
    plan = plan_for_context(config.max_model_len or 0)
    if profile is not None and device.kind == "cuda":
        activations = profile.activation_bytes(
            shape, plan.max_num_batched_tokens, config.most_sampled_rows, dtype_bytes
        )
        plan = replace(plan, activation_bytes=activations, context_bytes=LIBRARY_BYTES, graph_bytes=0)
    elif device.kind == "cpu" and config.max_model_len is None:
        # On a CPU, attention needs memory in proportion to the context, and that leaves less for KV. No context can be
        # longer than that of the first plan, so a second plan for this context reserves enough.
        plan = plan_for_context(_with_kv(plan, config).max_model_len)
    plan = _with_kv(plan, config)
    if plan.problem is None or config.expert_offload or device.kind == "cpu" or profile is not None:
        return plan

    def with_offload(room: int) -> MemoryPlan:
        offloaded = replace(config, expert_offload=room)
        context = config.max_model_len or 0
        return _with_kv(
            _plan_for_context(shape, offloaded, device, dtype_bytes, kv_bytes, adapters, context), offloaded
        )

    room = smallest_offload(shape, lambda room: with_offload(room).fits)
    if room is None:
        return plan
    return replace(plan, problem=plan_errors.or_offload(plan.problem, with_offload(room), room))


def refit(plan: MemoryPlan, config: EngineConfig, measured: MeasuredMemory) -> MemoryPlan:
    """Return a plan in which KV takes the memory that the measured parts leave. Other parts stay as planned.

    For activations, the larger of planned and measured bytes is subtracted, because not every kind of step was
    measured. If the model does not fit, the returned plan has the measured bytes of all parts and a `problem`.
    """
    fixed: dict[str, Any] = {
        "weights_bytes": measured.weights,
        "activation_bytes": max(plan.activation_bytes, measured.activations or 0),
        "context_bytes": plan.context_bytes if measured.context is None else measured.context,
        "graph_bytes": measured.graphs.num_bytes if measured.graphs else 0,
    }
    longest = config.max_model_len or plan.max_position or 0
    notes = tuple(note for note in plan.notes if not note.endswith(_LOWERED))
    fitted = _with_kv(replace(plan, **fixed, max_model_len=longest, notes=notes, problem=None), config)
    if fitted.problem is not None:
        return fitted
    return replace(fitted, **{name: getattr(plan, name) for name in fixed})


def _plan_for_context(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceMemory,
    dtype_bytes: int,
    kv_dtype_bytes: int,
    adapters: AdapterSizes,
    context: int,
) -> MemoryPlan:
    geometry, tokens, on_gpu = shape.geometry, token_budget(config, device.kind), device.kind == "cuda"
    grouping = group_layers(geometry, config.block_size, config.max_model_len or shape.max_position)
    num_states = num_state_slots(config.max_num_seqs, enable_prefix_caching=config.enable_prefix_caching)
    captures = on_gpu and not config.enforce_eager and not config.expert_offload
    offload = plan_offload(shape, config.expert_offload) if config.expert_offload else None
    share = math.floor(device.total * config.gpu_memory_utilization) if on_gpu else device.free
    return MemoryPlan(
        device=device,
        utilisation=config.gpu_memory_utilization,
        budget_bytes=min(share, device.free),
        weights_bytes=shape.weights.count - (offload.saved_bytes if offload else 0),
        adapters=adapters,
        activation_bytes=activation_bytes(
            shape,
            tokens,
            config.most_sampled_rows,
            dtype_bytes,
            kind=device.kind,
            context=context,
            float32_products=not on_gpu and not device.computes_bf16 and dtype_bytes == 2,
            logits_bytes=logits_limit(device.total),
        ),
        context_bytes=CONTEXT_BYTES if on_gpu else 0,
        graph_bytes=graph_bytes(shape, min(config.max_num_seqs, tokens), dtype_bytes, 2 if adapters.count else 1)
        if captures
        else 0,
        state_bytes=(num_states + 1) * geometry.state_bytes_per_seq,  # one for padding rows
        available_kv_bytes=0,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
        layout=grouping.layout,
        block_bytes=config.block_size * grouping.bytes_per_token(kv_dtype_bytes),
        num_blocks=0,
        headroom=config.headroom if config.scheduling_policy == "fair" else 0.0,
        kv_bytes_per_token=geometry.kv_bytes_per_token(kv_dtype_bytes),
        kv_bytes_per_token_window=geometry.kv_bytes_per_token_window(kv_dtype_bytes),
        window=geometry.window,
        state_bytes_per_seq=geometry.state_bytes_per_seq,
        max_position=shape.max_position,
        max_model_len=config.max_model_len or shape.max_position or 0,
        max_num_batched_tokens=tokens,
        max_num_seqs_limit=config.max_num_seqs,
        confidence="exact" if geometry.confidence == "exact" and shape.exact else "estimate",
        notes=tuple(dict.fromkeys((*geometry.notes, *shape.weights.notes, *shape.notes))),
        packed_types=shape.weights.packed_types,
        wide_parts=shape.weights.wide_parts,
        offload=offload,
    )


def _check_recurrent(config: EngineConfig, geometry: Geometry, adapters: AdapterSizes) -> None:
    """Raise ConfigError for a setting that models with recurrent layers do not support."""
    if not geometry.state_bytes_per_seq:
        return
    if adapters.count:
        raise ConfigError("lora", "adapters of models with recurrent layers are not supported; leave it out")
    if config.speculative != "off":
        raise ConfigError(
            "speculative",
            f"{config.speculative} is not supported for models with recurrent layers, whose state cannot take back a "
            "wrong guess; set it to off",
        )


def _with_kv(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Divide the memory left for KV into blocks, and choose max_model_len if the user did not set it."""
    room = plan.device.free - plan.fixed_bytes
    if config.num_gpu_blocks_override is not None:
        wanted = config.num_gpu_blocks_override * plan.block_bytes
    elif config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
    elif plan.device.kind == "cpu":
        wanted = min(DEFAULT_CPU_KV_BYTES, plan.device.free // 4, room)
    else:
        wanted = plan.budget_bytes - plan.fixed_bytes
    available = max(0, min(wanted, room))
    if not plan.block_bytes:  # recurrent layers alone: no sequence needs blocks, and none is too long
        problem = plan_errors.no_room(plan, config) if min(wanted, room) < 0 else None
        longest = plan.max_model_len or UNLIMITED_LENGTH
        return replace(plan, available_kv_bytes=available, max_model_len=longest, problem=problem)
    plan = replace(plan, available_kv_bytes=available, num_blocks=available // plan.block_bytes)
    if wanted > room:
        plan = replace(plan, problem=plan_errors.too_large(plan, config, wanted))
    elif plan.num_blocks < plan.blocks_for(1):
        plan = replace(plan, problem=plan_errors.no_room(plan, config))
    if config.max_model_len is not None:
        if plan.blocks_for(config.max_model_len) > plan.num_blocks:
            return replace(plan, problem=plan.problem or plan_errors.too_long(plan, config))
        return plan
    if plan.longest == 0:
        return plan
    if plan.max_position is None:
        reason = f"the config states no context length; {setting('max_model_len')} is"
    elif plan.blocks_for(plan.max_position) <= plan.num_blocks:
        return plan
    else:
        reason = f"{setting('max_model_len')} is lowered from {plan.max_position} to"
    reason += _LOWERED
    return replace(plan, max_model_len=plan.longest, notes=(*plan.notes, reason))


@dataclass(frozen=True, slots=True)
class ModelPlanner:
    """Planner of one model's memory, for any settings and devices."""

    content: Mapping[str, Any]  # of the model's config.json
    directory: Path | None = None  # of the weight files; None if they are not here
    given: Weights | None = None  # size of the weights, if the user gave it
    cache: ConfigCache | None = None
    name: str = ""
    origin: str = ""  # where `content` was read, for reports
    profile: VllmProfile | None = None  # if given, plans for GPUs are vLLM's
    packed: bool = True  # False if quantised weights count as in the files, as in other engines
    gguf: Path | None = None  # file whose matrices stay quantised
    adapters: AdapterSizes | None = None  # to plan for, instead of those of the setting lora
    _shapes: dict[tuple[object, ...], ModelShape] = field(default_factory=dict, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Hash of `content` as 16 hex digits."""
        text = json.dumps(self.content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def plan(self, config: EngineConfig, device: DeviceMemory) -> MemoryPlan:
        return plan_memory(
            self.shape(config, device),
            config,
            device,
            dtype_bytes=DTYPE_BYTES[self.dtype(config, device)],
            kv_dtype_bytes=DTYPE_BYTES[self.kv_dtype(config, device)],
            profile=self.profile,
            adapters=self.adapters,
        )

    def quantised(self, name: str) -> ModelPlanner:
        """Return the planner of the same model in the quantised format `name`, a key of QUANTIZATIONS.

        Raises ConfigError if the format is unknown or the model is already quantised.
        """
        content = quantised_config(self.content, name)
        cache = self.cache and ConfigCache(content, self.cache.directory)
        return replace(self, content=content, directory=None, gguf=None, cache=cache, _shapes={})

    def resolve(self, config: EngineConfig, device: DeviceMemory) -> tuple[ResolvedConfig, MemoryPlan]:
        """Return the resolved settings and the memory plan. Raises ConfigError if the model does not fit."""
        plan = self.plan(config, device)
        return plan.resolve(config, self.dtype(config, device), self.kv_dtype(config, device)), plan

    def shape(self, config: EngineConfig, device: DeviceMemory) -> ModelShape:
        """Return the sizes of the model. Raises ConfigError for a quantization that the model cannot have."""
        dtype_bytes, rounding = DTYPE_BYTES[self.dtype(config, device)], config.quantization
        packed = self.packed and (self.profile is None or device.kind == "cpu")
        key = (dtype_bytes, packed, rounding)
        if key not in self._shapes:
            weights = self.given
            if rounding is not None:
                check_quantisable(self.content, rounding, gguf=self.gguf is not None and self.directory is None)
            elif weights is None and self.gguf is not None:
                weights = gguf_weights(self.gguf, dtype_bytes)
            content = text_config(self.content) if packed else self.content  # other engines also hold encoders
            cache = self.cache
            if cache is not None and content is not self.content:
                cache = ConfigCache(content, cache.directory)
            given: dict[str, Any] = {"path": self.directory, "weights": weights, "cache": cache}
            given |= {"packed": packed, "rounding": rounding}
            shape = model_shape(content, dtype_bytes=dtype_bytes, **given)
            named = named_format(self.name)
            if named is not None and shape.weights.source == "config" and not settings_of(self.content):
                note = f"the name says {named}, but no file describes quantised weights: they count {dtype_bytes} bytes"
                geometry = replace(shape.geometry, confidence="estimate")  # KV may be quantised as well
                shape = replace(shape, exact=False, geometry=geometry, notes=(*shape.notes, note))
            self._shapes[key] = shape
        return self._shapes[key]

    def dtype(self, config: EngineConfig, device: DeviceMemory) -> str:
        return planned_dtype(config, computes_bf16=device.computes_bf16)

    def kv_dtype(self, config: EngineConfig, device: DeviceMemory) -> str:
        dtype = self.dtype(config, device)
        return planned_kv_dtype(config, dtype, device, checkpoint_fp8=self.shape(config, device).fp8_kv)


def gguf_weights(path: Path, dtype_bytes: int) -> Weights:
    """Return the size of the weights in a .gguf file if its quantised matrices stay quantised."""
    from llmsched.engine.model.gguf_file import read_gguf
    from llmsched.engine.model.gguf_packed import packed_weights

    return packed_weights(read_gguf(path), dtype_bytes)


def model_name(spec: str) -> str:
    """Return the display name of the model `spec`: the name of its directory or file, or its hub id."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return path.resolve().name
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".json", ".gguf") else spec


def open_planner(
    spec: str, progress: Progress = silent, weights: Weights | None = None, quantization: str | None = None
) -> ModelPlanner:
    """Return the planner of the model `spec`: a directory, a config.json, a .gguf file, demo, or a hub id.

    `weights` overrides the size of the weights. If `quantization` (a key of QUANTIZATIONS) is given, the planner plans
    for that format. Raises ModelError for a model that cannot be read, and ConfigError if the quantization is unknown
    or the model is already quantised.
    """
    content, directory, origin = _read_model(spec, progress)
    name = "" if spec.endswith(".gguf") else model_name(spec)
    cache = ConfigCache(content, cache_directory() / "configs")
    gguf = locate(spec, progress).gguf if spec == "demo" or spec.endswith(".gguf") else None
    planner = ModelPlanner(content, directory, weights, cache, name, origin, gguf=gguf)
    return planner if quantization is None else planner.quantised(quantization)


def _read_model(spec: str, progress: Progress) -> tuple[Mapping[str, Any], Path | None, str]:
    """Return the content of config.json, the directory of the weight files (if known), and the content's origin."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir() or path.name == "config.json":
        directory = path if path.is_dir() else path.parent
        content = with_quantization_file(read_config_file(path), directory)
        return content, directory if path.is_dir() else None, str(path)
    if path.suffix == ".json":
        return read_config_file(path), None, str(path)
    if path.suffix == ".gguf":
        from llmsched.engine.model.gguf_config import gguf_settings
        from llmsched.engine.model.gguf_file import read_gguf

        return gguf_settings(read_gguf(locate(spec).path)), None, str(path)
    if path.exists():
        raise ModelError(f"model {spec}: is neither a directory, a config.json nor a .gguf file")
    if spec in shipped_configs() and not cached_config(spec):
        return shipped_configs()[spec], None, SHIPPED
    directory = locate(spec, progress).path if spec == "demo" else fetch_config(spec, progress).parent
    return with_quantization_file(read_config_file(directory), directory), directory, str(directory)
