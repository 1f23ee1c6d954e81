"""Answer of a replica, forwarded to the client."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llmsched.cli.cluster.forwarded_request import ForwardedRequest
from llmsched.cli.cluster.replica import REPLICA_HEADER
from llmsched.cli.cluster.routed_call import RoutedCall, known_replicas
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_body import until_disconnect
from llmsched.engine.routing.rules import RoutedPrompt

logger = logging.getLogger(__name__)

#: Statuses with which a replica refuses a request that another replica may accept.
_REFUSALS = (429, 503)


class ForwardedAnswer(Response):
    """Answer of a replica. If the replica refuses the request or dies before the first token, another replica gets it.

    The start of an answer is held back until its first token, because an answer that the client has begun to receive
    cannot come from another replica.
    """

    def __init__(self, replicas: DeploymentHandle, prompt: RoutedPrompt, request: ForwardedRequest) -> None:
        self.background = None
        self._replicas, self._prompt, self._request = replicas, prompt, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tried: set[str] = set()
        failures = 0
        while failures <= max(1, len(known_replicas)):
            attempt = _Attempt(send)
            try:
                async with aclosing(self._messages(tuple(tried))) as messages:
                    refusing = await attempt.pass_on(messages, tried)
            except RayError as error:
                logger.warning("a replica failed in a request to %s: %s", self._request.path, error)
                if attempt.has_begun:
                    await send({"type": "http.response.body", "body": _lost_event(), "more_body": False})
                    return
                failures += 1
                continue
            if refusing is None:
                return
            tried.add(refusing)
        await _LOST.response()(scope, receive, send)

    async def _messages(self, tried: tuple[str, ...]) -> AsyncGenerator[Message, None]:
        response = self._replicas.answer.remote(RoutedCall(self._prompt, tried), self._request)
        try:
            async for messages in response:
                for message in messages:
                    if headers := message.get("headers"):  # Ray Serve sends the same id
                        message["headers"] = [pair for pair in headers if pair[0] != b"x-request-id"]
                    yield message
        finally:
            response.cancel()


class _Attempt:
    """Attempt to pass on the answer of one replica. `has_begun` is True once something was sent to the client."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send

    async def pass_on(self, messages: AsyncIterator[Message], tried: set[str]) -> str | None:
        """Send the messages. If they refuse the request and a replica is left to try, return the refusing replica."""
        held: list[Message] = []
        async for message in messages:
            if self.has_begun:
                await self._send(message)
                continue
            held.append(message)
            refusing = replica_of(message) if message.get("status") in _REFUSALS else None
            if refusing is not None and len(tried | {refusing}) < len(known_replicas):
                return refusing
            if _is_first_output(held):
                self.has_begun = True
                for each in held:
                    await self._send(each)
        return None


async def whole_answer(replicas: DeploymentHandle, call: RoutedCall, request: ForwardedRequest) -> tuple[str, str]:
    """Return the name of the replica that answers, and the text of its answer."""
    name, body = "", b""
    async for messages in replicas.answer.remote(call, request):
        for message in messages:
            name = replica_of(message) or name
            body += message.get("body", b"")
    return name, body.decode()


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
