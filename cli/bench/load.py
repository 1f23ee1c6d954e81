"""The load: which request is sent when. Open loop by an absolute schedule, closed loop by free slots, or both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmsched.cli.bench.prompts import Prompt, id_prompts, text_prompts
from llmsched.cli.bench.record import RequestFailed, RequestRecord
from llmsched.engine.errors import LlmschedError

ArrivalProcess = Literal["poisson", "constant"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send. Lengths are in tokens, `request_rate` in requests per second (inf: all at once).

    Without a rate but with `max_concurrency` the loop is closed: a request is scheduled when a slot is free. With both,
    requests keep their place in the schedule and the wait for a slot counts as latency. With neither, all are sent at
    once. `prefix_len` tokens of `input_len` are the same in every prompt.

    Raises LlmschedError naming the setting and its range.
    """

    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 64
    seed: int = 0
    request_rate: float | None = None
    arrivals: ArrivalProcess = "poisson"
    max_concurrency: int | None = None
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise LlmschedError(f"{name} is {value}; allowed is 1 or more")
        if self.seed < 0:
            raise LlmschedError(f"seed is {self.seed}; allowed is 0 or more")
        if self.request_rate is not None and not self.request_rate > 0:
            raise LlmschedError(f"request_rate is {self.request_rate}; allowed is above 0 requests per second, or inf")
        if not 0 <= self.prefix_len <= self.input_len:
            raise LlmschedError(f"prefix_len is {self.prefix_len}; allowed is 0 to input_len ({self.input_len})")

    @property
    def closed(self) -> bool:
        return self.request_rate is None and self.max_concurrency is not None

    def describe(self) -> str:
        """The load in words."""
        if self.closed:
            return f"closed loop, {self.max_concurrency} at a time"
        cap = f", at most {self.max_concurrency} at a time" if self.max_concurrency else ""
        if self.request_rate is None or math.isinf(self.request_rate):
            return f"all at once{cap}"
        return f"{self.arrivals} arrivals at {self.request_rate:g} requests/s{cap}"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load. `offset` is in seconds after the start; a closed loop does not look at it."""

    index: int
    offset: float
    prompt: Prompt
    output_len: int


def plan_load(workload: Workload, ids: Sequence[int] | None) -> list[PlannedRequest]:
    """The requests of a workload, the same for the same seed; prompts of token `ids`, or of words where it is None."""
    prompt_stream, arrival_stream = (np.random.default_rng([workload.seed, stream]) for stream in range(2))
    count, length, prefix_len = workload.num_prompts, workload.input_len, workload.prefix_len
    if ids is None:
        prompts = text_prompts(count, length, prefix_len=prefix_len, generator=prompt_stream)
    else:
        prompts = id_prompts(count, length, prefix_len=prefix_len, ids=ids, generator=prompt_stream)
    offsets = arrival_offsets(workload, arrival_stream)
    return [
        PlannedRequest(index, offset, prompt, workload.output_len)
        for index, (offset, prompt) in enumerate(zip(offsets, prompts, strict=True))
    ]


def arrival_offsets(workload: Workload, generator: np.random.Generator) -> list[float]:
    """Seconds after the start at which each request is due; the first at 0."""
    rate, gaps = workload.request_rate, workload.num_prompts - 1
    if rate is None or math.isinf(rate):
        return [0.0] * workload.num_prompts
    if workload.arrivals == "constant":
        return [index / rate for index in range(workload.num_prompts)]
    return [0.0, *np.cumsum(generator.exponential(1 / rate, gaps)).tolist()]


#: Sends a request and notes on the record what happens; raises RequestFailed if it is not served.
Send = Callable[[PlannedRequest, RequestRecord], Awaitable[None]]


async def run_load(
    planned: Sequence[PlannedRequest],
    send: Send,
    *,
    closed: bool,
    max_concurrency: int | None,
    timeout: float | None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send all requests when they are due and return a record of each, in the order of `planned`.

    `timeout` is in seconds from sending. Whatever befalls one request, the others go on.
    """
    loop = asyncio.get_running_loop()
    slots: AbstractAsyncContextManager[object] = nullcontext()
    if max_concurrency is not None:
        slots = asyncio.Semaphore(max_concurrency)
    records: list[RequestRecord] = []

    async def one(request: PlannedRequest, record: RequestRecord) -> None:
        async with slots:
            record.ready = loop.time()
            if closed:
                record.scheduled = record.ready
            await _send_within(timeout, send, request, record)
        record.end = loop.time() if record.end is None else record.end
        on_end(record)

    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for request in planned:
            due = start if closed else start + request.offset
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            records.append(RequestRecord(request.index, scheduled=due))
            tasks.create_task(one(request, records[-1]))
    return records


async def _send_within(timeout: float | None, send: Send, request: PlannedRequest, record: RequestRecord) -> None:
    try:
        async with asyncio.timeout(timeout):
            await send(request, record)
    except RequestFailed as failure:
        record.failure = failure
    except TimeoutError:
        record.failure = RequestFailed("timeout", f"no end after {timeout:g} s")
