"""Injected faults: what clients see, /health and the exit code."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from engines import make_engine
from scripted import LiveServer, ScriptedServer
from tiny_models import VOCAB_SIZE

from llmsched.engine.async_engine import MAX_BAD_ROWS
from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.step_loop import StepLoop

PATH = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}


def health(server: LiveServer) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(server.url + "/health", timeout=20)
    return answer.status_code, answer.json()


def healthy_after(server: LiveServer, status: int) -> dict[str, Any]:
    """Wait until /health answers with `status`; return its body."""
    while (found := health(server))[0] != status:
        pass
    return found[1]


def post(server: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + PATH, json={**SHORT, **fields}, timeout=30)


def last_event(server: LiveServer, **fields: Any) -> Any:
    with httpx.stream("POST", server.url + PATH, json={**SHORT, "stream": True, **fields}, timeout=30) as answer:
        return json.loads([line for line in answer.iter_lines() if line][-1].removeprefix("data: "))


def broken(*_: object, **__: object) -> Any:
    raise ValueError("injected")


def break_part(monkeypatch: pytest.MonkeyPatch, server: ScriptedServer, part: str, name: str) -> None:
    """Make the method `name` of a part of the engine raise; `part` is a path of attributes, "" the engine itself."""
    owner: Any = server.engine
    for attribute in filter(None, part.split(".")):
        owner = getattr(owner, attribute)
    monkeypatch.setattr(owner, name, broken)


# -- a step that hangs --------------------------------------------------------------------------------------------


def test_a_hung_step_fails_health_until_it_ends(
    make_server: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(step_timeout_s=0.2)
    assert post(server).status_code == 200
    assert health(server)[0] == 200
    server.script.gate.clear()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, server)
        found = healthy_after(server, 503)
        assert found["status"] == "unhealthy"
        assert "the engine hangs: no step has finished for" in found["error"]
        server.script.gate.set()
        assert answer.result().status_code == 200
    healthy_after(server, 200)
    server.close()
    assert caplog.text.count("the engine hangs") == 1


def test_an_idle_engine_does_not_hang(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(step_timeout_s=0.05)
    assert post(server).status_code == 200
    assert not threading.Event().wait(0.2)
    assert health(server) == (200, {"status": "ok"})


def test_drain_ends_a_hung_engine(make_server: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(grace_s=0.2)
    server.script.gate.clear()
    with ThreadPoolExecutor() as pool:
        event = pool.submit(last_event, server)
        while not server.engine.has_work():
            threading.Event().wait(0.01)
        server.drain()
        assert event.result()["error"]["type"] == "service_unavailable_error"
    assert server.join() == 1
    assert "does not end its step" in caplog.text


# -- logits that are not numbers ----------------------------------------------------------------------------------


@pytest.fixture
def real_server() -> Iterator[LiveServer]:
    server = LiveServer(make_engine()).start()
    yield server
    server.close()


def test_logits_that_stay_nan_fail_health_until_a_good_row(
    real_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    executor: Any = real_server.engine.executor
    executor.on_logits = lambda _, logits: logits.fill_(math.nan)
    for _ in range(MAX_BAD_ROWS - 1):
        assert post(real_server).status_code == 500
    assert health(real_server)[0] == 200
    assert [post(real_server).status_code for _ in range(2)] == [500, 500]
    found = healthy_after(real_server, 503)
    assert (found["status"], "no usable logits" in found["error"]) == ("unhealthy", True)
    executor.on_logits = None
    assert post(real_server).status_code == 200
    healthy_after(real_server, 200)
    real_server.close()
    assert caplog.text.count("no usable logits for the last") == 1


def test_requests_that_bar_every_token_do_not_fail_health(real_server: LiveServer) -> None:
    everything = list(range(VOCAB_SIZE))
    for _ in range(MAX_BAD_ROWS + 1):
        answer = post(real_server, ignore_eos=False, min_tokens=1, stop_token_ids=everything)
        assert (answer.status_code, "min_tokens forbids" in answer.text) == (400, True)
    assert health(real_server)[0] == 200


# -- calls beside the steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "name", "path"),
    [
        ("prefixes.changes", "check", "/v1/cache"),
        ("", "stats", "/v1/cache"),
        ("prefixes", "pins", "/v1/prefixes"),
        ("", "explain", "/v1/requests/x/explain"),
    ],
)
def test_a_call_that_raises_gets_500_and_the_engine_continues(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch, part: str, name: str, path: str
) -> None:
    server = make_server()
    break_part(monkeypatch, server, part, name)
    answer = httpx.get(server.url + path, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert (post(server).status_code, health(server)[0]) == (200, 200)
    monkeypatch.undo()
    assert httpx.get(server.url + path, timeout=20).status_code in (200, 404)
    server.engine.check_integrity()


@pytest.mark.parametrize("stage", ["ledger.begin", "waiting.add", "waiting.times.begin", "admission.changed"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_cannot_be_queued_is_withdrawn(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch, stage: str, streamed: bool
) -> None:
    """The second of its three choices fails."""
    server = make_server()
    owner: Any = server.engine.scheduler
    *parts, name = stage.split(".")
    for attribute in parts:
        owner = getattr(owner, attribute)
    right, calls = getattr(owner, name), iter(range(100))

    def second_fails(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise ValueError("injected")
        return right(*arguments, **more)

    monkeypatch.setattr(owner, name, second_fails)
    error = last_event(server, n=3)["error"] if streamed else post(server, n=3).json()["error"]
    assert error["code"] == "internal_error"
    assert (post(server).status_code, health(server)[0]) == (200, 200)
    monkeypatch.undo()
    server.engine.check_integrity()
    assert not server.engine.has_work()
    assert not server.engine.open_sequences


def test_what_cannot_be_withdrawn_ends_the_engine_and_says_so(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setattr(server.engine.scheduler.admission, "changed", broken)
    monkeypatch.setattr(server.engine.scheduler, "finish", broken)
    assert post(server).status_code == 500
    assert "ValueError in a call left the engine inconsistent" in healthy_after(server, 503)["error"]
    assert server.join() == 1


@pytest.mark.parametrize(
    ("part", "name"), [("recorder", "update"), ("metrics", "observe"), ("prefixes.changes", "update"), ("", "stats")]
)
def test_statistics_that_fail_cost_no_answer(
    make_server: Callable[..., ScriptedServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    name: str,
) -> None:
    server = make_server()
    break_part(monkeypatch, server, part, name)
    answers = [post(server) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[0].json()["usage"]["completion_tokens"] == 4
    assert health(server)[0] == 200
    monkeypatch.undo()
    server.engine.check_integrity()
    assert 1 <= caplog.text.count("serving continues without it") <= 3, "each function once"


# -- steps that run out of memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "status", "code"), [(1, 200, 0), (StepLoop.max_attempts, 503, 1)])
def test_one_step_without_memory_costs_nothing_and_many_in_succession_end_the_engine(
    make_server: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture, times: int, status: int, code: int
) -> None:
    server = make_server()
    right, left = server.executor.execute, iter(range(times))

    def execute(plan: StepPlan) -> StepResult:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(plan)

    server.executor.execute = execute  # type: ignore[method-assign]
    assert post(server).status_code == status
    assert health(server)[0] == status
    assert caplog.text.count("out of memory in a step of") == min(times, StepLoop.max_attempts - 1)
    server.drain()
    assert server.join() == code


# -- the end of the engine's thread -------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt("key"), MemoryError("no room")])
def test_a_dead_engine_says_what_killed_it(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    server = make_server()
    server.script.failure, server.script.fail_at_step = failure, 3
    if isinstance(failure, MemoryError):  # outside a step's computation nothing can be tried again
        monkeypatch.setattr(server.engine.scheduler, "settle", lambda *_: (_ for _ in ()).throw(failure))
    told = f"the engine has failed: {type(failure).__name__}: {failure}"
    assert last_event(server, max_tokens=400)["error"]["message"] == told
    assert health(server) == (503, {"status": "dead", "error": told})
    assert server.join() == 1
