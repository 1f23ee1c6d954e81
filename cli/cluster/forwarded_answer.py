"""Answer of a replica, forwarded to the client."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

from fastapi import Request
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llmsched.cli.cluster.asgi_call import ForwardedRequest
from llmsched.cli.cluster.replica import REPLICA_HEADER
from llmsched.cli.cluster.routed_call import RoutedCall, known_replicas
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_body import until_disconnect

logger = logging.getLogger(__name__)

#: Statuses with which a replica refuses a request that another replica may accept.
_REFUSALS = (429, 503)


class ForwardedAnswer(Response):
    """Answer of a replica. A request goes to another replica while nothing of the answer was sent to the client.

    The start of an answer is held back until its first token, so until then a replica may refuse the request or die.
    """

    def __init__(self, replicas: DeploymentHandle, call: RoutedCall, request: ForwardedRequest) -> None:
        self.background = None
        self._replicas, self._call, self._request = replicas, call, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tried: set[str] = set()
        failures = 0
        while True:
            call = RoutedCall(self._call.prompt, tuple(tried))
            held: list[Message] = []
            has_begun = False
            try:
                async for message in self._messages(call):
                    if not has_begun:
                        held.append(message)
                        if (refusing := self._refusing(message)) is not None and len(
                            tried | {refusing}
                        ) < self._count():
                            tried.add(refusing)
                            break
                        if not _is_first_output(held):
                            continue
                        has_begun = True
                        for each in held:
                            await send(each)
                    else:
                        await send(message)
                else:
                    return
            except RayError as error:
                failures += 1
                logger.warning("a replica failed in a request to %s: %s", self._request.path, error)
                if has_begun:
                    await send({"type": "http.response.body", "body": _lost_event(), "more_body": False})
                    return
                if failures > self._count():
                    await _LOST.response()(scope, receive, send)
                    return

    def _count(self) -> int:
        return max(1, len(known_replicas))

    def _refusing(self, message: Message) -> str | None:
        """Return the name of the replica if the message begins a refusal."""
        return replica_of(message) if message.get("status") in _REFUSALS else None

    async def _messages(self, call: RoutedCall) -> AsyncIterator[Message]:
        response = self._replicas.answer.remote(call, self._request)
        try:
            async for messages in response:
                for message in messages:
                    if headers := message.get("headers"):  # Ray Serve sends the same id
                        message["headers"] = [pair for pair in headers if pair[0] != b"x-request-id"]
                    yield message
        finally:
            response.cancel()


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


def forwarded_request(request: Request, body: bytes) -> ForwardedRequest:
    """Return the request in a form that travels to a replica."""
    scope = request.scope
    client = None if request.client is None else (request.client.host, request.client.port)
    headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    return ForwardedRequest(
        request.method, scope["path"], scope.get("query_string", b""), headers, body, client, scope.get("root_path", "")
    )


_LOST = ApiError(503, "the replica that computed this request has failed; send the request again", code="replica_lost")


def _lost_event() -> bytes:
    return b"data: " + json.dumps(_LOST.body()).encode() + b"\n\n"
