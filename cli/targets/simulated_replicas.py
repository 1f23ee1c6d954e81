"""Replicas of a simulated engine behind a router, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmsched.cli.figures.record import RequestRecord
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.cache_summary import prefix_hashes, span_of
from llmsched.engine.kv.prefix_tree import encode
from llmsched.engine.routing.replica_state import PUBLISH_SECONDS, StateReporter
from llmsched.engine.routing.router import RULES, make_rule
from llmsched.engine.routing.rules import Choice, RoutedPrompt
from llmsched.engine.simulated_engine import SimulatedEngine

MAX_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class Replication:
    """Number of replicas that serve a load, and the rule that chooses one for each request.

    Raises ConfigError for an invalid number or an unknown rule.
    """

    replicas: int = 1
    router: str = "prefix"

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError("replicas", f"must be 1 to {MAX_REPLICAS}, not {self.replicas}")
        if self.router not in RULES:
            raise ConfigError("router", f"must be {', '.join(RULES)}, not {self.router}")

    def of(self, blueprint: Blueprint) -> Blueprint:
        """Return the blueprint with a provenance that names the replicas."""
        if self.replicas == 1:
            return blueprint
        where = f"{self.replicas} replicas of {blueprint.provenance.where}, router {self.router}"
        return replace(blueprint, provenance=replace(blueprint.provenance, where=where))


#: One engine without a router.
ONE_REPLICA = Replication()


@dataclass
class SimulatedRouter:
    """Router of a simulation: publishes the states of the engines, and chooses an engine for each request."""

    engines: Sequence[SimulatedEngine]
    name: str
    seed: int = 0
    publish_seconds: float = PUBLISH_SECONDS

    def __post_init__(self) -> None:
        self._now = 0.0
        self._rule = make_rule(self.name, self.seed, lambda: self._now)
        self._replicas = [f"replica-{index}" for index in range(len(self.engines))]
        self._index_of = {replica: index for index, replica in enumerate(self._replicas)}
        self._reporters = [StateReporter(engine.scheduler) for engine in self.engines]
        self._published = [-self.publish_seconds] * len(self.engines)
        self._span = span_of(self.engines[0].config.block_size)
        self._choices: dict[str, Choice] = {}

    def route(self, name: str, prompt: Sequence[int], now: float, refused_by: Sequence[int]) -> int:
        """Return the index of the engine for a request that arrives at `now`, not one of the engines `refused_by`."""
        self._now = now
        if self.name == "prefix":
            self._publish(now)
        if (before := self._choices.pop(name, None)) is not None:
            self._rule.ended(before)
        usable = self._replicas
        if refused_by:
            usable = [replica for index, replica in enumerate(self._replicas) if index not in refused_by]
        hashes = prefix_hashes(encode(prompt), "", self._span)
        choice = self._choices[name] = self._rule.choose(usable, RoutedPrompt(len(prompt), hashes, self._span))
        return self._index_of[choice.replica]

    def ended(self, record: RequestRecord) -> None:
        """Count a request as ended."""
        self._rule.ended(self._choices.pop(record.request_id or ""))

    def _publish(self, now: float) -> None:
        for index, published in enumerate(self._published):
            if now - published >= self.publish_seconds:
                # If an engine is in the middle of a step, its state is the one after the step.
                self.engines[index].catch_up(now)
                self._rule.update(self._replicas[index], self._reporters[index].report(now))
                self._published[index] = now
