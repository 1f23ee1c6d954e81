"""The JSON documents of kv-budget. Bytes, tokens and blocks; null where something does not apply."""

from __future__ import annotations

from typing import Any

from llmsched.cli.kv_budget.analysis import Concurrency, Findings
from llmsched.cli.options.flags import flag
from llmsched.engine.architecture.geometry import LayerGroup
from llmsched.engine.errors import spell
from llmsched.engine.memory.changes import Change
from llmsched.engine.memory.plan import MemoryPlan


def as_json(found: Findings) -> dict[str, Any]:
    """The document of `--json` for one device."""
    plan, mean = found.plan, found.mean_len
    return {
        "model": found.spec,
        "dtype": found.dtype,
        "kv_cache_dtype": found.kv_dtype,
        "fits": found.fits,
        "problem": None if found.problem is None else spell(found.problem, flag),
        "would_fit": [change_json(change) for change in found.changes],
        "confidence": plan.confidence,
        "kv_confidence": found.shape.geometry.confidence,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_window": plan.kv_bytes_per_token_window,
        "cached_bytes_per_token": found.cached_bytes_per_token,
        "window": plan.window,
        "state_bytes_per_seq": plan.state_bytes_per_seq,
        "block_size": plan.block_size,
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
        "kv_tokens": plan.num_tokens,
        "weights_bytes": plan.weights_bytes,
        "weights_from": found.shape.weights.source,
        "available_kv_bytes": plan.available_kv_bytes,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "users": found.demand.users if found.asked else None,
        "context": (found.demand.context or plan.max_model_len) if found.asked else None,
        "mean_len": mean,
        "max_num_seqs_at_mean_len": None if mean is None else plan.num_seqs_at(mean),
        "lengths": None if found.concurrency is None else _concurrency_json(found.concurrency),
        "max_num_batched_tokens_cost": [_step_json(each, plan) for each in found.step_sizes],
        "groups": [_group_json(group, plan.kv_dtype_bytes) for group in found.shape.geometry.groups],
        "plan": _plan_json(plan),
        "notes": [spell(note, flag) for note in found.notes],
    }


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "device": plan.device.name,
        "device_kind": plan.device.kind,
        "total_bytes": plan.device.total,
        "used_by_others_bytes": plan.device.used_by_others,
        "processes": [{"pid": holder.pid, "name": holder.name, "bytes": holder.used} for holder in plan.device.holders],
        "gpu_memory_utilization": plan.utilisation if plan.device.kind == "cuda" else None,
        "budget_bytes": plan.budget_bytes,
        "weights_bytes": plan.weights_bytes,
        "activation_bytes": plan.activation_bytes,
        "context_bytes": plan.context_bytes,
        "state_bytes": plan.state_bytes,
        "kv_bytes": plan.kv_bytes,
        "headroom": plan.headroom,
        "headroom_blocks": plan.headroom_blocks,
        "max_num_seqs_admitted": plan.num_admitted_at(plan.max_model_len),
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_num_seqs": plan.max_num_seqs_limit,
    }


def change_json(change: Change) -> dict[str, Any]:
    """One of the changes that make it fit."""
    return {
        "change": spell(change.what, flag),
        "cost": spell(change.cost, flag),
        "settings": dict(change.settings),
        "served_here": change.servable,
        "num_blocks": change.plan.num_blocks,
        "max_model_len": change.plan.max_model_len,
        "max_num_seqs": change.plan.max_num_seqs,
    }


def _concurrency_json(found: Concurrency) -> dict[str, Any]:
    return {
        "source": found.lengths.source,
        "requests": len(found.lengths.prompts),
        "refused": found.refused,
        "mean": found.lengths.mean,
        "cv": found.lengths.variation,
        "percentiles": [
            {
                "percentile": row.percentile,
                "length": row.length,
                "max_num_seqs": row.max_num_seqs,
                "preemption_probability": row.preemption_probability,
            }
            for row in found.rows
            if row.percentile is not None
        ],
        "at_max_num_seqs": next(
            {"max_num_seqs": row.max_num_seqs, "preemption_probability": row.preemption_probability}
            for row in found.rows
            if row.percentile is None
        ),
        "max_num_seqs_at_preemption_probability": [
            {"preemption_probability": risk, "max_num_seqs": count} for risk, count in found.safe
        ],
    }


def _step_json(step: MemoryPlan, present: MemoryPlan) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": step.max_num_batched_tokens,
        "activation_bytes": step.activation_bytes,
        "num_blocks": step.num_blocks,
        "blocks_lost": present.num_blocks - step.num_blocks,
        "fits": step.fits,
    }


def _group_json(group: LayerGroup, kv_dtype_bytes: int) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "layers": group.layers,
        "kv_heads": group.kv_heads,
        "head_dim_k": group.head_dim_k,
        "head_dim_v": group.head_dim_v,
        "bytes_per_token": group.bytes_per_token(kv_dtype_bytes),
        "cached_bytes_per_token": group.cached_bytes_per_token(kv_dtype_bytes),
        "window": group.window,
        "state_bytes_per_seq": group.layers * group.state_bytes,
    }
