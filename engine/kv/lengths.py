"""How long requests are: from a trace, a list of lengths, or a mean and its coefficient of variation."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsched.engine.errors import ConfigError

Counts = npt.NDArray[np.int64]

#: Names of columns and keys: Azure's traces, Mooncake's, Vidur's, OpenAI's usage, benchmarks'.
_PROMPT = ("ContextTokens", "input_length", "num_prefill_tokens", "prompt_tokens", "prompt_len", "input_len")
_OUTPUT = ("GeneratedTokens", "output_length", "num_decode_tokens", "completion_tokens", "output_tokens", "output_len")
_TOTAL = ("total_tokens", "num_total_tokens", "length", "tokens")
_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request. Where prompts and outputs are not told apart, `outputs` is None and `prompts` all."""

    source: str
    prompts: Counts
    outputs: Counts | None = None

    @property
    def totals(self) -> Counts:
        return self.prompts if self.outputs is None else self.prompts + self.outputs

    @property
    def mean(self) -> float:
        return float(self.totals.mean())

    @property
    def variation(self) -> float:
        """Standard deviation / mean."""
        return float(self.totals.std() / self.totals.mean())

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of requests do not exceed."""
        return int(np.quantile(self.totals, percent / 100, method="inverted_cdf"))

    def within(self, limit: int) -> Lengths | None:
        """Those of at most `limit` tokens, None if there are none."""
        kept = self.totals <= limit
        if not kept.any():
            return None
        return Lengths(self.source, self.prompts[kept], None if self.outputs is None else self.outputs[kept])


def lognormal_lengths(mean: float, variation: float) -> Lengths:
    """Totals of a log-normal distribution, at 4096 points of equal probability; `variation` is deviation / mean."""
    sigma = math.sqrt(math.log1p(variation**2))
    normal = NormalDist(math.log(mean) - sigma**2 / 2, max(sigma, 1e-12))
    points = [normal.inv_cdf((index + 0.5) / _POINTS) for index in range(_POINTS)]
    totals = np.maximum(1, np.rint(np.exp(points))).astype(np.int64)
    return Lengths(f"log-normal, mean {mean:g}, CV {variation:g}", totals)


def read_lengths(path: Path) -> Lengths:
    """Read a trace: CSV with a header (Azure, Vidur), JSON lines (Mooncake), or plain numbers.

    Plain lines hold a length, or a prompt's and an output's. Output of no tokens counts as one: a request ends with
    the token that ends it. Raises ConfigError naming the file and line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError("--lengths", f"{path} cannot be read: {problem}") from problem
    if not lines:
        raise ConfigError("--lengths", f"{path} is empty; give one request a line")
    rows = list(_json_rows(path, lines) if lines[0].lstrip()[0] in "{[" else _csv_rows(path, lines))
    if not rows:
        raise ConfigError("--lengths", f"{path} has a header and no requests")
    prompts = np.array([row[0] for row in rows], dtype=np.int64)
    outputs = np.array([row[1] for row in rows if row[1] is not None], dtype=np.int64)
    if len(outputs) not in (0, len(prompts)):
        raise ConfigError("--lengths", f"{path} has outputs for {len(outputs)} of {len(prompts)} requests; give all")
    if not len(outputs):
        return Lengths(path.name, np.maximum(1, prompts))
    return Lengths(path.name, np.maximum(1, prompts), np.maximum(1, outputs))


Row = tuple[int, int | None]


def _csv_rows(path: Path, lines: list[str]) -> Iterator[Row]:
    """Rows of a CSV with a header, or of plain numbers with commas or blanks between them."""
    table = list(csv.reader(lines))
    if not _is_number(table[0][0].split()[0]):
        for number, row in enumerate(csv.DictReader(lines), start=2):
            yield _named(path, number, row)
        return
    for number, line in enumerate(lines, start=1):
        yield _plain(path, number, line.replace(",", " ").split())


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as problem:
            raise ConfigError("--lengths", f"{path} line {number} is no JSON: {problem}") from problem
        yield _named(path, number, value) if isinstance(value, dict) else _plain(path, number, value)


def _named(path: Path, number: int, row: Mapping[str, Any]) -> Row:
    def first(names: tuple[str, ...]) -> int | None:
        return next((_count(path, number, row[name]) for name in names if row.get(name) not in (None, "")), None)

    prompt, output = first(_PROMPT), first(_OUTPUT)
    if prompt is None and (total := first(_TOTAL)) is not None:
        return total, None
    if prompt is None:
        known = ", ".join((_PROMPT[0], _PROMPT[1], _PROMPT[3], _TOTAL[2]))
        raise ConfigError(
            "--lengths", f"{path} line {number} has {', '.join(map(str, row))}; none of them is a length ({known}, ...)"
        )
    return prompt, output


def _plain(path: Path, number: int, values: Any) -> Row:
    values = values if isinstance(values, list) else [values]
    if len(values) not in (1, 2):
        raise ConfigError(
            "--lengths", f"{path} line {number} has {len(values)} numbers; one is a length, two a prompt and an output"
        )
    counts = [_count(path, number, value) for value in values]
    return counts[0], counts[1] if len(counts) == 2 else None


def _count(path: Path, number: int, value: Any) -> int:
    if isinstance(value, bool) or not _is_number(value) or float(value) < 0 or not float(value).is_integer():
        raise ConfigError("--lengths", f"{path} line {number} has {value!r}; a length is a whole number of tokens")
    return int(float(value))


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
