"""Cost of HTTP: the same requests read from the engine in process and over HTTP, interleaved in one run (MEASURED).

The engine is real, but its model costs nothing or sleeps for a given time in each step. The client is another process,
which only receives. For each number of streams, the bench prints tokens/s in process and over HTTP, their ratio, and
the CPU time per token of the event loop's thread (HTTP), of the engine's thread (scheduling, text, metrics), and of the
client. The floor is the CPU time of one write of an event to a socket.

python tests/bench/bench_http.py [STREAMS ...]    Default: 64 256. Takes about a minute.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from scripted import ScriptedServer

from llmsched.engine.sampling_params import SamplingParams

ROUNDS = 5
OUTPUT_TOKENS = 400
STEPS_S = (0.0, 0.005)
#: An event of usual length, framed as a chunk.
EVENT = b"d2\r\ndata: " + b"x" * 202 + b"\n\n\r\n"


class Cost(NamedTuple):
    """Tokens per second, and seconds of CPU time per token of the event loop's thread, the engine's, and the client."""

    rate: float
    loop: float
    engine: float
    client: float = 0.0


class Client:
    """Process that opens connections to a port, sends the same bytes on each, and reads until the server closes it."""

    def __init__(self, port: int, connections: int, request: bytes) -> None:
        command = [sys.executable, __file__, "--client", str(port), str(connections), request.hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._told()

    def _told(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(self) -> None:
        """Let the client send and wait until it has received everything. `cpu_s` is then its CPU time for that."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.cpu_s = float(self._told())

    def close(self) -> None:
        """Wait until the process has ended, which takes a tenth of a second, so it is not part of `run`."""
        self._process.wait()


def client(port: int, connections: int, request: bytes) -> None:
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    print("connected", flush=True)
    sys.stdin.readline()
    begun, received, open_ones = time.process_time(), 0, len(sockets)
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            each.sendall(request)
            selector.register(each, selectors.EVENT_READ, each)
        while open_ones:
            for key, _ in selector.select():
                part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                received += len(part)
                if not part:
                    selector.unregister(key.fileobj)
                    open_ones -= 1
    assert received, "the client got no bytes"
    print(time.process_time() - begun, flush=True)


class Bench:
    """Server in a thread of this process, whose threads' CPU time the bench reads."""

    def __init__(self, streams: int, step_s: float) -> None:
        self._streams = streams
        self._server = ScriptedServer(
            max_num_seqs=streams, max_num_batched_tokens=2048, num_blocks=streams * 64, max_model_len=1024
        ).start()
        self._server.script.step_s = step_s
        threads = (self._server._thread, self._server.service._thread)
        self._clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threads]

    def close(self) -> None:
        self._server.close()

    def _measured(self, action: Callable[[], None], tokens: int) -> Cost:
        before = [time.clock_gettime(clock) for clock in self._clocks]
        begun = time.perf_counter()
        action()
        seconds = time.perf_counter() - begun
        loop, engine = (time.clock_gettime(clock) - old for clock, old in zip(self._clocks, before, strict=True))
        return Cost(tokens / seconds, loop / tokens, engine / tokens)

    def _on_loop(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        loop = self._server.service._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(run(), loop).result()

    def in_process(self) -> Cost:
        async def read(number: int) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            async for _ in self._server.service.submit(f"bench-{number}", [100, 101, 102], sampling):
                pass

        async def read_all() -> None:
            await asyncio.gather(*map(read, range(self._streams)))

        return self._measured(lambda: self._on_loop(read_all()), self._streams * OUTPUT_TOKENS)

    def over_http(self) -> Cost:
        fields = {"prompt": [100, 101, 102], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "temperature": 0}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        receiver = Client(self._server.listeners[0].getsockname()[1], self._streams, request)
        cost = self._measured(receiver.run, self._streams * OUTPUT_TOKENS)
        receiver.close()
        return cost._replace(client=receiver.cpu_s / (self._streams * OUTPUT_TOKENS))

    def floor(self) -> Cost:
        """Return the cost of a write, without a request or an engine."""

        async def write_all() -> None:
            writers: list[asyncio.StreamWriter] = []
            accepted = asyncio.Event()

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readexactly(1)  # a connection that is closed before it is read would be reset
                writers.append(writer)
                if len(writers) == self._streams:
                    accepted.set()

            async with await asyncio.start_server(accept, "127.0.0.1", 0, backlog=self._streams) as server:
                port = server.sockets[0].getsockname()[1]
                receiver = await asyncio.to_thread(Client, port, self._streams, b"x")
                reading = asyncio.create_task(asyncio.to_thread(receiver.run))
                await accepted.wait()
                for _ in range(OUTPUT_TOKENS):
                    for writer in writers:
                        writer.transport.write(EVENT)
                    await asyncio.sleep(0)
                for writer in writers:
                    writer.close()
                await reading
                receiver.close()

        return self._measured(lambda: self._on_loop(write_all()), self._streams * OUTPUT_TOKENS)


def median(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def main(streams: list[int]) -> None:
    print(
        "                 tokens/s                       CPU us/token of the loop        of the engine        of the\n"
        "streams  step ms  in process     HTTP  ratio     HTTP    floor  in process      HTTP  in process    client"
    )
    for count in streams:
        for step_s in STEPS_S:
            bench = Bench(count, step_s)
            rounds = [(bench.in_process(), bench.over_http(), bench.floor()) for _ in range(ROUNDS)]
            bench.close()
            alone, http, floor = (median(costs) for costs in zip(*rounds, strict=True))
            ratio = statistics.median(over.rate / within.rate for within, over, _ in rounds)
            print(
                f"{count:7}  {1e3 * step_s:7.0f}  {alone.rate:10.0f}  {http.rate:7.0f}  {ratio:5.2f}"
                f"  {1e6 * http.loop:7.1f}  {1e6 * floor.loop:7.1f}  {1e6 * alone.loop:10.1f}"
                f"  {1e6 * http.engine:8.1f}  {1e6 * alone.engine:10.1f}  {1e6 * http.client:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
    else:
        main([int(each) for each in sys.argv[1:]] or [64, 256])
