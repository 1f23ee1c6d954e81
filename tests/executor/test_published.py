"""Shipped constants against a sample of published results that the fit did not use.

tests/bench/bench_published.py has all of them. The bounds are a little above what is reached: a change of formulas or
constants that makes predictions worse fails here.
"""

from __future__ import annotations

from statistics import median, quantiles

from published import PublishedRow
from published_lines import read_rows
from published_loads import Figures, published_cost, steps_of

#: Loads that are simulated in a fraction of a second.
MOST_TOKENS = 20_000
EVERY = 2


def sample() -> list[PublishedRow]:
    """Return every second of the small check rows, in file order."""
    small = [row for row in read_rows() if not row.fitted and row.tpot is not None and _tokens(row) <= MOST_TOKENS]
    return small[::EVERY]


def _tokens(row: PublishedRow) -> float:
    requests = row.num_requests or row.concurrency or 1
    return requests * row.output_len


def predicted(row: PublishedRow) -> Figures:
    cost = published_cost(row)
    return steps_of(row, cost).figures(cost)


def test_constants_predict_what_they_were_not_fitted_to() -> None:
    errors: dict[str, list[float]] = {"tpot": [], "throughput": []}
    rows = sample()
    assert {row.engine for row in rows} >= {"tensorrt-llm-static", "nim", "vllm", "sglang", "lmdeploy"}
    for row in rows:
        found = predicted(row)
        assert row.tpot is not None
        errors["tpot"].append(abs(found.tpot / row.tpot.seconds - 1))
        if row.throughput is not None:
            errors["throughput"].append(abs(found.throughput / row.throughput - 1))
    for name, sizes in errors.items():
        assert len(sizes) >= 30, name
        assert median(sizes) < 0.05, name
        assert quantiles(sizes, n=10)[-1] < 0.2, name
