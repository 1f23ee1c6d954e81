"""Fits the constants of profiles/engines.toml to half of the published measurements, and prints that file's tables.

For each engine class: the step, layer and row costs, and for each kind of GPU the shares that its rows tell something
about. The most probable values are taken: errors of logarithms (absolute, so that outliers do not decide), and a normal
prior of each constant's logarithm, which holds what few rows would otherwise overfit: for the default class around what
is typical, for the others around the default class's of the file.

So fit the default, write it to the file, then fit the others. Loads at a rate make other steps with other constants:
after a change of formulas, do so twice.

`--leave-out` fits each class to its rows of all sources but one, and prints the errors on that one.

python tests/bench/fit_published.py [CLASS ...]       half an hour
python tests/bench/fit_published.py --leave-out [CLASS ...]       longer
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import numpy as np
from published import Row
from published_lines import read_rows
from published_loads import Steps, published_cost, steps_of

from llmsched.engine.executor.roofline import Roofline
from llmsched.profiles.engines import EngineSpec, engine_spec, find_engine

#: What is typical of engines and GPUs: the centre of the default's prior.
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
#: Descents after the first, and the factor up to which they start away from the best.
RESTARTS, JUMP = 4, 1.4
#: Shares by the arithmetic of a model's matrices.
MATRICES = {"bf16": "", "fp8": "_fp8", "fp8_block": "_fp8_block"}

Constants = dict[tuple[str, str], float]


class Prior:
    """The centre of each constant's prior for an engine class."""

    def __init__(self, name: str) -> None:
        default = find_engine("default")
        table = {kind: {key: own[key] for key in SHARES} for kind, own in _shares(default).items()}
        shipped = {key: getattr(default, key.replace("_us", "_seconds")) * 1e6 for key in COSTS}
        self.costs = COSTS if name == "default" else shipped
        self._kinds = {} if name == "default" else table

    def shares(self, kind: str) -> dict[str, float]:
        return self._kinds.get(kind, SHARES)

    def spec(self, name: str, constants: Constants) -> EngineSpec:
        """The engine class that the constants make."""
        kinds = {kind for kind, _ in constants if kind != "costs"}
        own = {kind: {key: value for (other, key), value in constants.items() if other == kind} for kind in kinds}
        on = {"default": SHARES} | {kind: self.shares(kind) | own[kind] for kind in kinds}
        return engine_spec(name, {key: constants["costs", key] for key in COSTS} | {"on": on})


def _shares(engine: EngineSpec) -> dict[str, dict[str, float]]:
    return {kind: asdict(share) for kind, share in engine.shares.items()}


class Fit:
    """One engine class: `loss` of constants over the rows that may be fitted to."""

    def __init__(self, name: str, steps: list[Steps]) -> None:
        self.name = name
        fitted = [each for each in steps if each.row.fitted]
        counts = Counter(kind_of(each.row) for each in fitted)
        kinds = sorted(kind for kind, count in counts.items() if count >= LEAST_ROWS)
        self.steps = [each for each in fitted if kind_of(each.row) in kinds]
        self.works = {each.row.id: each.row.work() for each in steps}
        self.prior = Prior(name)
        self.start: Constants = {("costs", key): value for key, value in self.prior.costs.items()}
        for kind in kinds:
            shares = self.prior.shares(kind)
            self.start |= {(kind, key): value for key, value in shares.items() if self._told(kind, key)}

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
        spec = self.prior.spec(self.name, constants)
        total = 0.0
        for each in self.steps:
            cost = Roofline(self.works[each.row.id], each.row.gpu, spec, dtype=each.row.dtype)
            total += sum(abs(error) for error in errors(each, cost)) / ROW_SPREAD
        for (kind, name), value in constants.items():
            spread = COST_SPREAD if kind == "costs" else SHARE_SPREAD
            total += (math.log(value / self.start[kind, name]) / spread) ** 2 / 2
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


def search(loss: Callable[[Constants], float], start: Constants) -> Constants:
    """The best of several descents, from `start` and from places around the best so far: there are local minima."""
    rng = random.Random(0)
    best = descend(loss, start)
    for _ in range(RESTARTS):
        moved = {key: bounded(key, value * JUMP ** rng.uniform(-1, 1)) for key, value in best.items()}
        best = min(best, descend(loss, moved), key=loss)
    return best


def descend(loss: Callable[[Constants], float], start: Constants) -> Constants:
    """Coordinate search: each constant up and down by a factor that shrinks until it is 1 %."""
    best, least, factor = dict(start), loss(start), 1.3
    while factor > 1.01:
        improved = False
        for key in start:
            for tried in (best[key] * factor, best[key] / factor):
                found = loss(best | {key: bounded(key, tried)})
                if found < least - 1e-6:
                    best, least, improved = best | {key: bounded(key, tried)}, found, True
                    break
        if not improved:
            factor = 1 + (factor - 1) / 2
    return best


def bounded(key: tuple[str, str], value: float) -> float:
    return min(value, MOST.get(key[1], value))


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
        lines += [f"{key} = {float(f'{value:.3g}'):g}" for key, value in moved]
    return "\n".join(lines)


def belongs(row: Row, name: str) -> bool:
    """Whether a row is of this class; the default is made of all but those that are unlike the others."""
    return row.engine == name or (name == "default" and row.engine != "nim" and row.gpu.key != "h20")


def leave_out(name: str, steps: list[Steps]) -> None:
    """Errors on each source's rows of constants that were fitted to the others."""
    for source in dict.fromkeys(each.row.source for each in steps):
        fit = Fit(name, [each for each in steps if each.row.source != source])
        spec = fit.prior.spec(name, search(fit.loss, fit.start))
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
