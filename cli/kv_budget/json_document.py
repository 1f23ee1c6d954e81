"""JSON documents of kv-budget, in bytes, tokens or blocks. The terminal report shows the same figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmsched.cli.kv_budget.analysis import BudgetAnalysis, any_fits
from llmsched.cli.kv_budget.capacity import capacity_by_length, concurrency
from llmsched.cli.options.flags import flag
from llmsched.engine.architecture.geometry import LayerGroup
from llmsched.engine.errors import spell
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.remedies import step_sizes
from llmsched.profiles.gpus import GpuSpec


def document(analysis: BudgetAnalysis) -> dict[str, Any]:
    plan, mean = analysis.plan, analysis.mean_len
    return {
        "model": analysis.spec,
        "config_from": analysis.planner.origin,
        "dtype": analysis.dtype,
        "kv_cache_dtype": analysis.kv_dtype,
        "fits": analysis.fits,
        "problem": _problem(analysis),
        "would_fit": [
            {
                "change": spell(change.what, flag),
                "cost": spell(change.cost, flag),
                "settings": dict(change.settings),
                **_attributes(change.plan, "num_blocks", "max_model_len", "max_num_seqs"),
            }
            for change in analysis.changes
        ],
        "confidence": plan.confidence,
        "kv_confidence": analysis.shape.geometry.confidence,
        **_attributes(plan, "kv_bytes_per_token", "kv_bytes_per_token_window"),
        "cached_bytes_per_token": plan.layout.num_groups * plan.block_bytes // plan.block_size,
        **_attributes(plan, "window", "state_bytes_per_seq", "block_size", "block_bytes", "num_blocks"),
        "kv_tokens": plan.num_tokens,
        "weights_bytes": plan.weights_bytes,
        "weights_from": analysis.shape.weights.source,
        "expert_offload": None if plan.offload is None else plan.offload._asdict(),
        **_attributes(plan, "available_kv_bytes", "max_model_len", "max_num_seqs"),
        "users": analysis.demand.users if analysis.has_demand else None,
        "context": analysis.demand.length(plan) if analysis.has_demand else None,
        "mean_len": mean,
        "max_num_seqs_at_mean_len": None if mean is None else plan.num_seqs_at(mean),
        "max_num_seqs_by_length": capacity_by_length(plan, mean),
        "lengths": concurrency(analysis),
        "max_num_batched_tokens_cost": [
            {
                **_attributes(step, "max_num_batched_tokens", "activation_bytes", "num_blocks"),
                "blocks_lost": plan.num_blocks - step.num_blocks,
                "fits": None if analysis.shape.weights.doubt else step.fits,
            }
            for step in step_sizes(analysis.planner, analysis.config, analysis.device)
        ],
        "groups": [_group(group, plan.kv_dtype_bytes) for group in analysis.shape.geometry.groups],
        "plan": _plan(plan),
        "notes": [spell(note, flag) for note in analysis.notes()],
    }


def comparison_document(compared: list[tuple[GpuSpec, BudgetAnalysis]]) -> dict[str, Any]:
    first = compared[0][1]
    return {
        "model": first.spec,
        "fits": any_fits(analysis for _, analysis in compared),
        "users": first.demand.users if first.has_demand else None,
        "context": first.demand.context or None,
        "kv_confidence": first.shape.geometry.confidence,
        "gpus": [
            {
                "gpu": spec.key,
                "name": spec.name,
                "total_bytes": spec.memory,
                "fits": analysis.fits,
                "problem": _problem(analysis),
                "replicas": analysis.demand.num_replicas(analysis.plan),
                "dtype": analysis.dtype,
                "kv_cache_dtype": analysis.kv_dtype,
                **_attributes(analysis.plan, "kv_bytes_per_token", "weights_bytes", "available_kv_bytes", "num_blocks"),
                "kv_tokens": analysis.plan.num_tokens,
                **_attributes(analysis.plan, "max_model_len", "max_num_seqs", "confidence"),
            }
            for spec, analysis in compared
        ],
    }


def _attributes(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _problem(analysis: BudgetAnalysis) -> str | None:
    return None if analysis.problem is None else spell(analysis.problem, flag)


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "device": plan.device.name,
        "device_kind": plan.device.kind,
        "total_bytes": plan.device.total,
        "used_by_others_bytes": plan.device.used_by_others,
        "processes": [{"pid": holder.pid, "name": holder.name, "bytes": holder.used} for holder in plan.device.holders],
        "gpu_memory_utilization": plan.utilisation if plan.device.kind == "cuda" else None,
        **_attributes(plan, "budget_bytes", "weights_bytes", "activation_bytes", "context_bytes", "graph_bytes"),
        "adapters": asdict(plan.adapters),
        **_attributes(plan, "state_bytes", "adapter_bytes"),
        **_attributes(plan, "kv_bytes", "headroom", "headroom_blocks"),
        "max_num_seqs_admitted": plan.num_admitted_at(plan.max_model_len),
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_num_seqs": plan.max_num_seqs_limit,
    }


def _group(group: LayerGroup, kv_dtype_bytes: int) -> dict[str, Any]:
    return {
        **_attributes(group, "kind", "layers", "kv_heads", "head_dim_k", "head_dim_v", "index_dim"),
        "bytes_per_token": group.bytes_per_token(kv_dtype_bytes),
        "window": group.window,
        "state_bytes_per_seq": group.layers * group.state_bytes,
    }
