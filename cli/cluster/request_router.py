"""Request router of Ray Serve that chooses replicas by the rules in `engine.routing`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from llmsched.cli.cluster import routed_call
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.engine.kv.cache_summary import HASH_BYTES
from llmsched.engine.routing.replica_state import ReplicaState
from llmsched.engine.routing.router import PrefixRouter
from llmsched.engine.routing.rules import Choice, RoutedPrompt


class ComparingRouter(PrefixRouter):
    """Rule that keeps what it has expected of each replica for the latest choice."""

    def __init__(self) -> None:
        super().__init__(Random(), time.time)
        self.compared: list[Choice] = []

    def pick(self, replicas: Any, prompt: RoutedPrompt) -> Choice:
        self.compared = []
        return super().pick(replicas, prompt)

    def expected(self, name: str, prompt: RoutedPrompt, now: float) -> Choice:
        self.compared.append(super().expected(name, prompt, now))
        return self.compared[-1]


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # mypy does not read Ray's types
    """Router that sends each request to the replica with the lowest expected time to first token."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._rule = ComparingRouter()
        self._choices: dict[tuple[str, str], Choice] = {}  # by ids of request and replica
        self._times: dict[str, float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the list of running replicas from Ray Serve."""
        super().update_replicas(replicas)
        routed_call.known_replicas = frozenset(replica.replica_id.unique_id for replica in replicas)
        for gone in self._times.keys() - routed_call.known_replicas:
            self._forget(gone)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then all others. Ray Serve tries the others if the chosen one is full."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not replicas:
            return [list(replicas.values())]
        call: RoutedCall = pending_request.args[0]
        if call.only in replicas:
            return [[replicas[call.only]]]
        for name, replica in replicas.items():
            self._update(name, replica.routing_stats)
        usable = [name for name in replicas if name not in call.tried] or list(replicas)
        choice = self._choose(pending_request.metadata.internal_request_id, call, usable)
        others = [replicas[name] for name in usable if name != choice.replica]
        return [[replicas[choice.replica]], others] if others else [[replicas[choice.replica]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended."""
        if (choice := self._choices.pop((internal_request_id, replica_id.unique_id), None)) is not None:
            self._rule.ended(choice)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _choose(self, request_id: str, call: RoutedCall, usable: list[str]) -> Choice:
        if call.choice is not None:  # Ray Serve asks again
            self._rule.ended(call.choice)
            self._choices.pop((request_id, call.choice.replica), None)
        choice = self._rule.choose(usable, call.prompt)
        self._choices[request_id, choice.replica] = choice
        now = time.time()
        call.choose(choice, self._rule.compared, {name: now - then for name, then in self._times.items()})
        return choice

    def _forget(self, name: str) -> None:
        routed_call.known_replicas -= {name}
        self._rule.remove(name)
        self._times.pop(name, None)

    def _update(self, name: str, stats: Mapping[str, Any]) -> None:
        if not stats or stats["time"] == self._times.get(name):
            return
        self._times[name] = stats["time"]
        joined = stats["prefixes"]
        prefixes = frozenset(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))
        self._rule.update(name, ReplicaState(**{**stats, "prefixes": prefixes}))
