"""Engine that serves a model, one step at a time, in one thread."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ParamSpec, Unpack

from llmsched.engine.config import Limits, ResolvedConfig, adapter_directories
from llmsched.engine.errors import RequestError
from llmsched.engine.executor.base import Executor
from llmsched.engine.grammar.compiler import GrammarCompiler, Vocabulary
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.pins import PinState
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.output import OutputStream
from llmsched.engine.prompt_changes import PromptChanges
from llmsched.engine.request import NO_ADAPTER, FinishReason, Request, RequestOutput, prefix_key
from llmsched.engine.request_summary import MAX_SUMMARIES, RequestSummary, slowest
from llmsched.engine.sampling_params import MAX_N, SamplingParams
from llmsched.engine.scheduler.deadlines import Deadlines
from llmsched.engine.scheduler.ledger import Entry
from llmsched.engine.stats import EngineStats, StatsRecorder
from llmsched.engine.step_loop import StepLoop

if TYPE_CHECKING:
    from llmsched.engine.memory.plan import MemoryPlan
    from llmsched.engine.text.tokenizer import Tokenizer

P = ParamSpec("P")

logger = logging.getLogger(__name__)

_SEED_MASK = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
#: End of the ids of requests that compute pinned prefixes. They have no client.
_PIN_REQUEST = " of this engine"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Scheduling decisions about one choice of a request, oldest first."""

    index: int  # of the choice
    start: float  # arrival of the request, in seconds of the engine's clock
    entries: list[Entry]


class Engine(StepLoop):
    """Engine that serves a model: `add_request(...)` queues requests, and each call of `step()` computes one step.

    Not thread-safe; AsyncEngine runs an Engine in a thread. Any thread may read the attributes that never change:
    `config`, `model`, `adapters`, `tokenizer`, `plan` and `metrics`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelInfo,
        tokenizer: Tokenizer,
        executor: Executor,
        kv: KVManager,
        *,
        plan: MemoryPlan | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, kv, executor, clock)
        self.model = model
        #: Names of the LoRA adapters that requests can use.
        self.adapters = tuple(adapter_directories(config.lora))
        self.tokenizer = tokenizer
        self.plan = plan
        self.metrics = metrics or EngineMetrics(model.name, config.block_size, kv.pool.num_blocks)
        if plan is not None:
            self.metrics.add_memory(plan.parts, self.scheduler.kv_usage())
        self.prefixes = PrefixAdmin(self)
        self._deadlines = Deadlines(self.scheduler, clock)
        self.recorder = StatsRecorder(self.scheduler, self.metrics, clock)
        self._streams: dict[str, OutputStream] = {}
        #: Names of the sequences that have not ended, by request id.
        self.open_sequences: dict[str, list[str]] = {}
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._finish_times: deque[float] = deque(maxlen=64)
        self._ended: deque[RequestSummary] = deque(maxlen=MAX_SUMMARIES)
        self._failing: set[str] = set()
        self._mask_seconds = executor.mask_seconds
        #: Number of the latest sampled rows, in succession, for which the model computed no usable logits.
        self.num_bad_rows = 0

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of the grammars for SamplingParams. Any thread may use it; the first use takes up to a second."""
        vocabulary = Vocabulary(self.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
        return GrammarCompiler(vocabulary, partial(self.metrics.observe, "grammar_compile_seconds"))

    # -- requests ---------------------------------------------------------------------------------------------

    def check(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise RequestError for a request that can never be served. Any thread may call this."""
        if not prompt_token_ids:
            raise RequestError("prompt", "the prompt has no tokens; at least one is needed")
        self.check_length(len(prompt_token_ids), sampling.max_tokens)
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

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        arrival_time: float | None = None,
        deadline: float = math.inf,
        limit_queue: bool = True,
    ) -> None:
        """Queue a request. Each of its n choices becomes a sequence. If an error is raised, nothing is queued.

        `adapter` is one of `adapters` (None: the model as it is). `arrival_time` (default: now) and `deadline` are in
        seconds of the engine's clock. A choice that cannot end by the deadline is dropped with FinishReason.DEADLINE.
        Raises RequestError for a request that can never be served, for an unknown adapter, or if `request_id` is in
        use. With `limit_queue`, raises QueueFullError if more than max_queue_size sequences would wait.
        """
        if request_id in self.open_sequences:
            raise RequestError("request_id", f"{request_id!r} is in use by a request that has not ended")
        self.check(prompt_token_ids, sampling)
        number = self.adapter_index(adapter)
        if limit_queue:
            self.check_queue(len(self.scheduler.waiting), sampling.n)
        arrival = self.clock() if arrival_time is None else arrival_time
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        eos_ids = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
        names = [_sequence_name(request_id, index) for index in range(sampling.n)]
        try:
            for index, name in enumerate(names):
                request = Request(
                    request_id=name,
                    token_ids=list(prompt_token_ids),
                    num_prompt_tokens=len(prompt_token_ids),
                    sampling=sampling,
                    # The first choice uses the request's seed unchanged, so that its output does not depend on n.
                    seed=(seed + index * _GOLDEN_RATIO) & _SEED_MASK,
                    stop_ids=eos_ids | frozenset(sampling.stop_token_ids),
                    adapter=number,
                    arrival_time=arrival,
                    priority=priority,
                    cache_salt=cache_salt,
                    deadline=deadline,
                )
                self._streams[name] = OutputStream(request, request_id, index, self.tokenizer)
                self.scheduler.add(request)
                if adapter is not None:
                    self.scheduler.ledger.note(name, "adapter", name=adapter)
                self._deadlines.watch(request)
        except Exception:
            for name in self._streams.keys() & names:
                self.scheduler.finish(self._streams.pop(name).request, FinishReason.ERROR)
            raise
        self.open_sequences[request_id] = names
        self.recorder.prompt_tokens += len(prompt_token_ids)
        self.observe(self.recorder.update)

    def adapter_index(self, name: str | None) -> int:
        """Return the index of an adapter, NO_ADAPTER for None. Raises RequestError for an unknown name."""
        if name is None:
            return NO_ADAPTER
        if name not in self.adapters:
            raise RequestError("model", f"there is no adapter {name!r}; there are {', '.join(self.adapters) or 'none'}")
        return self.adapters.index(name)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request in any state. Return the last output of each choice that had not ended."""
        names = list(self.open_sequences.get(request_id, ()))
        outputs = [self._drop(self._streams[name], FinishReason.ABORT) for name in names]
        self.observe(self.recorder.update)
        return outputs

    def _drop(self, stream: OutputStream, reason: FinishReason, error: str | None = None) -> RequestOutput:
        self.scheduler.finish(stream.request, reason)
        output = stream.new_output(reason, error)
        self._end(stream, output)
        return output

    def check_deadline(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        *,
        deadline: float,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> None:
        """Raise DeadlineError if the first tokens of requests with these prompts are predicted after `deadline`."""
        now = self.clock()
        new = [
            Request(
                f"prompt {index}",
                prompt,
                len(prompt),
                SamplingParams(max_tokens=max_tokens),
                seed=0,
                stop_ids=frozenset(),
                adapter=self.adapter_index(adapter),
                arrival_time=now,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._deadlines.check(new, deadline)

    def retry_after(self) -> float:
        if len(self._finish_times) < 2:
            return 1.0
        span = self._finish_times[-1] - self._finish_times[0]
        return max(1.0, span / (len(self._finish_times) - 1))

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the new outputs.

        While the scheduler waits for more requests, nothing is computed. If this method raises an exception, the
        engine cannot continue. If the text of an output cannot be made, only that sequence ends, with
        FinishReason.ERROR.
        """
        outputs = [
            self._drop(self._streams[request.request_id], FinishReason.DEADLINE, reason)
            for request, reason in self._deadlines.take_hopeless()
        ]
        if self.idle_until() is not None:
            return outputs
        plan, updates = self.run_step()
        now = self.clock()
        for update in updates:
            if (last := update.result.last).error is not None:
                self.num_bad_rows += not last.caused_by_request
            elif update.result.token_id is not None:
                self.num_bad_rows = 0
            stream = self._streams[update.request.request_id]
            try:
                output = stream.take(update)
            except Exception as error:  # this error ends only this output
                logger.exception("request %s, choice %d: its output failed", stream.group_id, stream.index)
                message = f"its output failed with {type(error).__name__}; the log has more"
                output = stream.new_output(FinishReason.ERROR, message)
            if output is None:
                continue
            outputs.append(output)
            if output.token_ids:
                self.recorder.generation_tokens += len(output.token_ids)
                self.observe(stream.record, self.metrics, now, len(output.token_ids))
            if output.finish_reason is not None:
                self.scheduler.finish(stream.request, output.finish_reason)
                self._end(stream, output)
        if (mask_seconds := self.executor.mask_seconds) > self._mask_seconds:
            self.observe(self.metrics.observe, "grammar_mask_seconds", mask_seconds - self._mask_seconds)
            self._mask_seconds = mask_seconds
        self.observe(self.prefixes.changes.update)
        self.observe(self.metrics.observe, "iteration_tokens_total", plan.num_tokens)
        self.recorder.steps += 1
        self.observe(self.recorder.update)
        return outputs

    def observe(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function whose failure must not stop serving, such as an update of statistics. Log its errors."""
        # If several calls of the same function fail, only the first error is logged, until a call succeeds again.
        try:
            function(*args, **kwargs)
        except Exception:
            name = getattr(function, "__qualname__", repr(function))
            if name not in self._failing:
                self._failing.add(name)
                logger.exception("%s failed; serving continues without it", name)
        else:
            if self._failing:
                self._failing.discard(getattr(function, "__qualname__", repr(function)))

    def _end(self, stream: OutputStream, last: RequestOutput) -> None:
        now, reason = self.clock(), last.finish_reason
        assert reason is not None
        summary = stream.summary(reason, now)
        last.record = summary.record
        self.observe(stream.record_end, self.metrics, reason, now)
        self.recorder.finished[reason] += 1
        self._finish_times.append(now)
        if not stream.group_id.endswith(_PIN_REQUEST):
            self._ended.append(summary)
        name = stream.request.request_id
        del self._streams[name]
        names = self.open_sequences[stream.group_id]
        names.remove(name)
        if not names:
            del self.open_sequences[stream.group_id]

    # -- state ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self.recorder.stats()

    def reconfigure(self, **limits: Unpack[Limits]) -> None:
        super().reconfigure(**limits)
        self.observe(self.recorder.update)

    def explain(self, request_id: str) -> list[Timeline]:
        """Return the scheduler's decisions about a request, with one Timeline for each choice.

        The list is empty if the request is unknown or ended long ago.
        """
        timelines = []
        for index in range(MAX_N):
            entries = self.scheduler.ledger.entries(_sequence_name(request_id, index))
            if not entries:
                break
            timelines.append(Timeline(index, entries[0].time, [replace(entry) for entry in entries]))
        return timelines

    def slowest(self, count: int) -> list[RequestSummary]:
        """Return the requests whose clients waited longest for a token, slowest first, each with its slowest choice.

        At most `count` are returned, of all open requests and of the latest MAX_SUMMARIES ended sequences, except those
        that compute pinned prefixes.
        """
        now = self.clock()
        streams = (each for each in self._streams.values() if not each.group_id.endswith(_PIN_REQUEST))
        return slowest([*self._ended, *(stream.summary(None, now) for stream in streams)], count)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        assert waiting + running == len(self._streams), f"{len(self._streams)} streams, {running}+{waiting} requests"


class PrefixAdmin:
    """Administration of an engine's prefix cache: pins, reset, and the check for prompts that differ at an early token.

    For use in the engine's thread only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kv = engine.scheduler.kv
        self.changes = PromptChanges(self._kv.prefix_cache.misses.watch, engine.tokenizer, engine.metrics)

    def reset(self) -> None:
        """Drop all cached KV that neither a running request nor a pin holds."""
        self._kv.prefix_cache.drop()
        self._engine.observe(self._engine.recorder.update)

    def pin(
        self, token_ids: list[int], *, cache_salt: str = "", adapter: str | None = None, ttl: float | None = None
    ) -> PinState:
        """Keep the KV of a prefix's whole blocks for `ttl` seconds (None: until `unpin(...)`).

        The next steps compute the tokens that are not cached yet. Raises RequestError if the prefix is shorter than a
        block, if there is no room for the pin, if prefix caching is off, or for an unknown adapter.
        """
        engine = self._engine
        if not engine.config.enable_prefix_caching:
            raise RequestError("prefix", "prefix caching is off on this server: nothing can be pinned")
        sampling = SamplingParams(max_tokens=0)
        engine.check(token_ids, sampling)
        engine.scheduler.expire_pins()
        key = prefix_key(engine.adapter_index(adapter), cache_salt)
        pin = self._kv.pins.pin(token_ids, key, ttl, engine.clock())
        name = pin.pin_id + _PIN_REQUEST
        if pin.num_written_tokens < pin.num_tokens and name not in engine.open_sequences:
            try:
                engine.add_request(
                    name,
                    token_ids[: pin.num_tokens],
                    sampling,
                    cache_salt=cache_salt,
                    adapter=adapter,
                    limit_queue=False,
                )
            except Exception:
                engine.scheduler.unpin(pin.pin_id)
                raise
        engine.observe(engine.recorder.update)
        return pin

    def unpin(self, pin_id: str) -> None:
        """Release a pinned prefix. Raises RequestError if no pin has this id."""
        self._engine.scheduler.unpin(pin_id)
        self._engine.observe(self._engine.recorder.update)

    def expire(self) -> float | None:
        """Release expired pins. Return the time (engine's clock) of the next expiry, or None if no pin will expire."""
        self._engine.scheduler.expire_pins()
        self._engine.observe(self._engine.recorder.update)
        return self._kv.pins.next_expiry()

    def pins(self) -> list[PinState]:
        self._engine.scheduler.expire_pins()
        return self._kv.pins.states()


def _sequence_name(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"
