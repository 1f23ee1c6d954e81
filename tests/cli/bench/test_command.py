"""`llmsched bench` as it is typed: real sockets, a real engine, exit codes, JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from fake_server import end, token

Answer = Callable[[BaseHTTPRequestHandler, threading.Event], None]
NOTHING = {
    "mean": None,
    "p50": None,
    "p95": None,
    "p99": None,
    "max": None,
    "count": 0,
    "p99_ci95": None,
    "mean_ci95": None,
}
STREAM = token(" ü\N{SLIGHTLY SMILING FACE}") * 3 + b":ping\r\n\r\n" + end(3).rstrip()


@contextmanager
def serving(answer: Answer, bodies: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """Yield the URL of a server on a real socket that answers every POST with `answer` and appends it to `bodies`."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if bodies is not None:
                bodies.append(body)
            answer(self, over)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def start_stream(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.flush()


def byte_by_byte(handler: BaseHTTPRequestHandler, over: threading.Event) -> None:
    handler.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start_stream(handler)
    for index in range(len(STREAM)):
        handler.wfile.write(STREAM[index : index + 1])
        handler.wfile.flush()
    handler.close_connection = True


def broken(handler: BaseHTTPRequestHandler, over: threading.Event) -> None:
    handler.send_error(500, "out of order")


def never_ending(handler: BaseHTTPRequestHandler, over: threading.Event) -> None:
    start_stream(handler)
    handler.wfile.write(token())
    handler.wfile.flush()
    over.wait()


def test_byte_by_byte_over_a_socket(command: CommandLine) -> None:
    with serving(byte_by_byte) as url:
        outcome = command("bench", url, "--num-prompts", "3", "--output-len", "3", "--json")
    assert outcome.code == 0
    report = outcome.json
    assert (report["completed"], report["failed"], report["output_tokens"]) == (3, 0, 9)
    assert report["measured"] is True
    assert report["itl_ms"]["count"] == 6
    assert report["connect_ms"]["count"] > 0
    assert report["preemptions"] is None


def test_a_closed_port(command: CommandLine) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        outcome = command("bench", f"http://127.0.0.1:{reserved.getsockname()[1]}", "--num-prompts", "4", "--json")
    assert outcome.code == 1
    report = outcome.json
    assert (report["completed"], report["failed"], report["failures"]) == (0, 4, {"connect": 4})
    assert [report[name] for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")] == [NOTHING] * 4


def test_a_closed_port_as_a_table(command: CommandLine) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        outcome = command("bench", f"http://127.0.0.1:{reserved.getsockname()[1]}", "--num-prompts", "4")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "accepts no connection" in outcome.err
    assert "nothing was sent; check that the server runs and that host and port are right" in outcome.err


def test_without_an_answer_the_reasons_are_shown_and_no_empty_table(command: CommandLine) -> None:
    with serving(broken) as url:
        outcome = command("bench", url, "--num-prompts", "2")
    assert (outcome.code, outcome.out.count("\n")) == (1, 1)
    assert "n/a" not in outcome.out
    assert "error: 2 of 2 requests failed: http 500" in outcome.err


def prompts(command: CommandLine, url: str, bodies: list[dict[str, Any]], *options: str) -> list[list[int]]:
    """Return the prompts of a run with lengths from 4 to 40, sorted by length, and check that it reports its seed."""
    bodies.clear()
    outcome = command("bench", url, "--num-prompts", "6", "--input-len", "4..40", "--json", *options)
    assert (outcome.code, len(bodies)) == (0, 6)
    assert (outcome.json["workload"]["prompt_seed"] == 0) == ("--prompt-seed" in options)
    return sorted((body["prompt"] for body in bodies), key=len)


def test_runs_on_a_server_share_no_prompt_unless_asked(command: CommandLine) -> None:
    bodies: list[dict[str, Any]] = []
    with serving(byte_by_byte, bodies) as url:
        one, two = (prompts(command, url, bodies) for _ in range(2))
        assert [len(prompt) for prompt in one] == [len(prompt) for prompt in two]
        assert all(a[:4] != b[:4] for a in one for b in two)
        same = [prompts(command, url, bodies, "--prompt-seed", "0") for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("answer", "reason", "detail"), [(broken, "http 500", "out of order"), (never_ending, "timeout", "")]
)
def test_a_server_that_fails_or_hangs(command: CommandLine, answer: Answer, reason: str, detail: str) -> None:
    with serving(answer) as url:
        outcome = command("bench", url, "--num-prompts", "2", "--timeout", "200ms", "--json")
    assert outcome.code == 1
    assert outcome.json["failures"] == {reason: 2}
    assert detail in outcome.json["failure_examples"][reason]
    assert outcome.json["ttft_ms"] == NOTHING


def test_a_listener_that_never_answers(command: CommandLine) -> None:
    """The listener accepts connections but answers no request, not even the one for its models."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        outcome = command("bench", url, "--num-prompts", "2", "--timeout", "200ms", "--json")
    assert outcome.code == 1
    assert outcome.json["failures"] == {"timeout": 2}


def test_goodput_of_zero_is_shown_in_both_formats(command: CommandLine, tmp_path: Path) -> None:
    with serving(byte_by_byte) as url:
        outcome = command("bench", url, "--num-prompts", "2", "--slo-ttft", "0ms", "--save", str(tmp_path / "r.json"))
    assert outcome.code == 0
    assert "goodput 0.0 requests/s" in outcome.out
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["goodput_rps"], report["slo"]) == (0.0, {"ttft_ms": 0.0})
    assert report["attainment"] == {"ttft": 0.0, "all": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", "--block-size", "16"), "--block-size: the settings of a running server"),
        (("[::1]:1/v1", "--block-size", "16"), "--block-size: the settings of a running server"),
        (("HTTP://x", "--block-size", "16"), "--block-size: the settings of a running server"),
        (("ftp://x/",), "'ftp://x/' is not the URL of a server; write http://HOST:PORT or https://HOST:PORT"),
        (("http:8000",), "'http:8000' is not the URL of a server"),
        (("https//x",), "'https//x' is not the URL of a server"),
        (("127.0.0.1",), "'127.0.0.1' is an address without a port; write http://127.0.0.1:PORT"),
        (("localhost/v1",), "write http://localhost:PORT"),
        (("::1",), "write http://[::1]:PORT"),
        (("http://x", "--block-size", "16"), "--block-size: the settings of a running server"),
        (("http://", "--num-prompts", "1"), "names no host"),
        (("http://localhost:99999", "--num-prompts", "1"), "port must be 1 to 65535, not 99999"),
        (("http://host:port", "--num-prompts", "1"), "is not a URL"),
        (("http://me:secret@host", "--num-prompts", "1"), "--api-key sends a key"),
        (("http://host/v1?version=1", "--num-prompts", "1"), "has a query or a fragment"),
        (("http://host", "--api-key", "sch\u00f6n"), "--api-key may contain only printable ASCII"),
        (("http://x", "--reader-speed", "0"), "--reader-speed: 0 is out of range; allowed is above 0"),
        (("http://x", "--slo-itl", "p99:50"), "needs a unit"),
        (("http://x", "--slo-itl", "p100:5ms"), "not a statistic"),
        (("http://x", "--slo-itl", ":5ms"), "not a statistic"),
        (("http://x", "--slo-itl", "p99"), "is not a duration"),
        (("some-model", "--endpoint", "chat"), "--endpoint: only has an effect with the URL"),
        (("some-model", "--text-prompts", "--stop-at-eos"), "--text-prompts, --stop-at-eos: only has an effect"),
        (("some-model", "--api-key", "k"), "--api-key: only has an effect"),
        (("some-model", "--num-speculative-tokens", "4"), "tokens: 4 has no effect with --speculative off"),
        (("--self-check", "--num-prompts", "5", "demo"), "leave out --num-prompts, target"),
        (("http://x", "--prompt-seed", str(1 << 32)), "--prompt-seed: 4294967296 is out of range; allowed is 0 to 42"),
        (("http://x", "--timeout", "0s"), "--timeout: 0 is out of range"),
        (("http://x", "--num-prompts", "0"), "--num-prompts"),
        (("http://x", "--timeout", "5"), "needs a unit"),
        (("http://x", "--arrivals", "tidal"), "tidal"),
        (("http://x", "--input-len", "64-128"), "--input-len: '64-128'"),
        (("http://x", "--arrivals", "constant"), "--arrivals: only has an effect with a finite"),
        (("http://x", "--duration", "5s"), "--duration: has no effect when"),
    ],
)
def test_bad_usage_is_one_line(command: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    assert message in command.refused("bench", *arguments)


def test_a_model_in_this_process(command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    saved, detailed = tmp_path / "report.json", tmp_path / "detailed.jsonl"
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu"),
        *("--num-prompts", "6", "--max-concurrency", "1", "--input-len", "48", "--prefix-len", "32"),
        *("--output-len", "5", "--slo-e2e", "10min", "--save", str(saved), "--save-detailed", str(detailed), "--json"),
    )
    assert outcome.code == 0
    report = outcome.json
    assert (report["completed"], report["failed"]) == (6, 0)
    assert (report["input_tokens"], report["output_tokens"]) == (6 * 48, 6 * 5)
    assert report["token_counts"] == "exact per chunk"
    requests = [line for line in map(json.loads, detailed.read_text().splitlines()) if line["kind"] == "request"]
    assert [sum(tokens for _, tokens in request["chunks"]) for request in requests] == [5] * 6
    # All tokens after the first chunk have an ITL: 24, or less if a busy event loop merged tokens into first chunks.
    gaps = sum(5 - request["chunks"][0][1] for request in requests)
    assert (report["ttft_ms"]["count"], report["tpot_ms"]["count"], report["itl_ms"]["count"]) == (6, 6, gaps)
    assert report["prefix_hit_rate"] == pytest.approx(5 * 32 / (6 * 48))
    assert report["preemptions"] == 0
    assert report["attainment"] == {"e2e": 1.0, "all": 1.0}
    assert report["engine"]["num_gpu_blocks_override"] == 64
    assert json.loads(saved.read_text()) == report


def test_requests_that_can_never_fit_are_failures_with_their_reason(
    command: CommandLine, tiny_model: Callable[..., Path]
) -> None:
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu"),
        *("--num-prompts", "2", "--input-len", "500", "--output-len", "100", "--json"),
    )
    assert outcome.code == 1
    assert outcome.json["failures"] == {"refused": 2}
    assert "512" in outcome.json["failure_examples"]["refused"]
