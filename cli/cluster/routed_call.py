"""Data that ingress and router exchange: facts about a request, and the names of the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from llmsched.engine.routing.rules import RoutedPrompt

#: Names of the replicas that the router of this process knows. Use it as an attribute of this module: Ray Serve copies
#: the router's module with the objects that it has imported.
known_replicas: set[str] = set()


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Facts about a request by which the router chooses a replica."""

    prompt: RoutedPrompt
    tried: tuple[str, ...] = ()  # replicas that refused the request
    only: str | None = None  # the one replica that may answer; None: any
