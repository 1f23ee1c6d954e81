"""Budgets of requests and tokens per minute of API keys, and the metrics of their use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.api_keys import ApiKey
from llmsched.engine.metrics import EngineMetrics

_MINUTE = 60.0


class _Budget:
    """Budget that refills evenly, up to its limit per minute. It may be overdrawn."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level, self._time = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._time) * self.limit / _MINUTE)
        self._time = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * _MINUTE / self.limit


class _Budgets(NamedTuple):
    requests: _Budget | None
    tokens: _Budget | None


#: OpenAI's names of the headers that state budgets.
BUDGET_HEADERS = tuple(
    f"x-ratelimit-{fact}-{kind}" for kind in _Budgets._fields for fact in ("limit", "remaining", "reset")
)


class KeyBudgets:
    """Budgets and metrics of API keys. A budget belongs to a key's name, so reloading the file does not refill it.

    A request is accepted if both budgets of its key have at least 1 left. Prompt tokens are taken from the budget at
    once, output tokens when the request ends. So a token budget can become negative. Requests are then refused until it
    has refilled.
    """

    def __init__(self, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._budgets: dict[str, _Budgets] = {}

    def begin(self, key: ApiKey) -> None:
        """Count a request. Raises ApiError 429, and counts nothing, if a budget is used up."""
        requests, tokens = self._of(key)
        for kind, budget in (("requests", requests), ("tokens", tokens)):
            if budget is not None and (wait := budget.seconds_until(1)) > 0:
                self._metrics.key_use("rate_limited", key.name)
                raise ApiError(
                    429,
                    f"the API key {key.name!r} has used up its {budget.limit} {kind} per minute; "
                    f"send the request again in {math.ceil(wait)} s",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait)), **self.headers(key)},
                )
        if requests is not None:
            requests.take(1)
        self._metrics.key_use("requests", key.name)

    def take_tokens(self, key: ApiKey, count: int, kind: Literal["prompt_tokens", "generation_tokens"]) -> None:
        if (budget := self._of(key).tokens) is not None:
            budget.take(count)
        self._metrics.key_use(kind, key.name, count)

    def headers(self, key: ApiKey) -> dict[str, str]:
        """Return OpenAI's headers that state the limits, what is left, and when the budgets are full again."""
        found = {}
        for kind, budget in self._of(key)._asdict().items():
            if budget is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(budget.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(budget.level)))
                found[f"x-ratelimit-reset-{kind}"] = f"{budget.seconds_until(budget.limit):.3f}s"
        return found

    def _of(self, key: ApiKey) -> _Budgets:
        limits = key.requests_per_minute, key.tokens_per_minute
        known = self._budgets.get(key.name, _Budgets(None, None))
        if tuple(budget and budget.limit for budget in known) != limits:
            known = _Budgets(*(None if limit is None else _Budget(limit, self._clock) for limit in limits))
            self._budgets[key.name] = known
        return known
