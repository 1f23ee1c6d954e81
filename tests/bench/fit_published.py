"""Fits the constants of profiles/engines.toml to half of the published measurements, and prints that file's tables.

For each engine class: the step, layer and row costs, and for each kind of GPU the shares that its rows tell something
about. The most probable values are taken: errors of logarithms (absolute, so that outliers do not decide), and a normal
prior of each constant's logarithm around the default, which holds what few rows would otherwise overfit.

Loads at a rate make other steps with other constants: after a change of formulas, fit, write the file, and fit again.

`--leave-out` fits each class to its rows of all sources but one, and prints the errors on that one.

python tests/bench/fit_published.py [CLASS ...]       ten minutes
python tests/bench/fit_published.py --leave-out [CLASS ...]       ten minutes more
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import numpy as np
from published import Row, read_rows
from published_loads import Steps, published_cost, steps_of

from llmsched.engine.executor.roofline import Roofline
from llmsched.profiles.engines import engine_spec

#: Typical engines and GPUs: the centre of the prior.
COSTS = {"step_us": 450.0, "layer_us": 42.0, "row_us": 11.0}
SHARES = {"matrix": 0.7, "matrix_fp8": 0.6, "matrix_fp8_block": 0.45, "bandwidth": 0.78, "kv": 0.85, "decode": 0.35}
SHARES |= {"attention": 0.7, "experts": 0.55}
#: Standard deviation of a constant's logarithm in the prior, for costs and for shares, and of a row's in the data.
COST_SPREAD, SHARE_SPREAD, ROW_SPREAD = 1.0, 0.3, 0.1
#: Rows of a kind of GPU that are enough for shares of its own.
LEAST_ROWS = 3
#: Relative change from the default below which a share counts as not told by the rows.
LEAST_CHANGE = 0.01
#: Nothing reads faster than the datasheet says, or multiplies much faster than the best products that were profiled.
MOST = {"matrix": 0.85, "matrix_fp8": 0.8, "matrix_fp8_block": 0.8, "attention": 1.0}
MOST |= {"bandwidth": 0.95, "kv": 0.95, "decode": 8.0, "experts": 1.0}
#: Shares by the arithmetic of a model's matrices.
MATRICES = {"bf16": "", "fp8": "_fp8", "fp8_block": "_fp8_block"}

Constants = dict[tuple[str, str], float]


def spec_of(constants: Constants) -> dict[str, object]:
    """The table of engines.toml that the constants make."""
    on: dict[str, dict[str, float]] = {"default": dict(SHARES)}
    for (kind, name), value in constants.items():
        if kind != "costs":
            on.setdefault(kind, {})[name] = value
    return {name: constants["costs", name] for name in COSTS} | {"on": on}


class Fit:
    """One engine class: `loss` of constants over the rows that may be fitted to."""

    def __init__(self, name: str, steps: list[Steps]) -> None:
        self.name = name
        fitted = [each for each in steps if each.row.fitted]
        counts = Counter(kind_of(each.row) for each in fitted)
        kinds = sorted(kind for kind, count in counts.items() if count >= LEAST_ROWS)
        self.steps = [each for each in fitted if kind_of(each.row) in kinds]
        self.works = {each.row.id: each.row.work() for each in steps}
        self.start: Constants = {("costs", key): value for key, value in COSTS.items()}
        self.start |= {(kind, key): value for kind in kinds for key, value in SHARES.items() if self._told(kind, key)}

    def _told(self, kind: str, share: str) -> bool:
        """Whether rows of this kind of GPU tell about the share."""
        works = [self.works[each.row.id] for each in self.steps if kind_of(each.row) == kind]
        if share == "attention":  # its part of a prefill is too small to tell it from the matrices'
            return False
        if share == "experts":
            return any(work.num_experts for work in works)
        if share.startswith("matrix"):
            return any(share == "matrix" + MATRICES[work.dense.arithmetic] for work in works)
        return True

    def loss(self, constants: Constants) -> float:
        spec = engine_spec(self.name, spec_of(constants))
        total = 0.0
        for each in self.steps:
            cost = Roofline(self.works[each.row.id], each.row.gpu, spec, dtype=each.row.dtype)
            total += sum(abs(error) for error in errors(each, cost)) / ROW_SPREAD
        for (kind, name), value in constants.items():
            centre, spread = (COSTS[name], COST_SPREAD) if kind == "costs" else (SHARES[name], SHARE_SPREAD)
            total += (math.log(value / centre) / spread) ** 2 / 2
        return total


def kind_of(row: Row) -> str:
    """H20 stands alone: what was measured on it reads at a third of its bandwidth."""
    return "h20" if row.gpu.key == "h20" else row.gpu.architecture


def errors(steps: Steps, cost: Roofline) -> list[float]:
    """Logarithms of predicted / published: of TPOT and throughput, and of the prefill where it is one step alone."""
    row, found = steps.row, steps.figures(cost)
    pairs = [(found.tpot, row.tpot.seconds)] if row.tpot is not None else []
    pairs += [(found.throughput, row.throughput)] if row.throughput is not None and row.rate == float("inf") else []
    pairs += [(found.ttft, row.ttft)] if row.ttft is not None and (row.static or row.concurrency == 1) else []
    return [math.log(predicted / published) for predicted, published in pairs]


def search(loss: Callable[[Constants], float], start: Mapping[tuple[str, str], float]) -> Constants:
    """Coordinate search: each constant up and down by a factor that shrinks until it is 1 %."""
    best, least, factor = dict(start), loss(dict(start)), 1.3
    while factor > 1.01:
        improved = False
        for key in start:
            for tried in (best[key] * factor, best[key] / factor):
                value = min(tried, MOST.get(key[1], tried))
                found = loss(best | {key: value})
                if found < least - 1e-6:
                    best, least, improved = best | {key: value}, found, True
                    break
        if not improved:
            factor = 1 + (factor - 1) / 2
    return best


def record(rows: list[Row]) -> list[Steps]:
    """The steps of each load; where requests come at a rate, those that the constants of now make of it."""
    return [steps_of(row, published_cost(row)) for row in rows]


def table(name: str, found: Constants, start: Constants) -> str:
    """The engine's part of engines.toml; shares that stayed at the default are left out."""
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        lines.append(f"[{name}]" if kind == "costs" else f"\n[{name}.on.{kind}]")
        own = [(key, value) for (other, key), value in found.items() if other == kind]
        moved = [each for each in own if kind == "costs" or abs(each[1] / start[kind, each[0]] - 1) > LEAST_CHANGE]
        lines += [f"{key} = {value:.3g}" for key, value in moved]
    return "\n".join(lines)


def belongs(row: Row, name: str) -> bool:
    """Whether a row is of this class; the default is made of all but those that are unlike the others."""
    return row.engine == name or (name == "default" and row.engine != "nim" and row.gpu.key != "h20")


def leave_out(name: str, steps: list[Steps]) -> None:
    """Errors on each source's rows of constants that were fitted to the others."""
    for source in dict.fromkeys(each.row.source for each in steps):
        fit = Fit(name, [each for each in steps if each.row.source != source])
        spec = engine_spec(name, spec_of(search(fit.loss, fit.start)))
        sizes: dict[str, list[float]] = {"TPOT": [], "throughput": []}
        for each in (each for each in steps if each.row.source == source):
            found = each.figures(Roofline(each.row.work(), each.row.gpu, spec, dtype=each.row.dtype))
            if each.row.tpot is not None:
                sizes["TPOT"].append(abs(found.tpot / each.row.tpot.seconds - 1))
            if each.row.throughput is not None and each.row.rate == float("inf"):
                sizes["throughput"].append(abs(found.throughput / each.row.throughput - 1))
        told = (f"{what} {len(v)} rows {median(v):.1%} {np.quantile(v, 0.9):.1%}" for what, v in sizes.items() if v)
        print(f"{name:<14} {source:<24} " + "   ".join(told), flush=True)


def main() -> None:
    rows = read_rows()
    names = [name for name in sys.argv[1:] if name != "--leave-out"]
    for name in names or ["default", *dict.fromkeys(row.engine for row in rows)]:
        if "--leave-out" in sys.argv:
            leave_out(name, record([row for row in rows if belongs(row, name)]))
            continue
        fit = Fit(name, record([row for row in rows if belongs(row, name) and row.fitted]))
        found = search(fit.loss, fit.start)
        counts = f"{len(fit.steps)} rows, {len(found)} constants"
        print(f"\n# {counts}, loss {fit.loss(fit.start):.1f} -> {fit.loss(found):.1f}")
        print(table(name, found, fit.start), flush=True)


if __name__ == "__main__":
    main()
