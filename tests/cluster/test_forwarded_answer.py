"""A request goes on to another replica while the client has got nothing, and ends with an error afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayError
from starlette.types import Message

from llmsched.cli.cluster import routed_call
from llmsched.cli.cluster.forwarded_answer import ForwardedAnswer
from llmsched.cli.cluster.forwarded_request import ForwardedRequest, call_app
from llmsched.cli.cluster.replica import REPLICA_HEADER
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.request_context import IngressFacts
from llmsched.engine.routing.rules import RoutedPrompt

REQUEST = ForwardedRequest("POST", "/v1/completions", b"", (), b"{}")
PROMPT = RoutedPrompt(10, (), 256)


def start(replica: str, status: int = 200, retry_after: str = "") -> Message:
    headers = [(REPLICA_HEADER, replica.encode()), (b"retry-after", retry_after.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: str, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class FakeResponse:
    def __init__(self, parts: list[Message | RayError]) -> None:
        self.parts = parts
        self.was_cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        for part in self.parts:
            if isinstance(part, RayError):
                raise part
            yield [part]

    def cancel(self) -> None:
        self.was_cancelled = True


class FakeReplicas:
    """Handle of replicas whose answers are given, in the order of the calls."""

    def __init__(self, *answers: list[Message | RayError]) -> None:
        self._answers = list(answers)
        self.calls: list[RoutedCall] = []
        self.responses: list[FakeResponse] = []
        self.answer = self

    def remote(self, call: RoutedCall, request: ForwardedRequest) -> FakeResponse:
        self.calls.append(call)
        self.responses.append(FakeResponse(self._answers.pop(0)))
        return self.responses[-1]


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_call, "known_replicas", frozenset("ab"))


def answer(replicas: Any) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        never = asyncio.Event()

        async def receive() -> Message:
            await never.wait()
            raise AssertionError

        await ForwardedAnswer(replicas, PROMPT, REQUEST, 0.0)({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 30))
    return sent


def text_of(messages: list[Message]) -> str:
    return b"".join(message.get("body", b"") for message in messages).decode()


def test_an_answer_is_passed_on_whole() -> None:
    replicas = FakeReplicas([start("a"), body("opening", more=True), body("one", more=True), body("")])
    sent = answer(replicas)
    assert text_of(sent) == "openingone"
    assert sent[0]["type"] == "http.response.start"
    assert replicas.responses[0].was_cancelled  # it has ended: this has no effect


def test_a_refused_request_goes_to_the_replica_that_has_not_refused_it() -> None:
    replicas = FakeReplicas([start("a", 429), body("full")], [start("b"), body("done")])
    sent = answer(replicas)
    assert (sent[0]["status"], text_of(sent)) == (200, "done")
    assert [call.tried for call in replicas.calls] == [(), ("a",)]
    assert replicas.responses[0].was_cancelled


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (start("a", 429, "9"), start("b", 429, "4"), "b"),
        (start("a", 429, "4"), start("b", 429, "9"), "a"),
        (start("a", 503), start("b", 429, "9"), "b"),  # the first one shuts down
        (start("a", 503), start("b", 503), "a"),
    ],
)
def test_a_client_is_told_the_shortest_wait_once_every_replica_has_refused(
    first: Message, second: Message, told: str
) -> None:
    sent = answer(FakeReplicas([first, body("by a")], [second, body("by b")]))
    assert (sent[0], text_of(sent)) == ({"a": first, "b": second}[told], f"by {told}")


def test_a_replica_that_is_new_is_asked_too() -> None:
    replicas = FakeReplicas([start("old", 429), body("full")], [start("a", 429), body("full")], [start("b"), body("!")])
    assert text_of(answer(replicas)) == "!"
    assert replicas.calls[-1].tried == ("old", "a")


def test_a_router_that_asks_a_refusing_replica_again_ends_the_search() -> None:
    sent = answer(FakeReplicas([start("a", 429), body("1")], [start("a", 429), body("2")]))
    assert (sent[0]["status"], text_of(sent)) == (429, "2")


@pytest.mark.parametrize(
    "sent_before", [[], [start("a")], [start("a"), body("opening", more=True)]], ids=["nothing", "start", "opening"]
)
def test_a_replica_that_dies_before_the_first_token_is_replaced(sent_before: list[Any]) -> None:
    sent = answer(FakeReplicas([*sent_before, RayError()], [start("b"), body("done")]))
    assert (sent[0]["status"], text_of(sent)) == (200, "done")


def test_a_replica_that_dies_after_a_token_ends_the_stream_with_an_error() -> None:
    sent = answer(FakeReplicas([start("a"), body("opening", more=True), body("one", more=True), RayError()]))
    kept, event = text_of(sent).split("data: ")
    assert kept == "openingone"
    assert json.loads(event)["error"]["code"] == "replica_lost"
    assert not sent[-1]["more_body"]


def test_replicas_that_all_die_are_an_error_with_a_status() -> None:
    sent = answer(FakeReplicas([RayError()], [RayError()], [RayError()]))
    assert sent[0]["status"] == 503
    assert json.loads(text_of(sent))["error"]["code"] == "replica_lost"


def test_an_application_gets_the_request_and_a_disconnect_when_the_call_is_closed() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["method"], scope["path"], (await receive())["body"]))
        await send(start("a"))
        await send(body("one", more=True))
        seen.append((await receive())["type"])

    async def run() -> list[list[Message]]:
        call = call_app(app, REQUEST, IngressFacts())
        first = await anext(call)
        await call.aclose()
        return [first]

    (first,) = asyncio.run(run())
    assert [message["type"] for message in first] == ["http.response.start", "http.response.body"]
    assert seen[0] == ("POST", "/v1/completions", b"{}")


def test_an_error_of_the_application_reaches_the_caller() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def run() -> None:
        async for _ in call_app(app, REQUEST, IngressFacts()):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())
