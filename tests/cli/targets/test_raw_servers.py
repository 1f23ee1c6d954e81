"""One answer in every framing that servers and proxies use, over real sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from measured_load import measure_load

from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.interface import TargetUnreachableError

TEXTS = ("é", "漢", "😀")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def events() -> list[bytes]:
    """Return three tokens, then usage and [DONE]."""
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in TEXTS]
    usage = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 3}}
    return [b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n" for one in (*chunks, usage)] + [
        b"data: [DONE]\n\n"
    ]


def framed(contents: Sequence[bytes]) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(content), content) for content in contents if content] + [b"0\r\n\r\n"]


def bytewise(contents: Sequence[bytes]) -> list[bytes]:
    return [bytes([byte]) for byte in b"".join(contents)]


def zipped(contents: Sequence[bytes]) -> list[bytes]:
    packer = zlib.compressobj(wbits=31)
    return [packer.compress(content) + packer.flush(zlib.Z_SYNC_FLUSH) for content in contents] + [packer.flush()]


ANSWERS: dict[str, list[bytes]] = {
    "chunked": [HEAD + CHUNKED, *framed(events())],
    "a chunk for each byte": [HEAD + CHUNKED, *framed(bytewise(events()))],
    "a packet for each byte": bytewise([HEAD + CHUNKED, *framed(events())]),
    "all in one packet": [b"".join([HEAD + CHUNKED, *framed(events())])],
    "until the connection is closed": [HEAD + b"\r\n", *events()],
    "HTTP/1.0": [HEAD.replace(b"1.1", b"1.0") + b"\r\n", *events()],
    "with a length": [HEAD + b"Content-Length: %d\r\n\r\n" % len(b"".join(events())), *events()],
    "gzip": [HEAD + b"Content-Encoding: gzip\r\n" + CHUNKED, *framed(zipped(events()))],
    "no blanks in the head": [HEAD.replace(b": ", b":").lower().replace(b"http", b"HTTP") + CHUNKED, *framed(events())],
    "CRLF": [HEAD + CHUNKED, *framed([one.replace(b"\n", b"\r\n") for one in events()])],
    "CR": [HEAD + CHUNKED, *framed([one.replace(b"\n", b"\r") for one in events()])],
    "no blank after the colon": [HEAD + CHUNKED, *framed([one.replace(b"data: ", b"data:", 1) for one in events()])],
    "comments and pings": [
        HEAD + CHUNKED,
        *framed([b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', *events()]),
    ],
    "interim": [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n" + HEAD + CHUNKED,
        *framed(events()),
    ],
}


def bench(answer: Sequence[bytes], *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Measurement:
    """Send two successive requests to a server that answers each with these packets."""
    whole = b"".join(answer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = next(line for line in head.splitlines() if line.startswith("content-length:"))
                await reader.readexactly(int(length.partition(":")[2]))
                for packet in answer:
                    writer.write(packet)
                    await asyncio.sleep(0)
                if not (b"Content-Length" in whole or whole.endswith(b"0\r\n\r\n")):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def main() -> Measurement:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        url = f"{'http' if tls is None else 'https'}://{host}:{server.sockets[0].getsockname()[1]}"
        work = SyntheticLoad(num_prompts=2, input_len=8, output_len=3, max_concurrency=1)
        async with server:
            return await measure_load(url, work, timeout=20.0)

    return asyncio.run(main())


@pytest.mark.parametrize("name", ANSWERS)
def test_the_same_answer_however_it_is_framed(name: str) -> None:
    figures = bench(ANSWERS[name])
    assert figures.requests.failures == {}
    assert (figures.requests.completed, figures.tokens.output, figures.tokens.input) == (2, 6, 16)
    assert {"".join(chunk.text for chunk in record.chunks) for record in figures.run.records} == {"".join(TEXTS)}


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        ([HEAD + CHUNKED, *framed(events())[:2], b"ff\r\nabc"], "cut without [DONE]", "before the answer was over"),
        ([b"HTTP/1.1 200"], "connection lost", "within the head"),
        ([b""], "connection lost", "without an answer"),
        ([HEAD + b"Content-Encoding: gzip\r\n" + CHUNKED, *framed(events())], "not understood", "decompressing"),
    ],
    ids=["body", "head", "nothing", "gzip"],
)
def test_a_malformed_answer_has_its_reason(answer: list[bytes], reason: str, detail: str) -> None:
    figures = bench(answer)
    assert (figures.requests.completed, figures.requests.failures) == (0, {reason: 2})
    assert detail in figures.requests.failure_examples[reason]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost and its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("makes its certificate with openssl")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_https_with_a_certificate_that_is_trusted(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with pytest.raises(TargetUnreachableError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
        bench(ANSWERS["chunked"], tls=tls, host="localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    figures = bench(ANSWERS["chunked"], tls=tls, host="localhost")
    assert (figures.requests.completed, figures.tokens.output, figures.latency.connect.count) == (2, 6, 1)
