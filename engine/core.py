"""The engine: schedule -> execute -> update -> emit, one step at a time, in one thread."""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from llmsched.engine.config import Limits, ResolvedConfig, check_limits
from llmsched.engine.errors import ConfigError, RequestError
from llmsched.engine.executor.base import Executor
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.pins import PinState
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.output import OutputStream
from llmsched.engine.prompt_changes import PromptChange, PromptChanges
from llmsched.engine.refusals import check_length, check_queue
from llmsched.engine.request import MAX_N, FinishReason, Request, RequestOutput, SamplingParams
from llmsched.engine.scheduler.ledger import Entry
from llmsched.engine.scheduler.policies import make_scheduler
from llmsched.engine.scheduler.scheduler import Update
from llmsched.engine.stats import Accounts, EngineStats

if TYPE_CHECKING:
    from llmsched.engine.memory.plan import MemoryPlan
    from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SEED_MASK = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Timeline:
    """The ledger of one sequence (choice `index` of its request), which arrived at `start` by the engine's clock."""

    index: int
    start: float
    entries: list[Entry]


class Engine:
    """A model being served: takes requests, and with each `step` brings them one forward pass further.

    Not thread-safe; AsyncEngine runs it in a thread of its own. The limits of `config` are within what `plan` reserved
    memory for.
    `swap` are the slots that the executor has for preempted requests, `layout` is how its cache is laid out (default:
    all layers keep all tokens).
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelInfo,
        tokenizer: Tokenizer,
        executor: Executor,
        num_blocks: int,
        *,
        plan: MemoryPlan | None = None,
        swap: SwapSpace | None = None,
        layout: KVLayout | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.plan = plan
        self.executor = executor
        self.metrics = metrics or EngineMetrics(model.name, config.block_size, num_blocks)
        self._clock = clock
        kv = make_kv(config, num_blocks, swap, layout)
        self.scheduler = make_scheduler(kv, config, clock)
        if plan is not None:
            self.metrics.divided(plan.parts, self.scheduler.kv_use())
        self._accounts = Accounts(self.scheduler, self.metrics, clock)
        self._changes = PromptChanges(kv.prefix_cache.misses.watch, tokenizer, self.metrics)
        self._streams: dict[str, OutputStream] = {}
        self._groups: dict[str, list[str]] = {}
        self._seeds = random.Random(config.seed) if config.seed is not None else None
        #: Is told after each step, by the engine's thread, how KV memory is used before those that ended give it back.
        self.on_step: Callable[[KVUsage], None] | None = None
        self._finish_times: deque[float] = deque(maxlen=64)

    # -- requests ---------------------------------------------------------------------------------------------

    def check(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise RequestError for what can never be served. Reads only what never changes: any thread may call."""
        if not prompt_token_ids:
            raise RequestError("prompt", "the prompt has no tokens; at least one is needed")
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if not 0 <= min(ids, default=0) <= max(ids, default=0) < self.model.vocab_size:
                wrong = next(i for i in ids if not 0 <= i < self.model.vocab_size)
                raise RequestError(
                    name, f"{name} has the token id {wrong}; allowed is from 0 to {self.model.vocab_size - 1}"
                )
        check_length(self.scheduler, self.config.max_model_len, len(prompt_token_ids), sampling.max_tokens)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request; its n choices are served as n sequences.

        `arrival_time` is when it came, by the engine's clock (`now`); None: at this moment.
        Raises RequestError for what can never be served, QueueFullError when too many wait.
        """
        if request_id in self._groups:
            raise RequestError("request_id", f"{request_id!r} is in use by a request that has not ended")
        self.check(prompt_token_ids, sampling)
        check_queue(len(self.scheduler.waiting), sampling.n, self.config.max_queue_size, self.retry_after)
        self._queue(request_id, prompt_token_ids, sampling, priority, cache_salt, arrival_time)

    def _queue(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str,
        arrival_time: float | None,
    ) -> None:
        arrival = self._clock() if arrival_time is None else arrival_time
        seed = self._seed_of(sampling)
        eos_ids = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
        names = [_sequence_name(request_id, index) for index in range(sampling.n)]
        for index, name in enumerate(names):
            request = Request(
                request_id=name,
                token_ids=list(prompt_token_ids),
                num_prompt_tokens=len(prompt_token_ids),
                sampling=sampling,
                seed=_choice_seed(seed, index),
                stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
                arrival_time=arrival,
                priority=priority,
                cache_salt=cache_salt,
            )
            self._streams[name] = OutputStream(request, request_id, index, self.tokenizer)
            self.scheduler.add(request)
        self._groups[request_id] = names
        self._accounts.prompt_tokens += len(prompt_token_ids)
        self._accounts.update()

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request in whatever state it is; unknown or ended ones are ignored. Returns the last outputs."""
        outputs = []
        for name in list(self._groups.get(request_id, ())):
            stream = self._streams[name]
            self.scheduler.finish(stream.request, FinishReason.ABORT)
            outputs.append(stream.end(FinishReason.ABORT))
            self._end(stream, FinishReason.ABORT)
        self._accounts.update()
        return outputs

    def now(self) -> float:
        """The engine's clock, in seconds; any thread may ask."""
        return self._clock()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def idle_until(self) -> float | None:
        """Until when (by the engine's clock) a step would do nothing unless more requests come, if that is so."""
        return self.scheduler.idle_until()

    def retry_after(self) -> float:
        """Seconds until the queue will have moved on by one place, from the rate at which requests ended lately."""
        if len(self._finish_times) < 2:
            return 1.0
        span = self._finish_times[-1] - self._finish_times[0]
        return max(1.0, math.ceil(span / (len(self._finish_times) - 1)))

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One forward pass over whatever is due; returns what the requests gained by it.

        Does nothing while the scheduler waits for more requests (`idle_until`). An exception means that the engine
        cannot go on; one that concerns the text of a single output ends that one alone.
        """
        if self.idle_until() is not None:
            return []
        plan = self.scheduler.schedule()
        if not plan.rows:
            raise RuntimeError(f"nothing to schedule with {len(self.scheduler.waiting)} requests waiting")
        result = self.executor.execute(plan)
        if self.on_step is not None:
            self.on_step(self.scheduler.kv_use(plan))
        updates = self.scheduler.update(plan, result)
        now = self._clock()
        outputs = []
        for update in updates:
            stream = self._streams[update.request.request_id]
            if (output := _take(stream, update)) is not None:
                outputs.append(output)
                self._account(stream, output, now)
        self._changes.update()
        self.metrics.step(plan.num_tokens)
        self._accounts.steps += 1
        self._accounts.update()
        return outputs

    def _account(self, stream: OutputStream, output: RequestOutput, now: float) -> None:
        if output.token_ids:
            self._accounts.generation_tokens += len(output.token_ids)
            stream.record(self.metrics, now)
        if output.finish_reason is not None:
            self.scheduler.finish(stream.request, output.finish_reason)
            self._end(stream, output.finish_reason)

    def _end(self, stream: OutputStream, reason: FinishReason) -> None:
        now = self._clock()
        stream.record_end(self.metrics, reason, now)
        self._accounts.finished[reason] += 1
        self._finish_times.append(now)
        name = stream.request.request_id
        del self._streams[name]
        self._groups[stream.group_id].remove(name)
        if not self._groups[stream.group_id]:
            del self._groups[stream.group_id]

    # -- state ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._accounts.stats()

    def kv_use(self) -> KVUsage:
        """How KV memory is used now."""
        return self.scheduler.kv_use()

    def reconfigure(self, **limits: Unpack[Limits]) -> None:
        """Change the limits of a step while no request runs, within what memory was reserved for at the start.

        Raises ConfigError for more than that, and for what EngineConfig does not allow.
        """
        if self.scheduler.running:
            raise ConfigError(next(iter(limits), "limits"), "cannot be changed while requests run; wait until they end")
        check_limits(self.config, limits)
        self.scheduler.configure(**limits)
        self._accounts.update()

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all prompts that are not running."""
        self.scheduler.kv.pool.drop_cached()
        self._accounts.update()

    def pin_prefix(self, token_ids: list[int], *, cache_salt: str = "", ttl: float | None = None) -> PinState:
        """Compute and keep the KV of a prompt's beginning (whole blocks) for `ttl` seconds (None: until deleted).

        What is not in the cache is computed as a request of its own, which counts as one; the queue is never too full
        for it. Raises RequestError when there is no whole block, no room for it, or no prefix cache.
        """
        if not self.config.enable_prefix_caching:
            raise RequestError("prefix", "prefix caching is off on this server: nothing can be pinned")
        sampling = SamplingParams(max_tokens=0)
        self.check(token_ids, sampling)
        self.scheduler.expire_pins()
        pin = self.scheduler.kv.pins.pin(token_ids, cache_salt, ttl, self._clock())
        name = f"{pin.pin_id} of this engine"
        if pin.num_written_tokens < pin.num_tokens and name not in self._groups:
            self._queue(name, token_ids[: pin.num_tokens], sampling, 0, cache_salt, None)
        self._accounts.update()
        return pin

    def unpin_prefix(self, pin_id: str) -> None:
        """Let go of a pinned prefix. Raises RequestError if there is none of that name."""
        self.scheduler.unpin(pin_id)
        self._accounts.update()

    def expire_pins(self) -> float | None:
        """Let go of the pins whose time is over, also while nothing runs; tells when that of the next one is."""
        self.scheduler.expire_pins()
        self._accounts.update()
        return self.scheduler.kv.pins.next_expiry()

    def pinned_prefixes(self) -> list[PinState]:
        """All pins whose time is not over, oldest first; `expires_at` is a time of the engine's clock."""
        self.scheduler.expire_pins()
        return self.scheduler.kv.pins.states()

    def prompt_change(self) -> PromptChange | None:
        """What changes early in the latest prompts and keeps them from the prefix cache, if there is such a thing."""
        return self._changes.look()

    def explain(self, request_id: str) -> list[Timeline]:
        """What the scheduler decided about a request, for each of its sequences; empty if unknown or long gone."""
        timelines = []
        for index in range(MAX_N):
            entries = self.scheduler.ledger.entries(_sequence_name(request_id, index))
            if not entries:
                break
            timelines.append(Timeline(index, entries[0].time, [replace(entry) for entry in entries]))
        return timelines

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or a request is lost."""
        self.scheduler.check_integrity()
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        assert waiting + running == len(self._streams), f"{len(self._streams)} streams, {running}+{waiting} requests"

    def _seed_of(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        return self._seeds.getrandbits(63) if self._seeds is not None else secrets.randbits(63)


def _take(stream: OutputStream, update: Update) -> RequestOutput | None:
    """What the stream makes of a step's result. Whatever goes wrong there must not end the others."""
    try:
        return stream.take(update)
    except Exception as error:
        logger.exception("request %s, choice %d: its output failed", stream.group_id, stream.index)
        return stream.end(FinishReason.ERROR, f"its output failed with {type(error).__name__}; the log has more")


def _sequence_name(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"


def _choice_seed(seed: int, index: int) -> int:
    """An independent stream for each choice; the first has the request's own seed, so that n does not change it."""
    return (seed + index * _GOLDEN_RATIO) & _SEED_MASK
