"""Delays caused by the bench client itself, and the rule that decides if they make a run invalid."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from llmsched.cli.figures.record import LoopLag, RunRecord
from llmsched.cli.figures.token_times import ServedRequest
from llmsched.engine.percentiles import Summary, summarise

#: Seconds between two checks of the event loop.
_INTERVAL_S = 0.02

#: A garbage collection threshold that is never reached.
_NEVER = (1 << 31) - 1

#: A run is invalid if the P99 of a lag exceeds both limits: seconds, and a share of the latency to which the lag adds.
LAG_LIMIT_S = 0.02
LAG_LIMIT_SHARE = 0.1

#: The user is warned if loop lag adds more than both limits to P99 ITL: seconds, and a share of P99 ITL.
_WARN_S = 0.005
_WARN_SHARE = 0.25

#: If the machine caused at least this share of a lag, messages name the machine, not the client, as the cause.
_MOSTLY_MACHINE = 0.5

#: Words with which messages explain a lag that the machine caused.
BUSY = "because this machine was busy with other work"


@asynccontextmanager
async def loop_lags(interval: float = _INTERVAL_S) -> AsyncIterator[list[LoopLag]]:
    """Measure the lag of the event loop while the block runs. Yield the list that receives the lags."""
    lags: list[LoopLag] = []
    watch = asyncio.create_task(_watch(interval, lags))
    try:
        yield lags
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch(interval: float, lags: list[LoopLag]) -> None:
    now, computed = asyncio.get_running_loop().time, time.thread_time
    while True:
        due, before = now() + interval, computed()
        await asyncio.sleep(interval)
        # The client caused at most as much lag as this thread used CPU time. The machine caused the rest.
        fired, own = now(), computed() - before
        while True:  # a long delay counts once per timer that fell due in it
            late = max(0.0, fired - due)
            lags.append(LoopLag(due, late, max(0.0, late - own)))
            if (due := due + interval) >= fired:
                break


@contextmanager
def settled_heap() -> Iterator[None]:
    """Disable full garbage collections while the block runs, because each would look like a stall of every stream."""
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class ClientLag:
    """Lags of the client in seconds. A lag is None if the event loop was not watched."""

    send: Summary  # from when a request could be sent until the client sent it
    loop: Summary | None = None  # how late the timers of the client's event loop fired
    machine: Summary | None = None  # part of `loop` during which the machine gave the client no CPU core
    streaming: Summary | None = None  # `loop` since the first token of the run


def client_lag(run: RunRecord, done: Sequence[ServedRequest]) -> ClientLag:
    send = summarise([lag for record in run.records if (lag := record.client_lag) is not None])
    if run.loop_lags is None:
        return ClientLag(send)
    first_token = min((one.record.scheduled + one.latency.ttft for one in done), default=-math.inf)
    return ClientLag(
        send,
        loop=summarise([lag.late for lag in run.loop_lags]),
        machine=summarise([lag.machine for lag in run.loop_lags]),
        streaming=summarise([lag.late for lag in run.loop_lags if lag.due >= first_token]),
    )


def judge_lag(lag: ClientLag, ttft: Summary, itl: Summary, done: Sequence[ServedRequest]) -> tuple[bool, str | None]:
    """Return True if the client was so late that the run is invalid, and a warning for the user, if any."""
    counts = [arrival.tokens for one in done for arrival in one.arrivals if arrival.tokens]
    per_chunk = sum(counts) / len(counts) if counts else 1.0
    send, loop, machine, streaming = (
        0.0 if one is None else one.p99 or 0.0 for one in (lag.send, lag.loop, lag.machine, lag.streaming)
    )

    def cause(late: float) -> str:
        if machine >= _MOSTLY_MACHINE * late:
            return BUSY
        return "because it had more to do than one core can; lower the load, or send it from several machines"

    first, gap = ttft.p50 or 0.0, (itl.mean or ttft.p50 or 0.0) * per_chunk
    for late, latency, of_loop in ((streaming, gap, True), (loop, first, True), (send, first, False)):
        if late > max(LAG_LIMIT_S, LAG_LIMIT_SHARE * latency):
            sentence = f"the client itself was late (P99 {late * 1e3:.1f} ms): these figures are not the target's"
            return True, f"{sentence}, {cause(late)}" if of_loop else sentence
    added = streaming / per_chunk
    if itl.p99 is not None and added > max(_WARN_S, _WARN_SHARE * itl.p99):
        ms = f"{1e3 * added:.1f} ms"
        return False, f"P99 of ITL may be too high by up to {ms}: the client itself was late, {cause(streaming)}"
    return False, None
