"""Fit of the constants of profiles/engines.toml to half of the published measurements; prints that file's tables.

Fits, for each engine class, the step, layer and row costs and, for each kind of GPU, the shares that its rows
determine. The result is the most probable values: absolute errors of logarithms, so that outliers do not decide, and a
normal prior on each constant's logarithm against overfitting to few rows. The prior is centred on typical values for
the default class, and on the default class of the file for the others.

So fit the default first, write it to the file, then fit the others. Loads with a request rate make other steps with
other constants: after a change of formulas, do both twice.

`--leave-out source` (or model, gpu, engine) fits all classes to all rows except one source's, and prints the errors on
that source: with the constants of the rows' own class, then with the default's.

python tests/bench/fit_published.py [CLASS ...]       half an hour, mostly to find the steps of the loads
python tests/bench/fit_published.py --leave-out source       an hour
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import numpy as np
import numpy.typing as npt
from published import PublishedRow
from published_lines import read_rows
from published_loads import Steps, published_cost, steps_of

from llmsched.engine.executor.roofline import Roofline
from llmsched.profiles.engines import EngineSpec, engine_spec

Floats = npt.NDArray[np.float64]
Constants = dict[tuple[str, str], float]

ENGINES_FILE = Path(__file__).parents[2] / "profiles" / "engines.toml"

#: Typical values of engines and GPUs: the centre of the default class's prior.
COSTS = {"step_us": 450.0, "layer_us": 42.0, "row_us": 11.0}
SHARES = {"matrix": 0.7, "matrix_fp8": 0.6, "matrix_fp8_block": 0.45, "bandwidth": 0.78, "kv": 0.85, "decode": 0.35}
SHARES |= {"attention": 0.7, "experts": 0.55}
#: Standard deviations of a constant's logarithm in the prior: costs and shares of the default, and of other classes.
SPREADS = {True: (1.0, 0.3), False: (0.5, 0.2)}
#: Standard deviation of a row's logarithm, and the size below which all errors count as equal.
ROW_SPREAD, SMALL = 0.1, 0.02
#: GPUs that differ from others of their architecture and get separate shares in every engine class: in all published
#: results the H20 reads at a third to a half of its bandwidth.
ALONE = ("h20",)
#: Least number of rows for which a kind of GPU gets separate shares.
LEAST_ROWS = 3
#: Relative change from the default below which a share counts as not determined by the rows.
LEAST_CHANGE = 0.01
#: Upper bounds: reads at most at the datasheet's rate, products not much faster than the best ones profiled.
MOST = {"matrix": 0.85, "matrix_fp8": 0.8, "matrix_fp8_block": 0.8, "attention": 1.0}
MOST |= {"bandwidth": 0.95, "kv": 0.95, "decode": 8.0, "experts": 1.0}
#: Shares by the arithmetic of a model's matrices.
MATRICES = {"bf16": "", "fp8": "_fp8", "fp8_block": "_fp8_block"}
#: Groups that --leave-out can leave out.
GROUPS: dict[str, Callable[[PublishedRow], str]] = {
    "source": lambda row: row.source,
    "model": lambda row: row.config.stem.removesuffix("_config"),
    "gpu": lambda row: row.gpu.key,
    "engine": lambda row: row.engine,
}


class ClassFit:
    """Fit of one engine class: `solve` returns the most probable constants, given the `steps` of the class's rows.

    `default` is the table of the default class, the centre of the prior; without it the default class itself is fitted.
    """

    def __init__(self, name: str, steps: Iterable[Steps], default: Mapping[str, Any] | None = None) -> None:
        self.name, self.default = name, default
        steps = list(steps)
        counts = Counter(kind_of(each.row) for each in steps)
        architectures = {kind_of(each.row): each.row.gpu.architecture for each in steps}
        enough = [kind for kind in sorted(counts) if counts[kind] >= LEAST_ROWS]
        self.kinds = [kind for kind in enough if default is None or kind not in ALONE]
        self.steps = [each for each in steps if kind_of(each.row) in enough]
        self.works = {each.row.id: each.row.work() for each in self.steps}
        self.spreads = SPREADS[default is None]
        centre = engine_spec("centre", default or {**COSTS, "on": {"default": SHARES}})
        self.start: Constants = {("costs", key): getattr(centre, f"{key[:-3]}_seconds") * 1e6 for key in COSTS}
        for kind in self.kinds:
            shares = centre.shares.get(kind) or centre.shares.get(architectures[kind]) or centre.shares["default"]
            own = [key for key in SHARES if self._told(kind, key)]
            self.start |= {(kind, key): min(getattr(shares, key), MOST[key]) for key in own}

    def _told(self, kind: str, share: str) -> bool:
        """Tell whether rows of this kind of GPU determine the share."""
        works = [self.works[each.row.id] for each in self.steps if kind_of(each.row) == kind]
        if share == "attention":  # its part of a prefill is too small to tell it from the matrices'
            return False
        if share == "experts":
            return any(work.num_experts for work in works)
        if share.startswith("matrix"):
            return any(share == "matrix" + MATRICES[work.dense.arithmetic] for work in works)
        return True

    def entry(self, constants: Constants) -> dict[str, Any]:
        """Return the table of engines.toml for the constants."""
        costs = {key: constants["costs", key] for key in COSTS}
        on = {kind: {key: value for (k, key), value in constants.items() if k == kind} for kind in self.kinds}
        return {**costs, "on": ({"default": SHARES} if self.default is None else {}) | on}

    def spec(self, constants: Constants) -> EngineSpec:
        """Return the engine class for the constants."""
        return engine_spec(self.name, self.entry(constants), self.default)

    def errors(self, constants: Constants) -> Floats:
        """Return the logarithms of predicted / published: TPOT, throughput, and prefill if it is a single step."""
        spec = self.spec(constants)
        costs = (Roofline(self.works[s.row.id], s.row.gpu, spec, dtype=s.row.dtype) for s in self.steps)
        return np.array([error for s, cost in zip(self.steps, costs, strict=True) for error in errors(s, cost)])

    def solve(self) -> Constants:
        """Find the most probable constants by damped Newton steps on their logarithms (Levenberg-Marquardt).

        Each error is weighted so that squares become absolute values (iteratively reweighted least squares).
        """
        keys = list(self.start)
        centre = np.log([self.start[key] for key in keys])
        most = np.log([MOST.get(name, math.inf) for _, name in keys])
        deviation = np.array([self.spreads[kind != "costs"] for kind, _ in keys])
        found, damping = centre.copy(), 1e-3
        errors = self.errors(self._constants(found))
        least = _loss(errors, (found - centre) / deviation)
        for _ in range(30):
            slopes = np.empty((len(errors), len(keys)))
            for column in range(len(keys)):
                moved = found.copy()
                moved[column] -= 0.01
                slopes[:, column] = (errors - self.errors(self._constants(moved))) / 0.01
            weights = 1 / np.hypot(errors, SMALL) / ROW_SPREAD
            gradient = slopes.T @ (weights * errors) + (found - centre) / deviation**2
            curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(deviation**-2.0)
            free = (found < most - 1e-9) | (gradient > 0)
            before = least
            while damping < 100 and before == least:
                step = np.zeros(len(keys))
                damped = curvature + damping * np.diag(np.diag(curvature))
                step[free] = -np.linalg.solve(damped[np.ix_(free, free)], gradient[free])
                tried = np.minimum(found + np.clip(step, -0.5, 0.5), most)
                others = self.errors(self._constants(tried))
                if (loss := _loss(others, (tried - centre) / deviation)) < least:
                    found, errors, least = tried, others, loss
                damping = damping / 5 if least < before else damping * 5
            if before - least < 1e-4 * before:
                break
        return self._constants(found)

    def _constants(self, logarithms: Floats) -> Constants:
        return dict(zip(self.start, map(float, np.exp(logarithms)), strict=True))


def _loss(errors: Floats, prior: Floats) -> float:
    return float(np.hypot(errors, SMALL).sum() / ROW_SPREAD + (prior**2).sum() / 2)


def kind_of(row: PublishedRow) -> str:
    """Return the name under which engines.toml keeps the shares of a GPU."""
    return row.gpu.key if row.gpu.key in ALONE else row.gpu.architecture


def errors(steps: Steps, cost: Roofline) -> list[float]:
    """Return log(predicted / published) of TPOT and throughput, and of a prefill that has a step to itself."""
    row, found = steps.row, steps.figures(cost)
    pairs = [(found.tpot, row.tpot.seconds)] if row.tpot is not None else []
    pairs += [(found.throughput, row.throughput)] if row.throughput is not None and row.rate == float("inf") else []
    pairs += [(found.ttft, row.ttft)] if row.ttft is not None and (row.static or row.concurrency == 1) else []
    return [math.log(predicted / published) for predicted, published in pairs]


def table(fit: ClassFit, found: Constants) -> str:
    """Format the engine's part of engines.toml, without shares that stayed at the default."""
    lines = []
    for kind in ("costs", *fit.kinds):
        lines.append(f"[{fit.name}]" if kind == "costs" else f"\n[{fit.name}.on.{kind}]")
        own = [(key, value) for (other, key), value in found.items() if other == kind]
        moved = [each for each in own if kind == "costs" or abs(each[1] / fit.start[kind, each[0]] - 1) > LEAST_CHANGE]
        lines += [f"{key} = {float(f'{value:.3g}'):g}" for key, value in moved]
    return "\n".join(lines)


def shipped_default() -> dict[str, Any]:
    """Return the default class's table of engines.toml."""
    table: dict[str, Any] = tomllib.loads(ENGINES_FILE.read_text(encoding="utf-8"))["default"]
    return table


def belongs(row: PublishedRow, name: str) -> bool:
    """Tell whether a row is of this class; the default class has all rows except nim's (older kernels)."""
    return row.engine == name or (name == "default" and row.engine != "nim")


def leave_out(group: Callable[[PublishedRow], str], steps: Sequence[Steps]) -> None:
    """Print the errors on each group's rows of constants fitted to the other groups."""
    all_sizes: dict[str, list[float]] = defaultdict(list)
    for name in dict.fromkeys(group(each.row) for each in steps):
        others = [each for each in steps if group(each.row) != name]
        fit = ClassFit("default", (each for each in others if belongs(each.row, "default")))
        found_default = fit.solve()
        default = fit.entry(found_default)
        specs = {"default": fit.spec(found_default)}
        sizes: dict[str, list[float]] = defaultdict(list)
        for each in (each for each in steps if group(each.row) == name):
            if (engine := each.row.engine) not in specs:
                own = ClassFit(engine, (other for other in others if other.row.engine == engine), default)
                specs[engine] = own.spec(own.solve()) if own.steps else specs["default"]
            for kind, spec in (("own", specs[engine]), ("default", specs["default"])):
                found = each.figures(Roofline(each.row.work(), each.row.gpu, spec, dtype=each.row.dtype))
                if each.row.tpot is not None:
                    sizes[f"{kind} TPOT"].append(abs(found.tpot / each.row.tpot.seconds - 1))
                if each.row.throughput is not None and each.row.rate == float("inf"):
                    sizes[f"{kind} throughput"].append(abs(found.throughput / each.row.throughput - 1))
        print(f"{name:<40} {_spreads(sizes)}", flush=True)
        for what, values in sizes.items():
            all_sizes[what] += values
    print(f"{'all':<40} {_spreads(all_sizes)}", flush=True)


def _spreads(sizes: dict[str, list[float]]) -> str:
    return "   ".join(
        f"{k} {len(v)} rows {np.median(v):.1%} {np.quantile(v, 0.9):.1%}" for k, v in sorted(sizes.items())
    )


def record(rows: Iterable[PublishedRow]) -> list[Steps]:
    """Find the steps of each load. For loads with a request rate they depend on the present constants."""
    return [steps_of(row, published_cost(row)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of engines.toml to published measurements.")
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all, the default class first")
    parser.add_argument("--leave-out", choices=GROUPS, help="print errors on groups left out of the fit")
    asked = parser.parse_args()
    rows = read_rows()
    if asked.leave_out:
        leave_out(GROUPS[asked.leave_out], record(rows))
        return
    for name in asked.classes or ["default", *dict.fromkeys(row.engine for row in rows)]:
        steps = record(row for row in rows if belongs(row, name) and row.fitted)
        fit = ClassFit(name, steps, None if name == "default" else shipped_default())
        found = fit.solve()
        print(f"\n# {len(fit.steps)} rows, {len(found)} constants\n{table(fit, found)}", flush=True)


if __name__ == "__main__":
    main()
