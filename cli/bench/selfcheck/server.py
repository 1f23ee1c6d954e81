"""The server that the bench checks itself against: a process of its own that notes when it really wrote what.

Its times are those of time.monotonic, which all processes of a machine share, so that a server that is late by itself
is not taken for a client that measures wrongly. Run as a module it prints its port, and ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from contextlib import suppress

from llmsched.cli.bench.selfcheck.scripts import SCRIPTS, Script, chunk, ending

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

#: Of each answer: when the request had come, then when each part was written and its tokens.
Log = list[tuple[float, list[tuple[float, int]]]]


class ScriptedServer:
    """Answers POST /NAME/v1/... by the scripts of that name, and GET /NAME/log with what was written when, once."""

    def __init__(self) -> None:
        self._logs: defaultdict[str, Log] = defaultdict(list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
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
    """Serve on a free port of this machine until stdin ends."""
    server = await asyncio.start_server(ScriptedServer().serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
