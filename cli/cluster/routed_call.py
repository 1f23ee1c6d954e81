"""Data that ingress, router and replica exchange about a request, and the names of the replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmsched.engine.routing.router import TIE_SECONDS
from llmsched.engine.routing.rules import Choice, RoutedPrompt

#: Names of the replicas that the router of this process knows. The router, which has a thread of its own, replaces the
#: set. Use it as an attribute of this module: Ray Serve copies the router's module with the objects that it imports.
known_replicas: frozenset[str] = frozenset()

#: Most replicas of which `explain` shows why they were not chosen.
_MAX_CANDIDATES = 8


@dataclass(slots=True)
class RoutedCall:
    """Facts about a request by which the router chooses a replica, and its choice."""

    prompt: RoutedPrompt
    tried: tuple[str, ...] = ()  # replicas that refused the request
    only: str | None = None  # the one replica that may answer; None: any
    arrival: float = field(default_factory=time.monotonic)  # at the ingress, in seconds of its clock
    choice: Choice | None = None
    routing: Mapping[str, Any] | None = None  # the choice and its reasons, as JSON

    def choose(self, choice: Choice, compared: Sequence[Choice], ages: Mapping[str, float]) -> None:
        """Record the choice among the replicas `compared`, whose states were `ages` seconds old."""
        best = sorted(compared, key=lambda each: each.expected_ttft or 0.0)[:_MAX_CANDIDATES]
        self.choice = choice
        self.routing = {
            "replica": choice.replica,
            "reason": choice.reason,
            "age_ms": _ms(time.monotonic() - self.arrival),
            "tie_ms": _ms(TIE_SECONDS),
            "refused_by": list(self.tried),
            "num_candidates": len(compared),
            "candidates": [_candidate(each, ages[each.replica]) for each in best],
        }


def _candidate(choice: Choice, age: float) -> dict[str, Any]:
    ttft = choice.expected_ttft or 0.0
    return {
        "replica": choice.replica,
        "ttft_ms": _ms(ttft),
        "queue_ms": _ms(ttft - choice.seconds),
        "prefill_ms": _ms(choice.seconds),
        "cached_tokens": choice.cached_tokens,
        "age_ms": _ms(age),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
