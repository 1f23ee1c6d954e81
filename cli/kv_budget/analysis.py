"""What kv-budget finds out about one model on one device: the plan, and everything that is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from llmsched.cli.render import human_bytes
from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, gpu_device
from llmsched.engine.errors import setting
from llmsched.engine.kv.layout import group_layers
from llmsched.engine.memory import changes as whatif
from llmsched.engine.memory.changes import Change, MemoryDemand
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.profiles.gpus import gpus

if TYPE_CHECKING:
    from llmsched.engine.memory.concurrency import LengthDistribution

PERCENTILES = (50, 90, 95, 99)
#: Preemption probabilities for which the most sequences are told.
RISKS = (0.01, 0.05)
#: Where the search for the most sequences of a distribution ends.
_MOST_SEQS = 1 << 16


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Sequences that fit if all were as long as a percentile, and how likely so many of the mix do not.

    Without percentile and length: as many as max_num_seqs lets run.
    """

    percentile: int | None
    length: int | None
    max_num_seqs: int
    preemption_probability: float


@dataclass(frozen=True, slots=True)
class Concurrency:
    """What a distribution of lengths means for the pool. `refused` requests beyond max_model_len are left out."""

    lengths: LengthDistribution
    refused: int
    rows: tuple[LengthRow, ...]
    safe: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Findings:
    """`asked` tells whether users or a context were named; `refusal` is why serve would not take the model at all."""

    spec: str
    planner: ModelPlanner
    config: EngineConfig
    device: DeviceMemory
    demand: MemoryDemand = MemoryDemand()
    asked: bool = False
    mean_len: int | None = None
    lengths: LengthDistribution | None = None
    refusal: str | None = None

    @cached_property
    def plan(self) -> MemoryPlan:
        return self.planner.plan(self.config, self.device)

    @cached_property
    def shape(self) -> ModelShape:
        return self.planner.shape(self.config, self.device)

    @property
    def dtype(self) -> str:
        return self.planner.dtype(self.config, self.device)

    @property
    def kv_dtype(self) -> str:
        return self.planner.kv_dtype(self.config, self.device)

    @cached_property
    def problem(self) -> str | None:
        """Why the plan does not serve what was asked for, None if it does."""
        return self.demand.shortfall(self.plan)

    @property
    def fits(self) -> bool:
        return self.problem is None

    @cached_property
    def changes(self) -> list[Change]:
        """What would make it fit, the cheapest first; none where it fits."""
        if self.fits:
            return []
        known = [(spec.key, gpu_device(spec)) for spec in gpus().values()]
        return whatif.changes(self.planner, self.config, self.device, self.demand, known)

    @cached_property
    def step_sizes(self) -> list[MemoryPlan]:
        return whatif.step_sizes(self.planner, self.config, self.device)

    @property
    def cached_bytes_per_token(self) -> int:
        """What one token takes in this engine's blocks, in all groups of layers."""
        return self.plan.layout.num_groups * self.plan.block_bytes // self.plan.block_size

    @cached_property
    def concurrency(self) -> Concurrency | None:
        """The distribution of lengths on this pool; None where none was given or none of it fits."""
        plan = self.plan
        if self.lengths is None or not plan.fits:
            return None
        kept = self.lengths.within(plan.max_model_len)
        if kept is None:
            return None
        from llmsched.engine.memory.concurrency import Occupancy

        occupancy = Occupancy(kept, plan.layout, plan.num_blocks)
        rows = []
        for percentile in PERCENTILES:
            length = kept.percentile(percentile)
            count = plan.num_seqs_at(length)
            rows.append(LengthRow(percentile, length, count, occupancy.preemption_probability(count)))
        limit = plan.max_num_seqs_limit
        rows.append(LengthRow(None, None, limit, occupancy.preemption_probability(limit)))
        most = limit if plan.state_bytes_per_seq else _MOST_SEQS
        safe = tuple((risk, occupancy.most_seqs(risk, most)) for risk in RISKS)
        return Concurrency(kept, len(self.lengths.prompts) - len(kept.prompts), tuple(rows), safe)

    @property
    def notes(self) -> list[str]:
        """The plan's notes and what this engine does differently from the bare arithmetic."""
        plan, notes = self.plan, list(self.plan.notes)
        notes += self._notes_on_layers()
        if plan.state_bytes:
            notes.append(
                f"recurrent state of {human_bytes(plan.state_bytes_per_seq)} per sequence is reserved for "
                f"{plan.max_num_seqs_limit} sequences ({setting('max_num_seqs')})"
            )
        if self.config.dtype == "auto" and not self.device.computes_bf16:
            notes.append(f"dtype auto is {self.dtype}: {self.device.name} does not compute in bfloat16")
        if self.kv_dtype.startswith("fp8"):
            source = "the checkpoint's scales ask for it" if self.config.kv_cache_dtype == "auto" else "as asked for"
            notes.append(
                f"KV in {self.kv_dtype} ({source}) is planned for other engines: serve here takes 16 or 32 bits"
            )
        length = self.demand.context or plan.max_model_len
        admitted = plan.num_admitted_at(length)
        if self.asked and self.fits and admitted < self.demand.users:
            notes.append(
                f"admission keeps {plan.headroom_blocks:,} blocks free for running requests to grow into; of requests "
                f"whose prompts alone are {length:,} tokens, {admitted:,} start at first"
            )
        for holder in plan.device.holders:
            notes.append(f"process {holder.pid} ({holder.name}) holds {human_bytes(holder.used)} on {plan.device.name}")
        if self.refusal:
            notes.append(f"serve does not take it: {self.refusal}")
        return notes

    def _notes_on_layers(self) -> list[str]:
        plan, notes = self.plan, []
        if plan.kv_bytes_per_token_window:
            notes.append(self._note_on_windows())
        cached = self.shape.geometry.cached_bytes_per_token(plan.kv_dtype_bytes)
        if cached > plan.kv_bytes_per_token + plan.kv_bytes_per_token_window:
            notes.append(
                f"MLA is cached as full keys and values, {human_bytes(cached)} per token "
                f"instead of the {human_bytes(plan.kv_bytes_per_token)} of its latents"
            )
        return notes

    def _note_on_windows(self) -> str:
        plan, length = self.plan, self.plan.max_model_len
        held = human_bytes(plan.blocks_for(length) * plan.block_bytes)
        cached = self.shape.geometry.cached_bytes_per_token(plan.kv_dtype_bytes)
        if plan.layout.window_groups:
            kept = -(-length // plan.block_size) * plan.block_size * cached
            return (
                f"layers with a window of {plan.window} tokens give back the blocks that have left it: a sequence of "
                f"{length:,} tokens holds {held}, with all tokens in all layers it would hold {human_bytes(kept)}"
            )
        freed = self.shape.geometry.bytes_with_windows_freed(length, plan.kv_dtype_bytes)
        longest = self.config.max_model_len or self.shape.max_position  # as the plan had it
        reason = group_layers(self.shape.geometry, plan.block_size, longest).reason
        return (
            f"layers with a window of {plan.window} tokens keep all tokens, as {reason}: a sequence of {length:,} "
            f"holds {held}, without what is outside the window it would be {human_bytes(freed)}"
        )
