"""Whether the client was late itself, so much that its figures are not the target's, and by whose fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmsched.cli.figures.lag import Lag
from llmsched.cli.figures.token_times import Served
from llmsched.engine.latency import Summary, summarise

#: The client is late when the P99 of a lag exceeds both of these; the share is one of what the lag is added to.
LAG_LIMIT_S = 0.02
LAG_LIMIT_SHARE = 0.1

#: From both of these on, the second a share of the P99 of ITL, the P99 of the loop's lag is too much for that figure.
_CAUTION_S = 0.005
_CAUTION_SHARE = 0.25

#: The share of a lag from which on it is the machine's.
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late (seconds) requests were `sent`, and the client's event loop came round to what was due.

    `machine` is the part of `loop` in which the machine let the client wait, `reading` is `loop` since the first token
    came. None: nobody looked.
    """

    sent: Summary
    loop: Summary | None = None
    machine: Summary | None = None
    reading: Summary | None = None

    def of_sending(self) -> Lateness:
        """That of a client in the target's process: its loop's lag is part of what the target takes."""
        return Lateness(self.sent)

    def find(self, ttft: Summary, itl: Summary, tokens_per_chunk: float) -> Findings:
        """Judge by what requests took: sending late is part of a TTFT, coming round late also of the gap of a chunk."""
        sent, loop, reading = (_p99(lag) for lag in (self.sent, self.loop, self.reading))
        if reading > _limit((itl.mean or ttft.p50 or 0.0) * tokens_per_chunk):
            return Findings(True, (f"{_late(reading)}, because {self._cause(reading)}",))
        if loop > _limit(ttft.p50 or 0.0):
            return Findings(True, (f"{_late(loop)}, because {self._cause(loop)}",))
        if sent > _limit(ttft.p50 or 0.0):
            return Findings(True, (_late(sent),))
        added = reading / tokens_per_chunk
        if itl.p99 is not None and added > max(_CAUTION_S, _CAUTION_SHARE * itl.p99):
            why = f"the client was late itself, because {self._cause(reading)}"
            return Findings(False, (f"P99 of ITL may be too high by up to {1e3 * added:.1f} ms: {why}",))
        return Findings(False)

    def _cause(self, loop: float) -> str:
        if _p99(self.machine) >= _MOST * loop:
            return "this machine was busy with other work"
        return "it had more to do than one core can; send less at a time, or from several machines"


@dataclass(frozen=True, slots=True)
class Findings:
    """Whether the client was `late`, and what is to be said of it."""

    late: bool
    warnings: tuple[str, ...] = ()


def lateness(sent: Sequence[float], loop: Sequence[Lag] | None, done: Sequence[Served]) -> Lateness:
    """From the lags (seconds) of requests and of the event loop, and the requests that were served."""
    if loop is None:
        return Lateness(summarise(sent))
    first = min((one.record.scheduled + one.latency.ttft for one in done), default=-math.inf)
    return Lateness(
        sent=summarise(sent),
        loop=summarise([lag.late for lag in loop]),
        machine=summarise([lag.machine for lag in loop]),
        reading=summarise([lag.late for lag in loop if lag.due >= first]),
    )


def tokens_per_chunk(done: Sequence[Served]) -> float:
    """Tokens of the chunks that had any, on average; 1 without any."""
    counts = [arrival.tokens for one in done for arrival in one.arrivals if arrival.tokens]
    return sum(counts) / len(counts) if counts else 1.0


def _p99(lag: Summary | None) -> float:
    return 0.0 if lag is None else lag.p99 or 0.0


def _limit(length: float) -> float:
    return max(LAG_LIMIT_S, LAG_LIMIT_SHARE * length)


def _late(p99: float) -> str:
    return f"the client itself was late (P99 {p99 * 1e3:.1f} ms): these figures are not the target's"
