"""Best headroom for each shipped workload, SIMULATED, and how close the advice of `llmsched workload` comes to it.

The first requests of each workload arrive together. The KV pool holds the intended number of running requests, each
half way through its output. Outputs end by themselves, long before max_tokens, so admission has to estimate their
lengths. One row per headroom (max_headroom is set to the same, which switches adaptation off); "rule" marks the advice.

python tests/bench/bench_headroom.py [REQUESTS]
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from bench_scenarios import BLOCK, SimRun, request

from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.options.load_flags import LoadFlags, make_load
from llmsched.cli.workload.load_analysis import headroom, held
from llmsched.profiles.shipped_workloads import workloads

HEADROOMS = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
RUNNING = (16, 64)
#: Tokens that clients allow an answer, at least.
MAX_TOKENS = 4096


class Piece(NamedTuple):
    """Request of a workload: its prompt, and the number of tokens of its output."""

    prompt: list[int]
    answer: int


def pieces(name: str, count: int) -> list[Piece]:
    load = make_load(LoadFlags(workload=name), {"num_prompts": count, "input_len": 128, "output_len": 128})
    return [Piece(one.prompt.token_ids or [], one.output_len) for one in load.plan(COMMON_IDS)[:count]]


def serve(load: list[Piece], running: int, share: float) -> SimRun:
    most = max(MAX_TOKENS, *(one.answer for one in load))
    requests = [request(f"r{at:05}", one.prompt, 0.0, most, eos=True) for at, one in enumerate(load)]
    longest = max(len(one.prompt) for one in load) + most
    blocks = max(int(running * held(lengths(load)) / BLOCK), -(-longest // BLOCK))
    return SimRun(
        requests,
        blocks,
        {f"r{at:05}": one.answer for at, one in enumerate(load)},
        max_model_len=longest,
        headroom=share,
        max_headroom=share,
        max_num_seqs=4 * running,
    )


def lengths(load: list[Piece]) -> list[tuple[int, int]]:
    return [(len(one.prompt), one.answer) for one in load]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    print("SIMULATED; requests/s of the best row are 100 %\n")
    print("workload               running  headroom      requests/s  preempted  P99 TTFT s  P99 worst gap s")
    for name in workloads():
        load = pieces(name, count)
        for running in RUNNING:
            rule = headroom(lengths(load), running)
            runs = {share: serve(load, running, share) for share in sorted({*HEADROOMS, rule})}
            best = min(run.duration for run in runs.values())
            for share, run in runs.items():
                label = f"{share:.3f}{' rule' if share == rule else ''}"
                ttft = np.percentile([one.ttft for one in run.times], 99)
                gap = np.percentile([max(one.gaps, default=0.0) for one in run.times], 99)
                print(
                    f"{name:<22} {running:>7}  {label:<12} {best / run.duration:>10.1%} {run.preemption_rate:>10.3f} "
                    f"{ttft:>11.1f} {gap:>16.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
