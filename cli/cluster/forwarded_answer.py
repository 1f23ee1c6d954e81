"""Answer of a replica, forwarded to the client."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llmsched.cli.cluster import routed_call
from llmsched.cli.cluster.forwarded_request import ForwardedRequest
from llmsched.cli.cluster.replica import REPLICA_HEADER
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_body import until_disconnect
from llmsched.engine.routing.rules import RoutedPrompt

logger = logging.getLogger(__name__)

#: Statuses with which a replica refuses a request that another replica may accept.
_REFUSALS = (429, 503)


class ForwardedAnswer(Response):
    """Answer of a replica. If the replica refuses the request or dies before the first token, another replica gets it.

    The start of an answer is held back until its first token, because an answer that the client has begun to receive
    cannot come from another replica. If every replica refuses, the client gets the refusal that asks for the shortest
    wait. `arrival` is the time at which the request arrived, in seconds of the monotonic clock.
    """

    def __init__(
        self, replicas: DeploymentHandle, prompt: RoutedPrompt, request: ForwardedRequest, arrival: float
    ) -> None:
        self.background = None
        self._replicas, self._prompt, self._request, self._arrival = replicas, prompt, request, arrival

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusals: dict[str, _Refusal] = {}
        failures = 0
        while failures <= max(1, len(routed_call.known_replicas)):
            attempt = _Attempt(send)
            try:
                async with aclosing(self._messages(tuple(refusals))) as messages:
                    refusal = await attempt.pass_on(messages)
            except RayError as error:
                logger.warning("a replica failed in a request to %s: %s", self._request.path, error)
                if attempt.has_begun:
                    await send({"type": "http.response.body", "body": _lost_event(), "more_body": False})
                    return
                failures += 1
                continue
            if refusal is None:
                return
            has_refused_before = refusal.replica in refusals
            refusals[refusal.replica] = refusal
            if has_refused_before or not routed_call.known_replicas - refusals.keys():
                for message in min(refusals.values(), key=_Refusal.order).messages:
                    await send(message)
                return
        await _LOST.response()(scope, receive, send)

    async def _messages(self, tried: tuple[str, ...]) -> AsyncGenerator[Message, None]:
        call = RoutedCall(self._prompt, tried, arrival=self._arrival)
        response = self._replicas.answer.remote(call, self._request)
        try:
            async for messages in response:
                for message in messages:
                    if headers := message.get("headers"):  # Ray Serve sends the same id
                        message["headers"] = [pair for pair in headers if pair[0] != b"x-request-id"]
                    yield message
        finally:
            response.cancel()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Answer with which a replica refuses a request that another replica may accept."""

    replica: str
    messages: Sequence[Message]

    def order(self) -> tuple[bool, float]:
        """Return a key by which a full queue comes before a replica that shuts down, and a short wait before others."""
        start = self.messages[0]
        wait = Headers(raw=start["headers"]).get("retry-after", "")
        return start["status"] != _REFUSALS[0], float(wait) if wait.isdigit() else math.inf


class _Attempt:
    """Attempt to pass on the answer of one replica. `has_begun` is True once something was sent to the client."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send

    async def pass_on(self, messages: AsyncIterator[Message]) -> _Refusal | None:
        """Send the messages to the client or, if they refuse the request, return them."""
        held: list[Message] = []
        refusing: str | None = None
        async for message in messages:
            if self.has_begun:
                await self._send(message)
                continue
            held.append(message)
            refusing = replica_of(held[0]) if held[0].get("status") in _REFUSALS else None
            if refusing is None and _is_first_output(held):
                self.has_begun = True
                for each in held:
                    await self._send(each)
        return _Refusal(refusing, held) if refusing is not None else None


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Whole answer of a replica."""

    replica: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    async def to(cls, replicas: DeploymentHandle, call: RoutedCall, request: ForwardedRequest) -> WholeAnswer:
        """Return the answer to a request. Raises RayError if there is none."""
        messages = [each async for part in replicas.answer.remote(call, request) for each in part]
        start, body = messages[0], b"".join(message.get("body", b"") for message in messages)
        return cls(replica_of(start) or "", start["status"], start["headers"], body)

    def response(self) -> Response:
        kept = {name: value for name, value in Headers(raw=list(self.headers)).items() if name not in _OF_RAY}
        return Response(self.body, self.status, kept)


#: Headers that Ray Serve or the response adds.
_OF_RAY = ("x-request-id", "content-length")


def _is_first_output(held: list[Message]) -> bool:
    """Return True if the messages have more than the opening of a stream, which comes before the first token."""
    bodies = [message for message in held if message.get("body")]
    is_over = held[-1]["type"] == "http.response.body" and not held[-1].get("more_body", False)
    return is_over or len(bodies) > 1


def replica_of(message: Message) -> str | None:
    """Return the name of the replica, if the message begins an answer."""
    names = [value for name, value in message.get("headers", ()) if name == REPLICA_HEADER]
    return names[0].decode() if names else None


_LOST = ApiError(503, "the replica that computed this request has failed; send the request again", code="replica_lost")


def _lost_event() -> bytes:
    return b"data: " + json.dumps(_LOST.body()).encode() + b"\n\n"
