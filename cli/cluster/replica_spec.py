"""Settings of a replica, from the flags of `llmsched serve`, in a form that can be sent to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmsched.cli.serve.access import Access
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError

MAX_REPLICAS = 1024
#: Name of the application of Ray Serve.
APP_NAME = "llmsched"


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """Smallest and largest number of replicas. Between them, the number of replicas follows the load."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}..{self.most}"


def parse_replicas(text: str) -> ReplicaRange:
    """Parse a number of replicas such as "4", or a range such as "1..8". Raises ConfigError."""
    least, dots, most = text.partition("..")
    try:
        found = ReplicaRange(int(least), int(most if dots else least))
    except ValueError:
        raise ConfigError("replicas", f"must be a number or a range such as 1..8, not {text!r}") from None
    if not 1 <= found.least <= found.most <= MAX_REPLICAS:
        raise ConfigError("replicas", f"must be 1 to {MAX_REPLICAS}, the smaller number first, not {text}")
    return found


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Settings of each replica, and of the ingress in front of them. Times are in seconds."""

    config: EngineConfig
    model_name: str | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    api_key: str | None = None
    admin_api_key: str | None = None
    loopback: bool = True
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    grace_period: float = 30.0
    step_timeout: float = 300.0
    metrics_prefix: str = "llmsched"
    ui: bool = True

    def access(self) -> Access:
        return Access(self.api_key, self.admin_api_key, self.loopback, self.allowed_hosts, self.cors_origins)

    def as_arguments(self) -> dict[str, Any]:
        """Return the settings as JSON values, from which `from_arguments` makes an equal spec."""
        return asdict(self)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> ReplicaSpec:
        lists = {name: tuple(arguments[name]) for name in ("allowed_hosts", "cors_origins") if name in arguments}
        nested = {"config": EngineConfig(**arguments["config"]), "limits": HttpLimits(**arguments.get("limits", {}))}
        return cls(**{**arguments, **lists, **nested})
