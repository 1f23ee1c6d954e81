"""Memory plan of an engine, and its comparison with measured memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from llmsched.engine.architecture.adapter_files import AdapterSizes
from llmsched.engine.architecture.geometry import Confidence
from llmsched.engine.config import EngineConfig, ResolvedConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.expert_offload import ExpertOffload
from llmsched.engine.memory.graph_memory import CapturedGraphs

#: Highest gpu_memory_utilization that messages advise; above it, fragmentation makes running out of memory likely.
MAX_ADVISED_UTILISATION = 0.95


class MemoryParts(NamedTuple):
    """Bytes reserved for each part. `other` is adapters, the CUDA context, CUDA graphs and the recurrent state."""

    weights: int
    activations: int
    other: int
    kv: int


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured bytes of each part of an engine's memory; None if the device does not report the part."""

    weights: int
    kv: int
    activations: int | None = None
    context: int | None = None
    graphs: CapturedGraphs | None = None
    states: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Plan of a device's memory, in bytes."""

    device: DeviceMemory
    utilisation: float
    budget_bytes: int  # for all parts together
    weights_bytes: int
    adapters: AdapterSizes
    activation_bytes: int
    context_bytes: int
    graph_bytes: int
    state_bytes: int  # recurrent states of max_num_seqs_limit sequences, and snapshots of them for the prefix cache
    available_kv_bytes: int  # what the other parts leave for KV
    dtype_bytes: int
    kv_dtype_bytes: int
    layout: KVLayout
    block_bytes: int  # block_size tokens in all layers of one group of `layout`
    num_blocks: int
    headroom: float  # share of blocks that admission leaves free
    kv_bytes_per_token: int  # in full-attention layers
    kv_bytes_per_token_window: int  # in layers that attend only to the last `window` tokens
    window: int | None
    state_bytes_per_seq: int
    max_position: int | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs_limit: int
    confidence: Confidence
    notes: tuple[str, ...] = ()
    problem: ConfigError | None = None  # why the model does not fit
    measured: MeasuredMemory | None = None
    packed_types: tuple[str, ...] = ()
    wide_parts: tuple[str, ...] = ()  # see Weights
    offload: ExpertOffload | None = None  # None: all experts are on the device

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def adapter_bytes(self) -> int:
        return self.adapters.num_bytes(self.dtype_bytes)

    @property
    def fixed_parts(self) -> dict[str, int]:
        parts = {
            "weights": self.weights_bytes,
            "adapters": self.adapter_bytes,
            "activations": self.activation_bytes,
            "CUDA context": self.context_bytes,
            "graphs": self.graph_bytes,
            "recurrent state": self.state_bytes,
        }
        return {name: count for name, count in parts.items() if count}

    @property
    def fixed_bytes(self) -> int:
        return sum(self.fixed_parts.values())

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def parts(self) -> MemoryParts:
        """Bytes of each part. After the engine has started, the weights are measured; all other bytes are planned."""
        weights = self.measured.weights if self.measured else self.weights_bytes
        other = self.adapter_bytes + self.context_bytes + self.graph_bytes + self.state_bytes
        return MemoryParts(weights, self.activation_bytes, other, self.kv_bytes)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens for which KV blocks have room."""
        return self.num_blocks // max(1, self.layout.num_groups) * self.block_size

    @property
    def longest(self) -> int:
        """Length in tokens of the longest sequence that the KV blocks can hold.

        It can exceed `num_tokens`, because layers with a sliding window keep only the last tokens of a sequence.
        """
        return self.layout.longest(self.num_blocks)

    @property
    def max_num_seqs(self) -> int:
        """Number of sequences of max_model_len tokens that fit at the same time."""
        return self.num_seqs_at(self.max_model_len)

    @property
    def headroom_blocks(self) -> int:
        """Number of blocks that admission leaves free so that running sequences can grow."""
        return int(self.headroom * self.num_blocks)

    def resolve(self, config: EngineConfig, dtype: str, kv_dtype: str) -> ResolvedConfig:
        """Return `config` with this plan's choices filled in. Raises the plan's `problem` if it does not fit."""
        if self.problem is not None:
            raise self.problem
        knobs: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
        knobs |= {"device": self.device.kind, "dtype": dtype, "kv_cache_dtype": kv_dtype}
        knobs |= {"max_model_len": self.max_model_len, "max_num_batched_tokens": self.max_num_batched_tokens}
        return ResolvedConfig(**knobs)

    def blocks_for(self, length: int) -> int:
        """Return how many blocks a sequence of `length` tokens (prompt and output) holds when it ends."""
        return self.layout.num_blocks(max(1, length - 1)) if self.block_bytes else 0

    def num_seqs_at(self, length: int) -> int:
        """Return how many sequences of `length` tokens (prompt and output) have room for KV and recurrent state."""
        if not self.block_bytes:
            return self.max_num_seqs_limit if self.fits else 0
        fitting = self.num_blocks // self.blocks_for(length)
        return min(fitting, self.max_num_seqs_limit) if self.state_bytes_per_seq else fitting

    def num_admitted_at(self, length: int) -> int:
        """Return how many requests with prompts of `length` tokens an idle engine can admit at the same time."""
        fitting = self.num_seqs_at(length)
        if not self.block_bytes:
            return fitting
        above = (self.num_blocks - self.headroom_blocks) // self.blocks_for(length)
        return min(fitting, max(1, above), self.max_num_seqs_limit)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Planned and measured bytes of one part of an engine's memory. `actual` is None if it cannot be measured."""

    part: str
    predicted: int
    actual: int | None

    @property
    def ratio(self) -> float | None:
        """Measured bytes divided by planned bytes; None if nothing was measured or nothing was planned."""
        return None if self.actual is None or not self.predicted else self.actual / self.predicted

    @property
    def exceeds(self) -> bool:
        """True if the part takes over 2 % more than planned."""
        return self.ratio is not None and self.ratio > 1.02


def reconcile(plan: MemoryPlan, measured: MeasuredMemory) -> list[Reconciled]:
    """Return planned and measured bytes of weights, activations, KV, recurrent state, CUDA context and graphs."""
    parts = [
        Reconciled("weights", plan.weights_bytes, measured.weights),
        Reconciled("activations", plan.activation_bytes, measured.activations),
        Reconciled("KV", plan.kv_bytes, measured.kv),
    ]
    if plan.state_bytes:
        parts.append(Reconciled("recurrent state", plan.state_bytes, measured.states))
    if plan.context_bytes:
        parts.append(Reconciled("CUDA context", plan.context_bytes, measured.context))
    if plan.graph_bytes:
        parts.append(Reconciled("CUDA graphs", plan.graph_bytes, measured.graphs and measured.graphs.num_bytes))
    return parts


def ratios(plan: MemoryPlan) -> dict[str, float]:
    """Return measured / planned bytes of each part. The keys are names in a profile, such as "kv_ratio".

    Returns {} if no engine has started with the plan.
    """
    if plan.measured is None:
        return {}
    names = {"weights": "weights", "activations": "activations", "KV": "kv"}
    names |= {"CUDA context": "context", "CUDA graphs": "graphs", "recurrent state": "states"}
    parts = reconcile(plan, plan.measured)
    return {f"{names[each.part]}_ratio": round(each.ratio, 4) for each in parts if each.ratio is not None}
