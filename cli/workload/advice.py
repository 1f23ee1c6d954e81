"""Settings that follow from what a load is like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmsched.cli.workload.prefixes import PrefixFigures
from llmsched.cli.workload.sample import Sample

#: max_model_len is a multiple of this many tokens.
_ROUND = 256

#: The least hit rate for which one would bother.
_WORTH = 0.01

#: Numbers of running requests for which the headroom is worked out; the middle one is recommended.
RUNNING = (16, 64, 256)

#: Standard deviations that a normal distribution exceeds in 1 % of cases.
_Z99 = 2.326


@dataclass(frozen=True, slots=True)
class Advice:
    """`max_model_len` holds every request; `refused_by_half` is the share of requests that half of it would refuse.

    `headroom_by_running` is the share of blocks to keep free, by the number of running requests (see `headroom`); None
    where the lengths of answers are not known. `prefix_caching` None: prompts are not known.
    """

    max_model_len: int
    refused_by_half: float
    headroom_by_running: dict[int, float] | None
    prefix_caching: bool | None


def advise(sample: Sample, prefixes: PrefixFigures | None) -> Advice:
    """What a load asks for. Requests whose answer's length is not stated count with their prompt alone."""
    totals = [given + (answer or 0) for given, answer in zip(sample.inputs, sample.outputs, strict=True)]
    longest = max(1, math.ceil(max(totals) / _ROUND)) * _ROUND
    known = [(given, answer) for given, answer in zip(sample.inputs, sample.outputs, strict=True) if answer]
    return Advice(
        max_model_len=longest,
        refused_by_half=sum(total > longest // 2 for total in totals) / len(totals),
        headroom_by_running={running: headroom(known, running) for running in RUNNING} if known else None,
        prefix_caching=None if prefixes is None else prefixes.hit_rate >= _WORTH,
    )


def headroom(lengths: Sequence[tuple[int, int]], running: int) -> float:
    """The share of a pool to keep free while `running` requests of such (prompt, output) lengths share it.

    Admission knows prompts and expects answers of the mean length. What the answers of independent requests exceed
    that by in 1 % of cases, z sigma sqrt(n) by the normal approximation, is related to what the requests hold.

    Held against simulated runs of all shipped workloads, 16 and 64 running (tests/bench/bench_headroom.py): at most 2
    of 300 requests were preempted, and those served per second were as with the best of six other shares, or up to 3 %
    fewer. With no headroom up to 13 % were preempted, and up to 11 % fewer served.
    """
    outputs = np.asarray(lengths, dtype=np.float64).T[1]
    excess = _Z99 * float(outputs.std()) / (math.sqrt(running) * held(lengths))
    return excess / (1 + excess)


def held(lengths: Sequence[tuple[int, int]]) -> float:
    """Tokens that a running request of such (prompt, output) lengths holds on average.

    One of p prompt and o output tokens is seen for o steps, in which it holds p + o / 2 tokens on average: so it is the
    mean of o (p + o / 2) over requests, divided by the mean of o.
    """
    prompts, outputs = np.asarray(lengths, dtype=np.float64).T
    return float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
