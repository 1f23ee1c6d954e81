"""Load: the requests to send, the times to send them, and the loop that sends them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from llmsched.cli.figures.record import RequestFailed, RequestRecord
from llmsched.cli.load.arrivals import Times
from llmsched.cli.load.prompts import Prompt, RandomPrompt, TextEncoder, Vocabulary
from llmsched.cli.load.schedule import SHAPES, Schedule


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    offset: float  # seconds after the start; a closed loop ignores it
    prompt: Prompt
    output_len: int  # tokens
    cache_salt: str | None = None  # keeps a server from reusing KV that it cached in an earlier run


@dataclass(frozen=True, kw_only=True)
class Load(Schedule, ABC):
    """Requests to send and their times. Loads with equal settings have equal requests and times."""

    @property
    def num_requests(self) -> int:
        """Number of requests. A closed loop with a `stop_after` may send fewer."""
        return len(self._offsets)

    @property
    def last_offset(self) -> float:
        """Seconds after the start at which the last request is due; 0 for a closed loop."""
        return float(self._offsets.max(initial=0.0))

    @property
    @abstractmethod
    def longest_input(self) -> int:
        """Length of the longest prompt in tokens."""

    def plan(self, ids: Sequence[int] | None, encode: TextEncoder | None = None) -> list[PlannedRequest]:
        """Return the requests in the order of their offsets.

        Random prompts consist of the token ids `ids`, or of words if `ids` is None. `encode` turns the texts of a trace
        into token ids, unless `ids` is None, and counts the tokens of answers.
        """
        parts = zip(self._offsets.tolist(), self._prompts(Vocabulary(ids), encode), self._answers(encode), strict=True)
        return [
            PlannedRequest(index, *part, None if isinstance(part[1], RandomPrompt) else self.cache_salt)
            for index, part in enumerate(parts)
        ]

    @cached_property
    def _offsets(self) -> Times:
        raise NotImplementedError

    @abstractmethod
    def _prompts(self, vocabulary: Vocabulary, encode: TextEncoder | None) -> Iterable[Prompt]: ...

    @abstractmethod
    def _answers(self, encode: TextEncoder | None) -> Iterable[int]: ...

    @abstractmethod
    def describe_requests(self) -> str: ...

    def parameters(self) -> dict[str, Any]:
        """Return all settings as JSON values, and a `fingerprint` of the load.

        Loads with the same fingerprint have equal requests and times, but the tokens of random prompts may differ.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        for name, value in values.items():
            if value == math.inf:  # JSON has no infinity
                values[name] = None
            elif value is not None and not isinstance(value, (str, int, float)):
                values[name] = str(value)
        idle = set(SHAPES) if self.process is None else set()
        if self.arrivals != "daynight":
            idle |= {"day_period", "day_amplitude"}
        settings = {"load": self.describe(), **values, **dict.fromkeys(idle), **self._facts()}
        compared = {name: value for name, value in settings.items() if name not in ("prompt_seed", "trace_notes")}
        canonical = json.dumps(compared, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return {**settings, "fingerprint": hashlib.sha256(canonical.encode()).hexdigest()}

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return further values for `parameters()`, where they replace settings of the same name."""

    def with_seed(self, seed: int) -> Self:
        return replace(self, seed=seed)

    @abstractmethod
    def at_rate(self, rate: float) -> Self:
        """Return this load at another rate (requests per second). Raises ConfigError for the arrivals "ramp"."""

    @abstractmethod
    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Load:
        """Return a load of `count` similar requests with new prompts, all sent at once.

        The answers have `output_len` tokens or, if that is None, lengths from the load's distribution.
        """

    def one_by_one(self, count: int, *, seed: int) -> Load:
        """Return the same load as `head(...)`, but with each request sent when the previous one has ended."""
        return replace(self.head(count, seed=seed), max_concurrency=1)


def plan_first(
    load: Load, count: int | None, ids: Sequence[int] | None, encode: TextEncoder | None = None
) -> tuple[list[PlannedRequest], float | None]:
    """Return the first `count` requests of a load (None: all), and the load's `stop_after` in seconds.

    If only some requests are returned, `stop_after` is reduced in proportion. See `Load.plan` for `ids` and `encode`.
    """
    planned, stop_after = load.plan(ids, encode), load.stop_after
    if count is None:
        return planned, stop_after
    return planned[:count], None if stop_after is None else stop_after * count / load.num_requests


#: Function that sends a request and records its times and chunks. It raises RequestFailed if the request fails.
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
    """Send each request when it is due, and return the records of the requests sent, in the order of `planned`.

    At most `max_concurrency` requests run at the same time. A request fails `timeout` seconds after it was sent. If the
    loop is `closed`, each request is sent when an earlier one ends, and no request is sent after `stop_after` seconds.
    `on_end` is called with the record of each request that ends, failed or not.
    """
    now = asyncio.get_running_loop().time
    free = asyncio.Semaphore(len(planned) if max_concurrency is None else max_concurrency)
    records: list[RequestRecord] = []

    async def one(request: PlannedRequest, record: RequestRecord) -> None:
        if record.ready is None:
            await free.acquire()
            record.ready = now()
        try:
            async with asyncio.timeout(timeout):
                await send(request, record)
        except RequestFailed as failure:
            record.failure = failure
        except TimeoutError:
            record.failure = RequestFailed("timeout", f"not finished after {timeout:g} s")
        except Exception as problem:  # an error here must not lose the figures of the other requests
            record.failure = RequestFailed("fault of the bench", f"{type(problem).__name__}: {problem}")
        finally:
            free.release()
        record.end = now() if record.end is None else record.end
        on_end(record)

    start = now()
    async with asyncio.TaskGroup() as tasks:
        for request in planned:
            if closed:
                await free.acquire()
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
