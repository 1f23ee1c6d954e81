"""AsyncEngine: streams, aborts, drain, failure. Each step waits until the test allows it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from configs import resolved
from engines import tokenizer
from exposition import samples
from scripted import Script, ScriptedExecutor
from tiny_models import VOCAB_SIZE

from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.executor.simulated_executor import VirtualClock
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.request import FinishReason, RequestOutput
from llmsched.engine.request_stream import RequestStream
from llmsched.engine.sampling_params import SamplingParams

T = TypeVar("T")

#: Only so that a fault ends a test instead of hanging it.
PATIENCE_S = 30.0


class Stepwise(ScriptedExecutor):
    """Executor that computes a step only when `allow` permits it, and reports when a step has begun."""

    def __init__(self) -> None:
        super().__init__(Script(list(range(97, 123))))
        self._permits = threading.Semaphore(0)
        self._free = False
        self.begun: asyncio.Queue[StepPlan] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def execute(self, plan: StepPlan) -> StepResult:
        self._loop.call_soon_threadsafe(self.begun.put_nowait, plan)
        if not self._free:
            assert self._permits.acquire(timeout=PATIENCE_S)
        return super().execute(plan)

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.release()

    def run_freely(self) -> None:
        self._free = True
        self.allow()


class Service:
    """An AsyncEngine on a Stepwise executor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **config: Any) -> None:
        settings = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 2} | config
        self.executor = Stepwise()
        info = ModelInfo("scripted", "llama", VOCAB_SIZE, 512, frozenset({2}))
        resolved_config = resolved(**settings)
        kv = make_kv(resolved_config, 64)
        self.engine = Engine(resolved_config, info, tokenizer(), self.executor, kv, clock=clock)
        self.service = AsyncEngine(self.engine)
        self.clock: Any = clock

    def submit(self, name: str, length: int = 4, max_tokens: int = 4, **sampling: Any) -> RequestStream:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **sampling)
        return self.service.submit(name, list(range(100, 100 + length)), params)

    async def begun(self) -> StepPlan:
        """Wait until the engine is inside its next step."""
        return await patient(self.executor.begun.get())


async def patient(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Service]:
    made = Service(**settings)
    made.service.start()
    try:
        yield made
    finally:
        made.executor.run_freely()
        await patient(made.service.stop())


def scenario(**settings: Any) -> Callable[[Callable[[Service], Awaitable[None]]], Callable[[], None]]:
    """Return a decorator that runs an async test on a new event loop, with a running service of these settings."""

    def decorate(test: Callable[[Service], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            async with running(**settings) as it:
                await test(it)

        def run() -> None:
            asyncio.run(patient(main()))

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


async def read(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def settled(service: AsyncEngine) -> None:
    """Wait until the engine has run all actions sent so far."""
    await patient(service.call(lambda core: core.prefixes.reset()))


# -- streams --------------------------------------------------------------------------------------------------


@scenario()
async def test_outputs_come_in_order_and_end(it: Service) -> None:
    it.executor.run_freely()
    outputs = await read(it.submit("a", max_tokens=5))
    assert [token for output in outputs for token in output.token_ids] == [97, 98, 99, 100, 101]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert [output.num_output_tokens for output in outputs] == [
        sum(len(output.token_ids) for output in outputs[: number + 1]) for number in range(len(outputs))
    ]
    assert it.service.stats().generation_tokens == 5
    assert it.service.healthy


@scenario(max_num_seqs=8)
async def test_the_outputs_of_all_choices_come_through_one_stream(it: Service) -> None:
    it.executor.run_freely()
    outputs = await read(it.submit("a", n=3))
    assert sorted(o.index for o in outputs if o.finished) == [0, 1, 2]
    assert [sum(len(o.token_ids) for o in outputs if o.index == index) for index in range(3)] == [4, 4, 4]


@scenario(max_num_seqs=3)
async def test_a_slow_reader_gets_everything_in_one_output_of_each_choice(it: Service) -> None:
    count = 300
    slow = it.submit("slow", max_tokens=count, logprobs=1, n=2)
    quick = it.submit("quick", max_tokens=count)
    it.executor.run_freely()
    await read(quick)
    outputs = await read(slow)
    assert [output.index for output in outputs] == [0, 1]
    for output in outputs:
        assert output.token_ids == [97 + position % 26 for position in range(count)]
        assert output.text == it.service.core.tokenizer.decode(output.token_ids)
        assert [entry.token_id for entry in output.logprobs or []] == output.token_ids
        assert "".join(output.pieces) == output.text
        assert output.num_output_tokens == count
        assert output.finish_reason is FinishReason.LENGTH


@scenario()
async def test_an_output_that_is_not_passed_on_is_read(it: Service) -> None:
    stream = it.submit("a", max_tokens=6)
    answers = iter([True, False])

    def pass_on(output: RequestOutput) -> bool:
        return next(answers)  # raises StopIteration at the third output

    stream.pass_on = pass_on
    for _ in range(6):
        await it.begun()
        it.executor.allow()
    outputs = await read(stream)
    assert [token for output in outputs for token in output.token_ids] == [98, 99, 100, 101, 102]


@scenario()
async def test_outputs_that_a_busy_event_loop_delivers_late_are_passed_on_as_one(it: Service) -> None:
    stream, passed_on = it.submit("a", max_tokens=6), []

    def pass_on(output: RequestOutput) -> bool:
        passed_on.append(output.token_ids)
        return False

    stream.pass_on = pass_on
    it.executor.run_freely()
    while len(it.service._streams.posted) < 6:
        time.sleep(0)  # the event loop must not run
    assert [output.num_output_tokens for output in await read(stream)] == [6]
    assert passed_on == [[97, 98, 99, 100, 101, 102]]


@scenario()
async def test_an_id_is_in_use_until_its_request_has_ended(it: Service) -> None:
    first = it.submit("a")
    with pytest.raises(RequestError, match="in use"):
        it.submit("a")
    it.executor.run_freely()
    assert (await read(first))[-1].finish_reason is FinishReason.LENGTH
    assert (await read(it.submit("a")))[-1].finish_reason is FinishReason.LENGTH


# -- abort ----------------------------------------------------------------------------------------------------


@scenario(max_num_batched_tokens=32)
async def test_abort_while_waiting_prefilling_and_decoding(it: Service) -> None:
    decoding = it.submit("decoding", max_tokens=400)
    await it.begun()
    prefilling, waiting = it.submit("prefilling", length=200), it.submit("waiting")
    it.executor.allow()
    await it.begun()  # the second step, with the first chunk
    assert len((await patient(anext(decoding))).token_ids) == 1
    streams = [waiting, prefilling, decoding]
    for stream in streams:
        stream.abort()
    it.executor.allow()
    for stream in streams:
        assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
        assert stream.finished
    await settled(it.service)
    stats = it.service.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.finished[FinishReason.ABORT] == 3


@scenario()
async def test_abort_before_the_engine_has_taken_the_request(it: Service) -> None:
    other = it.submit("other", max_tokens=2)
    await it.begun()  # the engine is inside a step, so what follows stays in its inbox
    stream = it.submit("a")
    stream.abort()
    it.executor.allow(2)
    assert [output.finish_reason for output in await read(stream)] == [FinishReason.ABORT]
    await read(other)
    assert it.service.stats().finished[FinishReason.ABORT] == 1


@scenario()
async def test_leaving_a_stream_aborts_its_request(it: Service) -> None:
    async with it.submit("a", max_tokens=400) as stream:
        it.executor.allow()
        await patient(anext(stream))
    it.executor.allow()
    closed = it.submit("b", max_tokens=400, n=2)
    closed.abort()
    it.executor.run_freely()
    await read(closed)
    await settled(it.service)
    assert it.service.stats().finished[FinishReason.ABORT] == 3
    assert it.service.stats().num_running == 0


@scenario()
async def test_abort_after_the_end_does_nothing(it: Service) -> None:
    it.executor.run_freely()
    stream = it.submit("a")
    await read(stream)
    stream.abort()
    await settled(it.service)
    assert it.service.stats().finished[FinishReason.ABORT] == 0


@scenario()
async def test_many_short_lived_requests_leave_nothing(it: Service) -> None:
    """Submit and abort 50 requests with n=2; afterwards neither the service nor the engine knows any request."""
    for number in range(50):
        it.executor.allow()  # one step each, so that no request reaches its 400 tokens
        async with it.submit(f"r{number}", max_tokens=400, n=2):
            pass
    it.executor.run_freely()
    await settled(it.service)
    stats = it.service.stats()
    assert stats.finished[FinishReason.ABORT] == 100
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    it.engine.check_integrity()
    assert await patient(it.service.drain(PATIENCE_S))


# -- time -----------------------------------------------------------------------------------------------------


@scenario(clock=VirtualClock())
async def test_time_counts_from_submission_not_from_the_end_of_the_step_that_runs_then(it: Service) -> None:
    first = it.submit("first", max_tokens=1)
    await it.begun()
    it.clock.now = 5.0
    second = it.submit("second", max_tokens=1)
    it.clock.now = 9.0
    it.executor.allow()
    await read(first)
    await it.begun()
    it.clock.now = 12.0
    it.executor.allow()
    await read(second)
    await settled(it.service)
    found = samples(it.engine.metrics)
    assert found["llmsched:time_to_first_token_seconds_sum"] == 9 + 7
    assert found["llmsched:e2e_request_latency_seconds_sum"] == 9 + 7
    assert found["llmsched:request_queue_time_seconds_sum"] == 0 + 4


@scenario(clock=lambda: 1e6 + time.monotonic(), schedule_window=0.01, min_schedule_batch=2)
async def test_the_window_of_the_scheduler_is_measured_with_the_engines_clock(it: Service) -> None:
    it.executor.run_freely()
    assert (await read(it.submit("a")))[-1].finish_reason is FinishReason.LENGTH


@scenario(clock=VirtualClock(), schedule_window=10, min_schedule_batch=2)
async def test_stop_does_not_wait_for_the_window_of_the_scheduler(it: Service) -> None:
    waiting = threading.Event()

    def until() -> float:
        waiting.set()
        return 10 * PATIENCE_S

    it.engine.idle_until = until  # type: ignore[method-assign]
    stream = it.submit("a")
    await patient(asyncio.to_thread(waiting.wait))
    await patient(it.service.stop())
    with pytest.raises(EngineDeadError, match="has shut down"):
        await read(stream)


@scenario(clock=VirtualClock())
async def test_pins_expire_in_an_idle_engine_without_calls(it: Service) -> None:
    it.executor.run_freely()
    await it.service.call(lambda core: core.prefixes.pin(list(range(40)), ttl=0.02))
    await until(lambda: it.service.stats().blocks_pinned == 2)
    await asyncio.sleep(0.05)
    assert it.service.stats().blocks_pinned == 2, "it is the engine's clock that counts"
    it.clock.now = 1.0
    await until(lambda: it.service.stats().blocks_pinned == 0)
    assert samples(it.engine.metrics)["llmsched:kv_blocks_pinned"] == 0
    assert it.engine.scheduler.kv.pool.num_used == 0


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# -- admission ------------------------------------------------------------------------------------------------


@scenario()
async def test_a_bad_request_is_refused_at_once(it: Service) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        it.service.submit("a", [], SamplingParams())
    with pytest.raises(RequestError, match="512"):
        it.submit("a", length=100, max_tokens=500)
    assert await patient(it.service.drain(PATIENCE_S))


@scenario(max_queue_size=3)
async def test_a_full_queue_counts_requests_that_the_engine_has_not_taken_yet(it: Service) -> None:
    first = it.submit("first")
    await it.begun()
    waiting = [it.submit(name) for name in "abc"]
    with pytest.raises(QueueFullError, match="3 requests are waiting; at most 3 may"):
        it.submit("d")
    it.executor.run_freely()
    for stream in (first, *waiting):
        assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
    assert (await read(it.submit("d")))[-1].finish_reason is FinishReason.LENGTH


@scenario()
async def test_a_late_refusal_ends_the_stream_with_it(it: Service) -> None:
    late = QueueFullError("too many wait", retry_after=2.0)

    def refuse(*args: object, **more: object) -> None:
        raise late

    it.engine.add_request = refuse  # type: ignore[method-assign]
    stream = it.submit("a")
    with pytest.raises(QueueFullError) as caught:
        await patient(anext(stream))
    assert caught.value is late
    assert stream.finished
    assert it.service.healthy
    assert await patient(it.service.drain(PATIENCE_S))


# -- the end --------------------------------------------------------------------------------------------------


@scenario()
async def test_drain_waits_for_open_requests_and_refuses_new_ones(it: Service) -> None:
    stream = it.submit("a")
    await it.begun()
    draining = asyncio.create_task(it.service.drain(PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        it.submit("b")
    assert not draining.done()
    it.executor.run_freely()
    assert await patient(draining)
    assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH
    assert it.service.draining


@scenario()
async def test_drain_waits_for_the_last(it: Service) -> None:
    short, long = it.submit("short", max_tokens=1), it.submit("long", max_tokens=400)
    draining = asyncio.create_task(it.service.drain(PATIENCE_S))
    it.executor.allow()
    assert (await read(short))[-1].finish_reason is FinishReason.LENGTH
    it.executor.allow(3)
    num_tokens = 0
    while num_tokens < 3:
        num_tokens += len((await patient(anext(long))).token_ids)
    assert not draining.done()
    it.executor.run_freely()
    await read(long)
    assert await patient(draining)


@scenario()
async def test_drain_gives_up_in_time_and_stop_fails_what_is_left(it: Service) -> None:
    stream = it.submit("a", max_tokens=400)
    await it.begun()
    assert not await patient(it.service.drain(0.01))
    stopping = asyncio.create_task(it.service.stop())
    await asyncio.sleep(0)
    it.executor.allow()
    await patient(stopping)
    with pytest.raises(EngineDeadError, match="has shut down"):
        await read(stream)
    with pytest.raises(EngineDeadError):
        await it.service.call(lambda core: core.prefixes.reset())
    assert not it.service.healthy


@scenario()
async def test_an_idle_service_drains_at_once(it: Service) -> None:
    assert await it.service.drain(0.01)


@scenario()
async def test_a_failure_ends_every_stream_and_makes_the_engine_unhealthy(it: Service) -> None:
    streams = [it.submit(name, max_tokens=400) for name in "abc"]
    it.executor.allow()
    await patient(anext(streams[0]))
    it.executor.script.fail_at_step = 1
    it.executor.allow()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="RuntimeError: scripted failure"):
            await read(stream)
    assert not it.service.healthy
    assert it.service.error == "RuntimeError: scripted failure"
    with pytest.raises(EngineDeadError, match="scripted failure"):
        it.submit("d")
    with pytest.raises(EngineDeadError, match="scripted failure"):
        await it.service.call(lambda core: core.reconfigure(max_num_seqs=1))
    streams[0].abort()
    assert await patient(it.service.drain(PATIENCE_S))


@scenario()
async def test_a_failure_ends_calls_that_wait_for_the_engine(it: Service) -> None:
    stream = it.submit("a")
    await it.begun()
    call = asyncio.create_task(it.service.call(lambda core: core.prefixes.reset()))
    await asyncio.sleep(0)
    it.executor.script.fail_at_step = 0
    it.executor.allow()
    with pytest.raises(EngineDeadError):
        await patient(call)
    with pytest.raises(EngineDeadError):
        await read(stream)


@scenario()
async def test_an_error_in_one_row_ends_only_that_request(it: Service) -> None:
    it.executor.script.row_error = "logits are not numbers"
    stream, other = it.submit("a"), it.submit("b")
    it.executor.run_freely()
    last = (await read(stream))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "logits are not numbers")
    assert (await read(other))[-1].finish_reason is FinishReason.LENGTH
    assert it.service.healthy


# -- reconfigure ----------------------------------------------------------------------------------------------


@scenario()
async def test_limits_change_within_what_was_planned(it: Service) -> None:
    it.executor.run_freely()
    await it.service.call(lambda core: core.reconfigure(max_num_batched_tokens=8, max_num_seqs=1))
    await read(it.submit("a", length=20))
    first = await it.begun()
    assert first.num_tokens == 8
    await it.service.call(lambda core: core.reconfigure(max_num_batched_tokens=64, max_num_seqs=2))
    for settings in ({"max_num_batched_tokens": 65}, {"max_num_seqs": 3}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError, match="allowed is from 1 to"):
            await it.service.call(lambda core, limits=settings: core.reconfigure(**limits))
    assert it.service.healthy


@scenario()
async def test_headroom_and_target_change_too(it: Service) -> None:
    it.executor.run_freely()
    await it.service.call(lambda core: core.reconfigure(headroom=0.2, target_itl=0.05))
    assert it.service.stats().headroom == 0.2
    await it.service.call(lambda core: core.reconfigure(target_itl=None))
    assert it.service.stats().headroom == 0.2
    for settings, reason in (({"headroom": 0.4}, "above max_headroom"), ({"target_itl": 0.0}, "allowed is from")):
        with pytest.raises(ConfigError, match=reason):
            await it.service.call(lambda core, limits=settings: core.reconfigure(**limits))
    assert it.service.stats().headroom == 0.2
    assert it.service.healthy


@scenario()
async def test_limits_do_not_change_under_running_requests(it: Service) -> None:
    stream = it.submit("a")
    await it.begun()
    call = asyncio.create_task(it.service.call(lambda core: core.reconfigure(max_num_seqs=1)))
    await asyncio.sleep(0)
    it.executor.allow()
    with pytest.raises(ConfigError, match="while requests run"):
        await patient(call)
    it.executor.run_freely()
    await read(stream)


@scenario()
async def test_reset_of_the_prefix_cache(it: Service) -> None:
    it.executor.run_freely()
    await read(it.submit("a", length=40))
    assert it.service.stats().blocks_cached == 2
    await it.service.call(lambda core: core.prefixes.reset())
    assert (await read(it.submit("b", length=40)))[-1].num_cached_tokens == 0
    assert (await read(it.submit("c", length=40)))[-1].num_cached_tokens == 32
