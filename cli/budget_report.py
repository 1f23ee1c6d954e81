"""How a memory plan is told: as text with the formula filled in, or as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmsched.cli import render
from llmsched.cli.options import with_flags
from llmsched.cli.render import human_bytes
from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.budget import ModelShape
from llmsched.engine.kv.geometry import LayerGroup
from llmsched.engine.kv.plan import MemoryPlan

#: Lengths for which capacity is shown besides max_model_len and the mean.
_LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Report:
    """What kv-budget found out. `refusal` is why serve would not take the model at all."""

    spec: str
    dtype: str
    config: EngineConfig
    shape: ModelShape
    plan: MemoryPlan
    mean_len: int | None
    refusal: str | None

    @property
    def notes(self) -> list[str]:
        """The plan's notes and what this engine does differently from the bare arithmetic."""
        plan, notes = self.plan, list(self.plan.notes)
        if plan.kv_bytes_per_token_window:
            saved = human_bytes(plan.kv_bytes_per_token_window)
            notes.append(
                f"one block table serves all layers, so layers with a window of {plan.window} tokens cost {saved} for "
                f"every token of context; freeing what is outside the window would make that {plan.window} tokens"
            )
        expanded = plan.block_bytes // plan.block_size - plan.kv_bytes_per_token - plan.kv_bytes_per_token_window
        if expanded > 0:
            notes.append(
                f"MLA is cached as full keys and values, {human_bytes(plan.block_bytes / plan.block_size)} per token "
                f"instead of the {human_bytes(plan.kv_bytes_per_token)} of its latents"
            )
        if plan.state_bytes:
            notes.append(
                f"recurrent state of {human_bytes(plan.state_bytes_per_seq)} per sequence is reserved for "
                f"{plan.max_num_seqs_limit} sequences (max_num_seqs)"
            )
        if self.config.dtype == "auto" and not plan.device.computes_bf16:
            notes.append(f"dtype auto is {self.dtype}: {plan.device.name} does not compute in bfloat16")
        for holder in plan.device.holders:
            notes.append(f"process {holder.pid} ({holder.name}) holds {human_bytes(holder.used)} on {plan.device.name}")
        if self.refusal:
            notes.append(f"serve does not take it: {self.refusal}")
        return notes


def as_json(report: Report) -> dict[str, Any]:
    """The document of `--json`. Bytes, tokens and blocks; null where something does not apply."""
    plan, mean = report.plan, report.mean_len
    return {
        "model": report.spec,
        "dtype": report.dtype,
        "fits": plan.fits,
        "problem": None if plan.problem is None else with_flags(str(plan.problem)),
        "confidence": plan.confidence,
        "kv_confidence": report.shape.geometry.confidence,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_window": plan.kv_bytes_per_token_window,
        "window": plan.window,
        "state_bytes_per_seq": plan.state_bytes_per_seq,
        "block_size": plan.block_size,
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
        "kv_tokens": plan.num_tokens,
        "weights_bytes": plan.weights_bytes,
        "weights_from": report.shape.weights.source,
        "available_kv_bytes": plan.available_kv_bytes,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "mean_len": mean,
        "max_num_seqs_at_mean_len": None if mean is None else plan.num_seqs_at(mean),
        "groups": [_group_json(group, plan.dtype_bytes) for group in report.shape.geometry.groups],
        "plan": {
            "device": plan.device.name,
            "device_kind": plan.device.kind,
            "total_bytes": plan.device.total,
            "used_by_others_bytes": plan.device.used_by_others,
            "gpu_memory_utilization": plan.utilisation if plan.device.kind == "cuda" else None,
            "budget_bytes": plan.budget_bytes,
            "weights_bytes": plan.weights_bytes,
            "activation_bytes": plan.activation_bytes,
            "context_bytes": plan.context_bytes,
            "state_bytes": plan.state_bytes,
            "kv_bytes": plan.num_blocks * plan.block_bytes,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "max_num_seqs": plan.max_num_seqs_limit,
        },
        "notes": report.notes,
    }


def _group_json(group: LayerGroup, dtype_bytes: int) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "layers": group.layers,
        "kv_heads": group.kv_heads,
        "head_dim_k": group.head_dim_k,
        "head_dim_v": group.head_dim_v,
        "bytes_per_token": group.bytes_per_token(dtype_bytes),
        "cached_bytes_per_token": group.cached_bytes_per_token(dtype_bytes),
        "window": group.window,
        "state_bytes_per_seq": group.layers * group.state_bytes,
    }


def show(report: Report) -> None:
    """Print the report for a person."""
    plan = report.plan
    render.say(f"{report.spec} in {report.dtype} on {plan.device.name} ({plan.confidence})")
    render.say()
    for line in _formula(report):
        render.say(f"  {line}")
    render.say()
    parts = {
        "weights": plan.weights_bytes,
        "activations": plan.activation_bytes,
        "context": plan.context_bytes,
        "state": plan.state_bytes,
        "KV": plan.num_blocks * plan.block_bytes,
        "others": plan.device.used_by_others,
    }
    render.stacked_bar([(name, count) for name, count in parts.items() if count], plan.device.total)
    render.say()
    render.table("Sequences at the same time", ("length", "blocks each", "max_num_seqs"), _capacity(report))
    for note in report.notes:
        render.say(f"note: {note}")
    if plan.problem is not None:
        render.say(f"does not fit: {with_flags(str(plan.problem))}")


def _formula(report: Report) -> list[str]:
    """The arithmetic, each line with its numbers."""
    plan, geometry = report.plan, report.shape.geometry
    per_token = geometry.cached_bytes_per_token(plan.dtype_bytes)
    lines = [_group_line(group, plan.dtype_bytes) for group in geometry.groups]
    lines.append(f"block      {plan.block_size} tokens x {per_token:,} B = {human_bytes(plan.block_bytes)}")
    lines.append(
        f"weights    {human_bytes(plan.weights_bytes)} (from {report.shape.weights.source}), activations "
        f"{human_bytes(plan.activation_bytes)} for steps of {plan.max_num_batched_tokens} tokens, "
        f"{plan.max_num_seqs_limit} sequences"
    )
    lines.append(f"KV memory  {_kv_memory(report)}")
    if plan.num_blocks == 0:
        return lines
    lines.append(
        f"blocks     {human_bytes(plan.available_kv_bytes)} / {human_bytes(plan.block_bytes)} = {plan.num_blocks:,} "
        f"blocks = {plan.num_tokens:,} tokens"
    )
    lines.append(
        f"sequences  {plan.num_blocks:,} blocks / ceil(({plan.max_model_len:,} - 1) / {plan.block_size}) = "
        f"{plan.max_num_seqs:,} of {plan.max_model_len:,} tokens"
    )
    return lines


def _kv_memory(report: Report) -> str:
    """Where the memory for KV comes from."""
    plan, config = report.plan, report.config
    available = human_bytes(plan.available_kv_bytes)
    if config.num_gpu_blocks_override is not None:
        return f"{config.num_gpu_blocks_override} blocks asked for, {available}"
    if config.kv_cache_memory_bytes is not None:
        return f"{human_bytes(config.kv_cache_memory_bytes)} asked for, {available}"
    if plan.device.kind == "cpu":
        return f"min(4 GiB, {human_bytes(plan.device.free)} available / 4) = {available}"
    parts = [
        f"{human_bytes(count)} {name}"
        for name, count in (
            ("weights", plan.weights_bytes),
            ("activations", plan.activation_bytes),
            ("context", plan.context_bytes),
            ("state", plan.state_bytes),
        )
        if count
    ]
    budget = f"{human_bytes(plan.device.total)} x {plan.utilisation:g}"
    if plan.budget_bytes < int(plan.device.total * plan.utilisation):
        budget = f"{human_bytes(plan.budget_bytes)} that others leave"
    return f"{budget} - {' - '.join(parts)} {f'= {available}' if plan.num_blocks else 'leaves nothing'}"


def _group_line(group: LayerGroup, dtype_bytes: int) -> str:
    """What one group costs: its kind, the product, the result."""
    if group.kind == "state":
        total = group.layers * group.state_bytes
        return f"state      {group.layers} layers x {group.state_bytes:,} B = {total:,} B per sequence"
    same = group.head_dim_k == group.head_dim_v
    dims = f"2 x {group.head_dim_k}" if same else f"({group.head_dim_k} + {group.head_dim_v})"
    product = f"{group.layers} layers x {group.kv_heads} KV heads x {dims} x {dtype_bytes} B"
    if group.kind == "mla":
        product = f"{group.layers} layers x {group.head_dim_k} (latent + rope) x {dtype_bytes} B"
    window = f", window {group.window}" if group.window else ""
    return f"{group.kind:9}  {product} = {group.bytes_per_token(dtype_bytes):,} B per token{window}"


def _capacity(report: Report) -> list[tuple[str, str, str]]:
    plan = report.plan
    labels = {length: "" for length in _LENGTHS if length < plan.max_model_len}
    if report.mean_len is not None:
        labels[report.mean_len] = " (mean)"
    labels[plan.max_model_len] = " (max_model_len)"
    return [
        (f"{length:,}{label}", f"{plan.blocks_for(length):,}", f"{plan.num_seqs_at(length):,}")
        for length, label in sorted(labels.items())
    ]
