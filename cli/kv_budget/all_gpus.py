"""`--gpu all`: the same question for every listed GPU."""

from __future__ import annotations

from typing import Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import Findings
from llmsched.cli.options.flags import flag
from llmsched.cli.render import human_bytes
from llmsched.engine.errors import spell
from llmsched.profiles.gpus import GpuSpec

Compared = tuple[GpuSpec, Findings]


def as_json(compared: list[Compared]) -> dict[str, Any]:
    """The document of `--gpu all --json`: the model, and a list with one entry for each GPU."""
    first = compared[0][1]
    return {
        "model": first.spec,
        "fits": any(found.fits for _, found in compared),
        "users": first.demand.users if first.asked else None,
        "context": first.demand.context or None,
        "kv_confidence": first.shape.geometry.confidence,
        "gpus": [_gpu_json(spec, found) for spec, found in compared],
    }


def _gpu_json(spec: GpuSpec, found: Findings) -> dict[str, Any]:
    plan = found.plan
    return {
        "gpu": spec.key,
        "name": spec.name,
        "total_bytes": spec.memory,
        "fits": found.fits,
        "problem": None if found.problem is None else spell(found.problem, flag),
        "replicas": found.demand.num_replicas(plan),
        "dtype": found.dtype,
        "kv_cache_dtype": found.kv_dtype,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "weights_bytes": plan.weights_bytes,
        "available_kv_bytes": plan.available_kv_bytes,
        "num_blocks": plan.num_blocks,
        "kv_tokens": plan.num_tokens,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "confidence": plan.confidence,
    }


def show(compared: list[Compared]) -> None:
    """Print the table, the smallest GPU first."""
    first = compared[0][1]
    wanted = f" for {first.demand.users:,} requests" if first.asked else ""
    columns = ("GPU", "memory", "dtype", "KV", "tokens", "max_model_len", "max_num_seqs", "fits", "GPUs needed")
    rows = [_row(spec, found) for spec, found in compared]
    render.table(f"{first.spec}{wanted}", columns, rows)
    smallest = next((spec for spec, found in compared if found.fits), None)
    render.say(f"the smallest that fits: {smallest.name}" if smallest else "none of them fits it")
    for note in first.shape.geometry.notes:
        render.say(f"note: {spell(note, flag)}")


def _row(spec: GpuSpec, found: Findings) -> tuple[str, ...]:
    plan, count = found.plan, found.demand.num_replicas(found.plan)
    kv_type = "" if found.kv_dtype == found.dtype else f", KV {found.kv_dtype}"
    room = (human_bytes(plan.kv_bytes), f"{plan.num_tokens:,}") if plan.num_blocks else ("-", "-")
    return (
        spec.key,
        human_bytes(spec.memory),
        f"{found.dtype}{kv_type}",
        *room,
        f"{plan.max_model_len:,}" if plan.fits else "-",
        f"{plan.max_num_seqs:,}",
        "yes" if found.fits else "no",
        "-" if count is None else f"{count:,}",
    )
