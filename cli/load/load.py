"""The load: which request is sent when. Open loop by an absolute schedule, closed loop by free slots, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmsched.cli.figures.record import RequestFailed, RequestRecord
from llmsched.cli.load.prompts import Encode, Prompt


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load. `offset` is in seconds after the start; a closed loop does not look at it."""

    index: int
    offset: float
    prompt: Prompt
    output_len: int


class Load(Protocol):
    """What to send, when: frozen, and the same for the same settings. See `Workload` and `TraceLoad`.

    `request_rate` is in requests per second (None: not asked for). `closed`: a request is scheduled when one of
    `max_concurrency` slots is free; otherwise `max_concurrency` only caps the schedule. `stop_after` is the time in
    seconds after which a closed loop schedules no more.
    """

    @property
    def seed(self) -> int: ...
    @property
    def request_rate(self) -> float | None: ...
    @property
    def max_concurrency(self) -> int | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def stop_after(self) -> float | None: ...
    @property
    def asked_rate(self) -> float | None:
        """Mean requests per second of the schedule; None if there is none."""
        ...

    @property
    def num_requests(self) -> int:
        """How many requests there are; where `stop_after` is set, at most."""
        ...

    @property
    def longest_input(self) -> int:
        """Tokens of the longest prompt."""
        ...

    def plan(self, ids: Sequence[int] | None, encode: Encode | None = None) -> list[PlannedRequest]:
        """The requests in the order of their offsets.

        Random prompts are of token `ids`, or of words where it is None. Texts of a trace become token ids by `encode`,
        and stay texts where either is None; answers that are text are counted by `encode`, or else by their words.
        """
        ...

    def describe(self) -> str:
        """When requests are sent, in words."""
        ...

    def describe_requests(self) -> str:
        """What is sent, in words."""
        ...

    def parameters(self) -> dict[str, Any]:
        """All settings for JSON, with a `fingerprint` that is equal if and only if the load is."""
        ...

    def with_seed(self, seed: int) -> Load:
        """The same load with other random choices."""
        ...

    def at_rate(self, rate: float) -> Load:
        """The same load at another rate (requests per second). Raises LlmschedError where its shape forbids that."""
        ...

    def one_by_one(self, count: int, *, seed: int) -> Load:
        """`count` requests such as these, each sent when the one before it has ended, with other prompts."""
        ...

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Load:
        """`count` requests such as these, all at once, with other prompts; answers of `output_len` if it is given."""
        ...


def plan_first(
    load: Load, count: int | None, ids: Sequence[int] | None, encode: Encode | None = None
) -> tuple[list[PlannedRequest], float | None]:
    """Return the first `count` requests of a load (None: all) and their share of its `stop_after`; see `Load.plan`."""
    planned, stop_after = load.plan(ids, encode), load.stop_after
    if count is None:
        return planned, stop_after
    return planned[:count], None if stop_after is None else stop_after * count / load.num_requests


#: Sends a request and notes on the record what happens; raises RequestFailed if it is not served.
Send = Callable[[PlannedRequest, RequestRecord], Awaitable[None]]


async def run_load(
    planned: Sequence[PlannedRequest],
    send: Send,
    *,
    closed: bool,
    max_concurrency: int | None,
    timeout: float | None,
    stop_after: float | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send all requests when they are due and return a record of each, in the order of `planned`.

    `timeout` is in seconds from sending. A closed loop sends none `stop_after` seconds from the start or later, and
    those have no record. Whatever befalls one request, the others go on.
    """
    now = asyncio.get_running_loop().time
    slots = asyncio.Semaphore(len(planned) if max_concurrency is None else max_concurrency)
    records: list[RequestRecord] = []

    async def one(request: PlannedRequest, record: RequestRecord) -> None:
        if record.ready is None:
            await slots.acquire()
            record.ready = now()
        try:
            await _send_within(timeout, send, request, record)
        finally:
            slots.release()
        record.end = now() if record.end is None else record.end
        on_end(record)

    start = now()
    async with asyncio.TaskGroup() as tasks:
        for request in planned:
            if closed:
                await slots.acquire()
                if stop_after is not None and now() - start >= stop_after:
                    break
                record = RequestRecord(request.index, scheduled=now(), ready=now())
            else:
                record = RequestRecord(request.index, scheduled=start + request.offset)
                if (wait := record.scheduled - now()) > 0:
                    await asyncio.sleep(wait)
            records.append(record)
            tasks.create_task(one(request, record))
    return records


async def _send_within(timeout: float | None, send: Send, request: PlannedRequest, record: RequestRecord) -> None:
    try:
        async with asyncio.timeout(timeout):
            await send(request, record)
    except RequestFailed as failure:
        record.failure = failure
    except TimeoutError:
        record.failure = RequestFailed("timeout", f"no end after {timeout:g} s")
    except Exception as problem:  # whatever it is, it must not take the others' figures with it
        record.failure = RequestFailed("fault of the bench", f"{type(problem).__name__}: {problem}")
