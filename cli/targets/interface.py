from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llmsched.cli.figures.engine_counts import EngineCounts
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
    """Engine or server to which a load can be sent."""

    name: str
    in_process: bool  # True if the target shares the client's event loop
    encode: TextEncoder | None  # turns the texts of a trace into token ids; None: texts are sent as text
    sample_interval: float  # seconds between calls of `state`
    meter: KVMeter | None  # observes each step of the engine, if the target can report steps

    async def send(self, request: PlannedRequest, record: RequestRecord) -> None:
        """Send a request and record its times, chunks and usage. Raises RequestFailed if the request fails."""

    async def counts(self) -> EngineCounts:
        """Return what the target has counted since it started."""

    async def state(self) -> TargetState | None:
        """Return the current state, with its time in seconds of the event loop's clock, or None if unknown."""

    async def timelines(self, records: Sequence[RequestRecord]) -> list[Timeline | None]:
        """Return the scheduler's decisions about each request (None: unknown), with times of the event loop's clock."""

    def memory(self) -> MemoryParts | None:
        """Return the sizes of the parts of the target's memory, or None if unknown."""


class TargetUnreachableError(Exception):
    """Error for a server that accepts no connection."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Load to send to a target, and the SLOs that the target should meet."""

    workload: Load
    slo: Slo
    timeout: float  # seconds per request
    warmup: int | None  # number of warm-up requests; None: the target's usual number
    timelines: bool = False  # ask an llmsched server, after the load, what its scheduler decided
    partial: bool = False  # if the user interrupts the load, measure the requests that have ended


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Target that is ready for a load."""

    name: str
    provenance: Provenance
    warmup: int  # number of warm-up requests answered
    measure: Callable[[Load, Slo, Progress], Awaitable[Measurement]]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the engine, as far as known

    def experiment(self, workload: Load, slo: Slo) -> Experiment:
        return Experiment(self.name, self.provenance, workload, slo, self.warmup, self.settings)
