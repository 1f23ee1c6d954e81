"""JSON documents of kv-budget, in bytes, tokens or blocks. The terminal report shows the same figures."""

from __future__ import annotations

from typing import Any

from llmsched.cli.kv_budget.analysis import BudgetAnalysis, any_fits
from llmsched.cli.options.flags import flag
from llmsched.engine.architecture.geometry import LayerGroup
from llmsched.engine.errors import spell
from llmsched.engine.memory.changes import step_sizes
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.profiles.gpus import GpuSpec

PERCENTILES = (50, 90, 95, 99)
#: Lengths for which capacity is reported besides max_model_len and the mean.
_LENGTHS = (512, 2048, 8192, 32768, 131072)
#: Preemption probabilities for which the largest number of sequences is reported.
RISKS = (0.01, 0.05)
#: Upper limit of the search for the largest number of sequences.
_MOST_SEQS = 1 << 16


def document(analysis: BudgetAnalysis) -> dict[str, Any]:
    plan, mean, longest = analysis.plan, analysis.mean_len, analysis.plan.max_model_len
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
                "served_here": change.servable,
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
        **_attributes(plan, "available_kv_bytes", "max_model_len", "max_num_seqs"),
        "users": analysis.demand.users if analysis.has_demand else None,
        "context": analysis.demand.length(plan) if analysis.has_demand else None,
        "mean_len": mean,
        "max_num_seqs_at_mean_len": None if mean is None else plan.num_seqs_at(mean),
        "max_num_seqs_by_length": [
            {"length": length, "blocks_each": plan.blocks_for(length), "max_num_seqs": plan.num_seqs_at(length)}
            for length in sorted({*(size for size in _LENGTHS if size < longest), mean or longest, longest})
        ],
        "lengths": _concurrency(analysis),
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
        **_attributes(plan, "state_bytes"),
        **_attributes(plan, "kv_bytes", "headroom", "headroom_blocks"),
        "max_num_seqs_admitted": plan.num_admitted_at(plan.max_model_len),
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_num_seqs": plan.max_num_seqs_limit,
    }


def _concurrency(analysis: BudgetAnalysis) -> dict[str, Any] | None:
    """Return how many requests of `analysis.lengths` fit, and the probability that a step preempts a request."""
    plan, lengths = analysis.plan, analysis.lengths
    if lengths is None or not plan.fits or (kept := lengths.within(plan.max_model_len)) is None:
        return None
    from llmsched.engine.memory.concurrency import Occupancy

    occupancy = Occupancy(kept, plan.layout, plan.num_blocks)

    def at(count: int) -> dict[str, Any]:
        return {"max_num_seqs": count, "preemption_probability": occupancy.preemption_probability(count)}

    percentiles = {percent: kept.percentile(percent) for percent in PERCENTILES}
    most = plan.max_num_seqs_limit if plan.state_bytes_per_seq else _MOST_SEQS
    return {
        "source": kept.source,
        "requests": len(kept.prompts),
        "refused": len(lengths.prompts) - len(kept.prompts),
        "mean": kept.mean,
        "cv": kept.variation,
        "percentiles": [
            {"percentile": percent, "length": length} | at(plan.num_seqs_at(length))
            for percent, length in percentiles.items()
        ],
        "at_max_num_seqs": at(plan.max_num_seqs_limit),
        "max_num_seqs_at_preemption_probability": [
            {"preemption_probability": risk, "max_num_seqs": occupancy.most_seqs(risk, most)} for risk in RISKS
        ],
    }


def _group(group: LayerGroup, kv_dtype_bytes: int) -> dict[str, Any]:
    return {
        **_attributes(group, "kind", "layers", "kv_heads", "head_dim_k", "head_dim_v", "index_dim"),
        "bytes_per_token": group.bytes_per_token(kv_dtype_bytes),
        "cached_bytes_per_token": group.cached_bytes_per_token(kv_dtype_bytes),
        "window": group.window,
        "state_bytes_per_seq": group.layers * group.state_bytes,
    }
