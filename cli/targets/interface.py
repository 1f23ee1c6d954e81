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
    """Engine or server to which a load can be sent.

    If `in_process`, the target shares the client's event loop. `encode` turns the texts of a trace into token ids; if
    it is None, texts are sent as text. `sample_interval` is the time in seconds between calls of `state`. `meter`
    observes each step of the engine, if the target can report steps.
    """

    name: str
    in_process: bool
    encode: TextEncoder | None
    sample_interval: float
    meter: KVMeter | None

    async def send(self, request: PlannedRequest, record: RequestRecord) -> None:
        """Send a request and record its times, chunks and usage. Raises RequestFailed if the request fails."""

    async def preemptions(self) -> int | None:
        """Return the number of preemptions since the target started, or None if unknown."""

    async def state(self) -> TargetState | None:
        """Return the current state, with its time in seconds of the event loop's clock, or None if unknown."""

    async def timelines(self, records: Sequence[RequestRecord]) -> list[Timeline | None]:
        """Return the scheduler's decisions about each request, in seconds of the event loop's clock (None: unknown)."""

    def memory(self) -> MemoryParts | None:
        """Return the sizes of the parts of the target's memory, or None if unknown."""


class TargetUnreachableError(Exception):
    """Error for a server that accepts no connection."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Load to send to a target, and SLOs to measure it against.

    `timeout` is in seconds per request. `warmup` is the number of warm-up requests (None: the target's usual number).
    If `timelines` is True, an llmsched server is asked, after the load, what its scheduler decided about each request.
    If `partial` is True and the user interrupts the load, the requests that have ended are measured.
    """

    workload: Load
    slo: Slo
    timeout: float
    warmup: int | None
    timelines: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Target that is ready and has answered `warmup` warm-up requests.

    `measure` sends a load and returns its figures. A model in this process starts each load with an empty prefix cache.
    `settings` are the known settings of the engine.
    """

    name: str
    provenance: Provenance
    warmup: int
    measure: Callable[[Load, Slo, Progress], Awaitable[Measurement]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self, workload: Load, slo: Slo) -> Experiment:
        return Experiment(self.name, self.provenance, workload, slo, self.warmup, self.settings)
