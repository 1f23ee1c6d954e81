"""Targets of a load: the interface of all kinds, and the result of preparing a target."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.kv_memory import KVMeter, TargetState
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.load.load import Load, PlannedRequest
from llmsched.cli.load.prompts import TextEncoder
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline


class Target(Protocol):
    """Engine or server that a load can be sent to.

    `in_process`: the target runs in the client's process and shares its event loop. `encode` turns the texts of a trace
    into token ids (None: texts are sent). Calls of `state` every `sample_interval` seconds do not disturb the target.
    `meter` observes every step (None: steps cannot be observed).
    """

    name: str
    in_process: bool
    encode: TextEncoder | None
    sample_interval: float
    meter: KVMeter | None

    async def send(self, request: PlannedRequest, record: RequestRecord) -> None:
        """Send a request and record its times, chunks and usage. Raises RequestFailed if the request fails."""

    async def preemptions(self) -> int | None:
        """Return the number of preemptions since the target started; None if unknown."""

    async def state(self) -> TargetState | None:
        """Return the current state with the event loop's time; None if unknown."""

    async def timelines(self, records: Sequence[RequestRecord]) -> list[Timeline | None]:
        """Return the scheduler's decisions about each request, in the event loop's time; None if unknown.

        A target keeps them for its latest requests only.
        """

    def memory(self) -> MemoryParts | None:
        """Return the parts of the target's memory, as last reported; None if unknown."""


class TargetUnreachableError(Exception):
    """Server that accepts no connection, so that sending it a load is pointless."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Load for a target of any kind, with the SLOs it is measured against.

    `timeout` is in seconds. `warmup` is a number of requests (None: the usual number for the kind of target).
    `timelines`: ask an llmsched server, after the load, for its scheduler's decisions. `partial`: if the user
    interrupts the load, measure the requests that have ended.
    """

    workload: Load
    slo: Slo
    timeout: float
    warmup: int | None
    timelines: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A target that is ready and warmed up.

    `measure` sends a load to the target and measures it; a model in this process starts with an empty prefix cache.
    `settings` are the engine's, as far as they are known.
    """

    name: str
    provenance: Provenance
    warmup: int
    measure: Callable[[Load, Slo, Progress], Awaitable[Measurement]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self, workload: Load, slo: Slo) -> Experiment:
        """Return the setup of a run with this load, for a report."""
        return Experiment(self.name, self.provenance, workload, slo, self.warmup, self.settings)
