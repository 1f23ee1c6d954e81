"""The beginning of a load, as a load: what short runs send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmsched.cli.load.load import Load, PlannedRequest
from llmsched.cli.load.prompts import Encode


@dataclass(frozen=True, slots=True)
class Portion:
    """The first `count` requests of a load, when they are due in it; of one that a duration ends, that share of it."""

    load: Load
    count: int

    @property
    def seed(self) -> int:
        return self.load.seed

    @property
    def request_rate(self) -> float | None:
        return self.load.request_rate

    @property
    def max_concurrency(self) -> int | None:
        return self.load.max_concurrency

    @property
    def closed(self) -> bool:
        return self.load.closed

    @property
    def stop_after(self) -> float | None:
        whole = self.load.stop_after
        return None if whole is None else whole * self.count / self.load.num_requests

    @property
    def asked_rate(self) -> float | None:
        return self.load.asked_rate

    @property
    def num_requests(self) -> int:
        return min(self.count, self.load.num_requests)

    @property
    def longest_input(self) -> int:
        return self.load.longest_input

    def plan(self, ids: Sequence[int] | None, encode: Encode | None = None) -> list[PlannedRequest]:
        return self.load.plan(ids, encode)[: self.count]

    def describe(self) -> str:
        return self.load.describe()

    def describe_requests(self) -> str:
        return f"the first {self.num_requests} of {self.load.describe_requests()}"

    def parameters(self) -> dict[str, Any]:
        return {**self.load.parameters(), "first": self.count}

    def with_seed(self, seed: int) -> Portion:
        return Portion(self.load.with_seed(seed), self.count)

    def at_rate(self, rate: float) -> Portion:
        return Portion(self.load.at_rate(rate), self.count)

    def one_by_one(self, count: int, *, seed: int) -> Load:
        return self.load.one_by_one(count, seed=seed)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Load:
        return self.load.head(count, seed=seed, output_len=output_len)
