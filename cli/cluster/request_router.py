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
from llmsched.engine.routing.rules import Choice


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # mypy does not read Ray's types
    """Router that sends each request to the replica with the lowest expected time to first token."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._rule = PrefixRouter(Random(), time.time)
        self._choices: dict[str, Choice] = {}
        self._times: dict[str, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then all others. Ray Serve tries the others if the chosen one is full."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        routed_call.known_replicas.clear()
        routed_call.known_replicas.update(replica_id.unique_id for replica_id in self.curr_replicas)
        if pending_request is None or not replicas:
            return [list(replicas.values())]
        for name, replica in replicas.items():
            self._update(name, replica.routing_stats)
        call: RoutedCall = pending_request.args[0]
        if call.only is not None:
            return [[replicas[call.only]]] if call.only in replicas else []
        usable = [name for name in replicas if name not in call.tried] or list(replicas)
        request_id = pending_request.metadata.internal_request_id
        if (before := self._choices.pop(request_id, None)) is not None:  # Ray Serve asks again
            self._rule.ended(before)
        choice = self._choices[request_id] = self._rule.choose(usable, call.prompt)
        others = [replicas[name] for name in usable if name != choice.replica]
        return [[replicas[choice.replica]], others] if others else [[replicas[choice.replica]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended."""
        if (choice := self._choices.pop(internal_request_id, None)) is not None:
            self._rule.ended(choice)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._rule.remove(replica_id.unique_id)
        self._times.pop(replica_id.unique_id, None)

    def _update(self, name: str, stats: Mapping[str, Any]) -> None:
        if not stats or stats["time"] == self._times.get(name):
            return
        self._times[name] = stats["time"]
        joined = stats["prefixes"]
        prefixes = frozenset(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))
        self._rule.update(name, ReplicaState(**{**stats, "prefixes": prefixes}))
