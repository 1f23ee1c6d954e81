"""Roofline against published measurements of real GPUs, SIMULATED: the real scheduler serves the load of each row.

The constants are fitted to half of the rows, chosen by a hash of their id (tests/bench/fit_published.py); the other
half are checks. Errors are predicted / published - 1. The README states those of TPOT and throughput. TTFT is for
information: it depends on when the requests of a closed loop arrived, which is rarely published.

Checks that miss by more than 30 %, with the reason as far as the sources tell:

- gpt-oss under SGLang (A100, H100): published at 6 and 37 % of vLLM's figures on the same machine; no load explains it
- 1,000 requests at once (gpustack-qwen3-32b-h100-2, -9, and others in the fitted half): the mean and P99 of TTFT show
  that some 10 seconds passed before the first tokens, which counts against their throughput
- prompts of 32,000 tokens of gpt-oss on an A100: its attention with sinks is much slower there than on an H100
- gpustack-quant-* on an A100: TTFT shows that all 1,000 requests ran at once, so max_num_seqs was not vLLM's default
- SGLang and TensorRT-LLM with prompts of 2,000 and 32,000 tokens (gpustack-qwen3-14b-h100-12, -14, 32b-h100-10): TPOT
  alone; they prefill in steps without decodes, while this scheduler mixes the two
- gpustack-gpt-oss-20b-a100-9, four output tokens for each prompt: TPOT is then the time of three steps full of prefills
- nim with 250 requests of 8,000 tokens: throughput alone; the concurrency is not published

Accuracy on data left out of the fit (fit_published.py --leave-out): for a new source, median errors of 11 % (TPOT and
throughput) and P90 of 39 and 50 %; for a new model, 9 and 10 %, 34 and 46 %. Nine of 16 sources stay under 20 % at P90.
Least accurate: kernels of other versions (fp8 KV in TensorRT-LLM 0.9 and NIM), the H20, Mixtral if only gpt-oss is
known, and gpustack's outliers above.

python tests/bench/bench_published.py [PART OF AN ID ...]       ten minutes on two cores
python tests/bench/bench_published.py --measurements FILE       other results, see tests/support/published_lines.py
python tests/bench/bench_published.py --engine default          with the constants of the default engine class
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import numpy as np
from published import PublishedRow
from published_lines import Refused, read_file, read_rows
from published_loads import Figures, published_cost, steps_of

from llmsched.engine.errors import LlmschedError
from llmsched.profiles.engines import engines


class Prediction(NamedTuple):
    """Row with its predictions; an error is None if the figure was not published."""

    row: PublishedRow
    found: Figures

    @property
    def tpot_error(self) -> float | None:
        return None if self.row.tpot is None else self.found.tpot / self.row.tpot.seconds - 1

    @property
    def throughput_error(self) -> float | None:
        return None if self.row.throughput is None else self.found.throughput / self.row.throughput - 1


def predict(row: PublishedRow, engine: str | None = None) -> Prediction | Refused:
    """Predict a row's figures with `engine` (default: the row's own class), or say why that is impossible."""
    try:
        cost = published_cost(row, engine)
        return Prediction(row, steps_of(row, cost).figures(cost))
    except LlmschedError as problem:
        return Refused(row.id, str(problem))


def line(outcome: Prediction, *, foreign: bool) -> str:
    row, found = outcome
    part = "other" if foreign else "fit" if row.fitted else "check"
    cells = [
        _cell(found.tpot * 1e3, None if row.tpot is None else row.tpot.seconds * 1e3),
        _cell(found.throughput, row.throughput),
        _cell(found.ttft * 1e3, None if row.ttft is None else row.ttft * 1e3),
    ]
    return f"{row.id:<78} {part:<5} " + " ".join(cells)


def _cell(predicted: float, published: float | None) -> str:
    if published is None:
        return f"{'':>28}"
    return f"{predicted:>10.5g} {published:>10.5g} {predicted / published - 1:>+6.0%}"


def summary(name: str, outcomes: list[Prediction]) -> str:
    parts = [
        _spread([outcome.tpot_error for outcome in outcomes]),
        _spread([outcome.throughput_error for outcome in outcomes]),
    ]
    return f"{name:<44} " + "  ".join(parts)


def _spread(errors: list[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return f"{'':>24}"
    return f"{len(sizes):>4} rows {np.median(sizes):>6.1%} {np.quantile(sizes, 0.9):>6.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the roofline with published measurements.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="only rows with one of these in their id")
    parser.add_argument("--measurements", type=Path, metavar="FILE", help="JSON lines of other results")
    parser.add_argument("--engine", choices=list(engines()), help="constants for all rows, whatever engine they are of")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one for each core")
    asked = parser.parse_args()
    try:
        rows, refused = read_file(asked.measurements) if asked.measurements else (read_rows(), [])
    except (OSError, UnicodeDecodeError) as problem:
        parser.error(f"--measurements: {problem}")
    foreign = asked.measurements is not None
    rows = [row for row in rows if any(part in row.id for part in asked.parts or [""])]
    print(f"{'':<84} {'TPOT ms':<29}{'output tokens/s':<29}TTFT ms")
    print(f"{'row':<84} " + f"{'predicted':>10} {'published':>10} {'error':>6} " * 3)
    outcomes: list[Prediction] = []
    with ProcessPoolExecutor(asked.workers) as pool:
        for outcome in pool.map(partial(predict, engine=asked.engine), rows):
            if isinstance(outcome, Refused):
                refused.append(outcome)
                continue
            print(line(outcome, foreign=foreign), flush=True)
            outcomes.append(outcome)
    summarise(outcomes, foreign=foreign)
    if refused:
        print("\nnot predicted:")
        for name, reason in refused:
            print(f"{name}: {reason}")


def summarise(outcomes: Sequence[Prediction], *, foreign: bool) -> None:
    """Print errors by engine and GPU, and the rows that miss. `foreign` rows are never part of the fit."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for outcome in outcomes:
        part = "" if foreign else ": fit" if outcome.row.fitted else ": check"
        for name in ("all", outcome.row.engine, f"{outcome.row.engine} on {outcome.row.gpu.key}"):
            groups[name + part].append(outcome)
    print(f"\n{'absolute errors: median and P90':<44} {'TPOT':<26}throughput")
    for name in sorted(groups):
        print(summary(name, groups[name]))
    print("\nchecks that miss by more than 30 %:")
    for outcome in outcomes:
        errors = [error for error in (outcome.tpot_error, outcome.throughput_error) if error is not None]
        if (foreign or not outcome.row.fitted) and max(map(abs, errors), default=0) > 0.3:
            print(line(outcome, foreign=foreign))


if __name__ == "__main__":
    main()
