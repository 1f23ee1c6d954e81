from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from llmsched.cli.render import human_bytes
from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, gpu_device
from llmsched.engine.errors import setting
from llmsched.engine.kv.layout import group_layers
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import SHIPPED, ModelPlanner
from llmsched.engine.memory.remedies import Change, MemoryDemand, changes
from llmsched.profiles.gpus import gpus

if TYPE_CHECKING:
    from llmsched.engine.memory.concurrency import LengthDistribution


@dataclass(frozen=True)
class BudgetAnalysis:
    """Memory plan of a model on one device, compared with the demand of the user."""

    spec: str
    planner: ModelPlanner
    config: EngineConfig
    plan: MemoryPlan
    demand: MemoryDemand
    has_demand: bool  # True if --users or --context was given
    mean_len: int | None  # tokens
    lengths: LengthDistribution | None
    refusal: str | None  # reason why `llmsched serve` refuses the model
    gpu: str | None = None  # name of the GPU in simulations; None: its speed is not known
    quantization: str | None = None

    @property
    def device(self) -> DeviceMemory:
        return self.plan.device

    @cached_property
    def shape(self) -> ModelShape:
        return self.planner.shape(self.config, self.device)

    @property
    def dtype(self) -> str:
        return self.planner.dtype(self.config, self.device)

    @property
    def kv_dtype(self) -> str:
        return self.planner.kv_dtype(self.config, self.device)

    @property
    def problem(self) -> str | None:
        """Reason why the plan does not (or may not) meet the demand; None if the plan meets it."""
        return self.demand.shortfall(self.plan) or self.shape.weights.doubt

    @property
    def fits(self) -> bool | None:
        """True if the plan meets the demand, False if not, None if the size of the weights is too uncertain to tell."""
        if self.demand.shortfall(self.plan) is not None:
            return False
        return True if self.shape.weights.doubt is None else None

    @cached_property
    def changes(self) -> list[Change]:
        """Changes that would make the demand fit, the cheapest first."""
        if self.fits or self.shape.weights.doubt is not None:
            return []
        known = [(spec.key, gpu_device(spec)) for spec in gpus().values()]
        return changes(self.planner, self.config, self.device, self.demand, known)

    def notes(self) -> Iterator[str]:
        plan = self.plan
        if self.planner.origin == SHIPPED:
            yield f"config.json of {self.spec} is {SHIPPED}; the hub was not asked"
        if (profile := self.planner.profile) is not None and self.device.kind == "cuda":
            yield (
                f"planned for vLLM {profile.versions}, whose profile run of {plan.max_num_batched_tokens:,} tokens and "
                f"{plan.max_num_seqs_limit:,} sampled rows takes {human_bytes(plan.activation_bytes)}; a smaller "
                f"{setting('max_num_seqs')} or {setting('max_num_batched_tokens')} leaves more for KV"
            )
        yield from plan.notes
        yield from self._notes_on_layers()
        if plan.state_bytes:
            others = plan.state_bytes // plan.state_bytes_per_seq - plan.max_num_seqs_limit
            yield (
                f"recurrent state of {human_bytes(plan.state_bytes_per_seq)} per sequence is reserved for "
                f"{plan.max_num_seqs_limit} sequences ({setting('max_num_seqs')}), and {others} times for prefixes and "
                "padding"
            )
        if (planned := plan.adapters.count - len(self.config.lora or ())) > 0:
            yield f"`llmsched serve` takes each of the {planned} planned adapters as {setting('lora')} NAME=DIR"
        if self.config.dtype == "auto" and not self.device.computes_bf16:
            yield f"dtype auto is {self.dtype}: {self.device.name} does not compute in bfloat16"
        if self.kv_dtype.startswith("fp8") and self.config.kv_cache_dtype == "auto":
            yield f"{setting('kv_cache_dtype')} auto is {self.kv_dtype}, because the checkpoint has scales for it"
        length = self.demand.length(plan)
        admitted = plan.num_admitted_at(length)
        if self.has_demand and self.fits and admitted < self.demand.users:
            yield (
                f"admission keeps {plan.headroom_blocks:,} blocks free for running requests to grow into; if "
                f"the prompts alone have {length:,} tokens, only {admitted:,} requests start at once"
            )
        for holder in self.device.holders:
            yield f"process {holder.pid} ({holder.name}) holds {human_bytes(holder.used)} on {self.device.name}"
        if self.refusal:
            yield f"llmsched serve does not support it: {self.refusal}"

    def _notes_on_layers(self) -> Iterator[str]:
        plan, geometry, length = self.plan, self.shape.geometry, self.plan.max_model_len
        held = human_bytes(plan.blocks_for(length) * plan.block_bytes)
        if plan.kv_bytes_per_token_window and plan.layout.window_groups:
            kept = -(-length // plan.block_size) * plan.block_size * geometry.bytes_per_token(plan.kv_dtype_bytes)
            yield (
                f"layers with a sliding window of {plan.window} tokens free the blocks outside it: a sequence of "
                f"{length:,} tokens holds {held}; with all tokens in all layers it would hold {human_bytes(kept)}"
            )
        elif plan.kv_bytes_per_token_window:
            longest = self.config.max_model_len or self.shape.max_position  # as in the plan
            reason = group_layers(geometry, plan.block_size, longest).reason
            freed = human_bytes(geometry.bytes_with_windows_freed(length, plan.kv_dtype_bytes))
            yield (
                f"layers with a sliding window of {plan.window} tokens keep all tokens, because {reason}: a sequence "
                f"of {length:,} tokens holds {held}; without the tokens outside the window it would hold {freed}"
            )


def any_fits(analyses: Iterable[BudgetAnalysis]) -> bool | None:
    """Return True if any plan fits, False if none does, None if the answer is unknown."""
    answers = [analysis.fits for analysis in analyses]
    return True if True in answers else None if None in answers else False
