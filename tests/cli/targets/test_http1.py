"""HTTP/1.1 client: framing of answers, reuse of connections, and receive times."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run_virtual

from llmsched.cli.targets.http1 import Connection, Http1Transport, Received, ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked_body() -> ResponseParser:
    """Return a parser that has read the head of a chunked answer."""
    parser = ResponseParser()
    assert parser.feed(CHUNKED) == b""
    assert parser.has_head
    return parser


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.lists(st.integers(0, 300), max_size=8))
def test_chunks_come_out_whole_however_they_are_split(contents: list[bytes], cuts: list[int]) -> None:
    written = [f"{len(content):X};a=b" if index % 2 else f"0{len(content):x}" for index, content in enumerate(contents)]
    body = b"".join(
        size.encode() + b"\r\n" + content + b"\r\n" for size, content in zip(written, contents, strict=True)
    )
    whole = body + b"0\r\nTrailer: x\r\n\r\n"
    ends = sorted(min(cut, len(whole)) for cut in cuts)
    parser, found = chunked_body(), b""
    for start, end in zip([0, *ends], [*ends, len(whole)], strict=True):
        assert not parser.complete or start == end
        found += parser.feed(whole[start:end])
    assert parser.complete
    assert parser.reusable
    assert found == b"".join(contents)


def test_content_comes_out_with_its_last_byte_not_before_the_chunk_is_whole() -> None:
    parser = chunked_body()
    assert [parser.feed(part) for part in (b"5\r", b"\nab", b"cde", b"\r\n0\r\n")] == [b"", b"ab", b"cde", b""]
    assert not parser.complete
    assert parser.feed(b"\r\n") == b""
    assert parser.complete


@pytest.mark.parametrize(
    "body",
    [
        *(b"x\r\n", b"\r\n", b"-1\r\n", b"3\r\nabcdef", b"1 2\r\n", b"0x3\r\n", b"3" * 20_000),
        *(b"1;" + b"x" * 70_000, b"0\r\nTrailer: " + b"x" * 70_000),
    ],
)
def test_a_malformed_chunked_body_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"[Cc]hunk"):
        chunked_body().feed(body)


def test_chunk_sizes_and_trailers_are_bounded_over_many_reads() -> None:
    parser = chunked_body()
    parser.feed(b"0\r\n")
    trailer = b"Trailer: " + b"x" * 5_000 + b"\r\n"
    with pytest.raises(ValueError, match="longer than 65536 bytes"):
        deque((parser.feed(trailer) for _ in range(20)), maxlen=0)


def test_content_that_comes_with_the_head_is_returned() -> None:
    parser = ResponseParser()
    assert [parser.feed(part) for part in (OK[:9], OK[9:] + b"Content-Length: 6\r\n\r\nbo", b"dy", b"ab")] == [
        *(b"", b"bo", b"dy", b"ab")
    ]
    assert (parser.status, parser.headers, parser.complete) == (200, [(b"Content-Length", b"6")], True)


def test_a_malformed_head_is_quoted() -> None:
    with pytest.raises(ValueError, match=r"220 smtp ready.* is not an HTTP/1\.1 answer"):
        ResponseParser().feed(b"220 smtp ready\r\n\r\n")


class Outcome:
    """Results of successive requests on one transport, to a server that answers with these bytes.

    If an answer is None, the server closes the connection when the request comes. It also closes the connection after
    an answer that does not state its length.
    """

    def __init__(self, answers: Sequence[bytes | None], *, close_after: bool = False) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.results: list[tuple[int, bytes] | str] = []
        self.events: list[str] = []
        self._answers = list(answers)
        self._close_after = close_after
        asyncio.run(self._run(len(answers)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(2))
                if (answer := self._answers.pop(0)) is None:
                    break
                writer.write(answer)
                await writer.drain()
                if self._close_after or not any(word in answer.lower() for word in (b"content-length", b"chunked")):
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async def _run(self, count: int) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport = Http1Transport(ssl.create_default_context())

        async def trace(event: str, info: dict[str, Any]) -> None:
            self.events.append(event)

        for _ in range(count):
            request = httpx.Request(
                "POST", f"http://127.0.0.1:{port}/a?b=c", content=b"{}", extensions={"trace": trace}
            )
            try:
                response = await transport.handle_async_request(request)
                try:
                    self.results.append((response.status_code, b"".join([part async for part in response.aiter_raw()])))
                finally:
                    await response.aclose()
            except httpx.RequestError as problem:
                self.results.append(type(problem).__name__)
            await asyncio.sleep(0.01)  # what the server does to the connection arrives
        await transport.aclose()
        server.close()
        await server.wait_closed()


def test_a_connection_is_reused_after_a_whole_answer() -> None:
    outcome = Outcome(
        [OK + b"Content-Length: 3\r\n\r\nabc", CHUNKED + b"2\r\nde\r\n0\r\n\r\n", OK + b"Content-Length: 0\r\n\r\n"]
    )
    assert outcome.results == [(200, b"abc"), (200, b"de"), (200, b"")]
    assert outcome.connections == 1
    assert outcome.events.count("connection.connect_tcp.started") == 1
    assert outcome.events.count("http11.send_request_headers.started") == 3
    first, *lines = outcome.requests[0].split(b"\r\n")
    assert first == b"POST /a?b=c HTTP/1.1"
    assert any(line.lower().startswith(b"host: 127.0.0.1:") for line in lines)
    assert b"Content-Length: 2" in lines
    assert lines[-1] == b"{}"


def test_a_request_that_a_reused_connection_does_not_answer_is_sent_again() -> None:
    answer = OK + b"Content-Length: 1\r\n\r\na"
    outcome = Outcome([answer, None, answer])
    assert outcome.results[:2] == [(200, b"a"), (200, b"a")]
    assert len(outcome.requests) == 3
    assert Outcome([None]).results == ["ReadError"]


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    assert Outcome([OK + b"\r\nabc", OK + b"\r\ndef"]).results == [(200, b"abc"), (200, b"def")]


@pytest.mark.parametrize("answer", [OK + b"Content-Length: 3\r\n\r\n", CHUNKED + b"3\r\n"], ids=["length", "chunked"])
def test_excess_bytes_after_an_answer_are_not_the_next_answer(answer: bytes) -> None:
    """A connection that received more than announced is not reused."""
    end = b"\r\n0\r\n\r\n" if b"chunked" in answer else b""
    outcome = Outcome([answer + b"abc" + end + OK + b"Content-Length: 4\r\n\r\nevil", answer + b"def" + end])
    assert outcome.results == [(200, b"abc"), (200, b"def")]
    assert outcome.connections == 2


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n", b"connection:keep-alive, close\r\n"])
def test_a_server_may_close_the_connection_between_requests(header: bytes) -> None:
    """A header may announce this or not."""
    answer = OK + header + b"Content-Length: 1\r\n\r\na"
    outcome = Outcome([answer, answer], close_after=not header)
    assert (outcome.results, outcome.connections) == ([(200, b"a")] * 2, 2)


def test_interim_answers_are_skipped() -> None:
    outcome = Outcome([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno"])
    assert outcome.results == [(503, b"no")]


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"5\r\nab",
        OK + b"Content-Length: 9\r\n\r\nabc",
        OK + b"Content-Length: nine\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\na",
        CHUNKED + b"no size\r\n",
        b"220 smtp ready\r\n\r\n",
        b"HTTP/1.1 2",
        b"HTTP/1.1 OK\r\n\r\n",
        OK + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
def test_a_malformed_answer_fails_its_request_only(answer: bytes) -> None:
    outcome = Outcome([answer, OK + b"Content-Length: 1\r\n\r\na"], close_after=True)
    assert outcome.results == ["RemoteProtocolError", (200, b"a")]


def test_a_refused_connection_is_a_connect_error() -> None:
    async def main() -> None:
        async def trace(event: str, info: dict[str, Any]) -> None:
            pass

        request = httpx.Request("POST", "http://127.0.0.1:9/", content=b"", extensions={"trace": trace})
        with pytest.raises(httpx.ConnectError):
            await Http1Transport(ssl.create_default_context()).handle_async_request(request)

    asyncio.run(main())


def received(connection: Connection, *parts: bytes) -> None:
    """Pass bytes to the connection as the event loop does."""
    for part in parts:
        connection.get_buffer(-1)[: len(part)] = part
        connection.buffer_updated(len(part))


def with_connection(test: Callable[[Connection], Awaitable[object]]) -> object:
    async def main() -> object:
        return await test(Connection())

    return run_virtual(main())


def test_bytes_have_the_time_of_their_receipt() -> None:
    async def test(connection: Connection) -> list[Received]:
        start = asyncio.get_running_loop().time()
        received(connection, b"ab")
        await asyncio.sleep(1.0)
        received(connection, b"cd")
        await asyncio.sleep(3.0)  # the client is busy
        return [part._replace(time=part.time - start) for part in (await connection.read(), await connection.read())]

    assert with_connection(test) == [(b"ab", 0.0), (b"cd", pytest.approx(1.0))]


def test_read_waits_for_bytes() -> None:
    async def test(connection: Connection) -> list[Received]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        loop.call_later(2.0, received, connection, b"x")
        loop.call_later(3.0, connection.eof_received)
        return [part._replace(time=part.time - start) for part in (await connection.read(), await connection.read())]

    assert with_connection(test) == [(b"x", pytest.approx(2.0)), (b"", pytest.approx(3.0))]


def test_bytes_received_before_the_connection_broke_are_read_first() -> None:
    async def test(connection: Connection) -> bytes:
        received(connection, b"x")
        connection.connection_lost(ConnectionResetError("reset"))
        first = (await connection.read()).content
        with pytest.raises(ConnectionResetError, match="reset"):
            await connection.read()
        return first

    assert with_connection(test) == b"x"


def test_a_connection_with_unrequested_bytes_is_not_idle() -> None:
    async def test(connection: Connection) -> list[bool]:
        states = [connection.idle]
        received(connection, b"HTTP/1.1 408 Request Timeout\r\n")
        states.append(connection.idle)
        await connection.read()
        connection.eof_received()
        return [*states, connection.idle]

    assert with_connection(test) == [True, False, False]
