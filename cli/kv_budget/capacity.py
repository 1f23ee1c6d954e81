"""Capacity of a memory plan: how many sequences fit, by length, and how likely preemptions are."""

from __future__ import annotations

from typing import Any

from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.engine.memory.plan import MemoryPlan

#: Percentiles of request lengths for which capacity is reported.
_PERCENTILES = (50, 90, 95, 99)
#: Lengths for which capacity is reported besides max_model_len and the mean.
_LENGTHS = (512, 2048, 8192, 32768, 131072)
#: Preemption probabilities for which the largest number of sequences is reported.
_RISKS = (0.01, 0.05)
#: Upper limit of the search for the largest number of sequences.
_MOST_SEQS = 1 << 16


def capacity_by_length(plan: MemoryPlan, mean: int | None) -> list[dict[str, Any]]:
    """Return how many sequences fit, for typical lengths up to max_model_len and for the length `mean`."""
    longest = plan.max_model_len
    return [
        {"length": length, "blocks_each": plan.blocks_for(length), "max_num_seqs": plan.num_seqs_at(length)}
        for length in sorted({*(size for size in _LENGTHS if size < longest), mean or longest, longest})
    ]


def concurrency(analysis: BudgetAnalysis) -> dict[str, Any] | None:
    """Return how many requests with lengths like `analysis.lengths` fit, and how likely a step is to preempt one."""
    plan, lengths = analysis.plan, analysis.lengths
    if lengths is None or not plan.fits or (kept := lengths.within(plan.max_model_len)) is None:
        return None
    from llmsched.engine.memory.concurrency import Occupancy

    occupancy = Occupancy(kept, plan.layout, plan.num_blocks)

    def at(count: int) -> dict[str, Any]:
        return {"max_num_seqs": count, "preemption_probability": occupancy.preemption_probability(count)}

    percentiles = {percent: kept.percentile(percent) for percent in _PERCENTILES}
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
            {"preemption_probability": risk, "max_num_seqs": occupancy.most_seqs(risk, most)} for risk in _RISKS
        ],
    }
