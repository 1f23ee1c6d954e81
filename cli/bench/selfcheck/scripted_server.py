"""Server with known timing, against which `bench` checks itself. It runs in another process and logs its writes.

The log has times of time.monotonic, which all processes share. Run as a module, the server prints its port and ends
when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

#: Log with an entry per answer: the time the request arrived, and the time and number of tokens of each part written.
AnswerLog = list[tuple[float, list[tuple[float, int]]]]

Ending = Literal["done", "cut", "refused", "error"]


@dataclass(frozen=True, slots=True)
class ScriptPart:
    at: float  # seconds after the request arrives
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """Script of an answer: the parts to send, and how the answer ends.

    The ending "done" sends usage and [DONE], "cut" closes the connection early, "error" sends an error event, and
    "refused" sends only an HTTP 500. With `role_first`, the chunk of a part without tokens has the assistant role.
    """

    parts: tuple[ScriptPart, ...]
    ending: Ending = "done"
    role_first: bool = False

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


def steady(count: int, first: float, gap: float, *, tokens: int = 1, ending: Ending = "done") -> Script:
    """Return a script of `count` chunks of `tokens` tokens: one after `first` seconds, then one every `gap` seconds."""
    return Script(tuple(ScriptPart(first + gap * n, " x" * tokens, tokens) for n in range(count)), ending)


_PLAIN = steady(40, 0.1, 0.02)
#: Two chunks without a token, such as those at the start of a chat answer.
_ROLE = (ScriptPart(0.01, ""), ScriptPart(0.02, ""))

#: Scripts by the first segment of the URL's path. Successive requests to a path get its scripts in turn.
SCRIPTS: Mapping[str, tuple[Script, ...]] = {
    "steady": (_PLAIN,),
    "chunks": (steady(5, 0.1, 0.2, tokens=10),),
    "role": (Script((*_ROLE, *steady(20, 0.15, 0.02).parts), role_first=True),),
    "stall": (Script((*_PLAIN.parts[:20], *(replace(part, at=part.at + 0.5) for part in _PLAIN.parts[20:]))),),
    "crowd": (steady(75, 0.1, 0.02),),
    "rate": (steady(1, 0.0, 0.0),),
    "warm-up": (steady(1, 0.0, 0.0),),
    "failures": (
        _PLAIN,
        steady(3, 0.05, 0.02, ending="cut"),
        steady(3, 0.05, 0.02, ending="error"),
        Script((), "refused"),
        Script(()),
    ),
}


def chunk(script: Script, part: ScriptPart, *, chat: bool) -> bytes:
    if not chat:
        return event({"choices": [{"index": 0, "text": part.text, "finish_reason": None}]})
    role = {"role": "assistant"} if script.role_first and not part.tokens else {}
    return event({"choices": [{"index": 0, "delta": {**role, "content": part.text}, "finish_reason": None}]})


def ending(script: Script) -> bytes:
    if script.ending == "error":
        return event({"error": {"message": "as the script wants it", "type": "server_error"}})
    if script.ending == "cut":
        return b""
    usage = {"prompt_tokens": 8, "completion_tokens": script.tokens}
    return event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class ScriptedServer:
    """Server that answers each POST /NAME/v1/... by the next script of SCRIPTS[NAME], and logs its answers."""

    def __init__(self) -> None:
        self._logs: defaultdict[str, AnswerLog] = defaultdict(list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                method, path = head.split(" ", 2)[:2]
                length = next((line for line in head.splitlines() if line.startswith("content-length:")), ":0")
                await reader.readexactly(int(length.partition(":")[2]))
                name = path.split("/")[1]
                if method == "post" and name in SCRIPTS:
                    await self._answer(name, path.endswith("/chat/completions"), writer)
                elif path.endswith("/log"):
                    await _send(writer, 200, json.dumps(self._logs.pop(name, [])))
                else:
                    await _send(writer, 404, "{}")
                if writer.is_closing():
                    break
        writer.close()

    async def _answer(self, name: str, chat: bool, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        came, written = now(), list[tuple[float, int]]()
        log, scripts = self._logs[name], SCRIPTS[name]
        script: Script = scripts[len(log) % len(scripts)]
        log.append((came, written))
        if script.ending == "refused":
            await _send(writer, 500, '{"error": {"message": "as the script wants it"}}')
            return
        writer.write(_HEAD)
        for part in script.parts:
            if (wait := came + part.at - now()) > 0:
                await asyncio.sleep(wait)
            writer.write(_framed(chunk(script, part, chat=chat)))
            written.append((now(), part.tokens))
        if (last := ending(script)) != b"":
            writer.write(_framed(last))
        if script.ending == "cut":
            writer.close()
        else:
            writer.write(b"0\r\n\r\n")
            await writer.drain()


def _framed(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


async def _send(writer: asyncio.StreamWriter, status: int, content: str) -> None:
    body = content.encode()
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def main() -> None:
    server = await asyncio.start_server(ScriptedServer().serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
