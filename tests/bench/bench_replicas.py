"""Cost of the ingress and its router: a tiny model behind `serve --replicas 1` against plain `serve` (MEASURED).

Both servers run at the same time, and rounds alternate between them. A round sends short requests one after the other,
then streams at once. The bench prints the time of a short request (950 characters in, one token out), and
the CPU time per request and per token of each process on the way: Ray's proxy, the ingress with the router, the server.

python tests/bench/bench_replicas.py [STREAMS]    Default: 16. Takes about three minutes.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bench_http import Client
from tiny_models import save_tiny_model

ROUNDS, REQUESTS, OUTPUT_TOKENS = 4, 20, 300
SETTINGS = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--max-model-len", "4096"),
    *("--kv-cache-memory-bytes", "128MiB", "--no-enable-prefix-caching"),
)
#: Name of a process by what its command line contains.
PROCESSES = {
    "ProxyActor": "proxy",
    "ServeReplica:llmsched:ingress": "ingress",
    "ServeReplica:llmsched:replica": "server",
}

#: Seconds of CPU time by the name of the process.
CpuTimes = Mapping[str, float]


class Server:
    """`llmsched serve` as a process."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [str(Path(sys.executable).with_name("llmsched")), "serve", str(model), *SETTINGS, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._is_plain = not flags
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if found := re.search(r"ready: (http://\S+)/v1", line):
                self.url = found[1]
                return
        raise SystemExit("".join(said))

    def cpu(self) -> CpuTimes:
        root = psutil.Process(self._process.pid)
        found: defaultdict[str, float] = defaultdict(float)
        for process in [root] if self._is_plain else root.children(recursive=True):
            line = " ".join(process.cmdline())
            name = "server" if self._is_plain else next((PROCESSES[part] for part in PROCESSES if part in line), "rest")
            times = process.cpu_times()
            found[name] += times.user + times.system
        return found

    def spent(self, work: Callable[[], None]) -> CpuTimes:
        """Return the CPU time of each process while `work` runs."""
        before = self.cpu()
        work()
        return {name: after - before[name] for name, after in self.cpu().items()}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def requests(server: Server, times: list[float]) -> None:
    text = "one two three four " * 50
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for number in range(REQUESTS):
            begun = time.perf_counter()
            client.post("/v1/completions", json={"prompt": f"{number} {text}", "max_tokens": 1}).raise_for_status()
            times.append(time.perf_counter() - begun)


def streams(server: Server, count: int) -> None:
    fields = {"prompt": [100, 101, 102], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    receiver = Client(
        int(server.url.rpartition(":")[2]), count, head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    receiver.run()
    receiver.close()


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory), "llama", max_position_embeddings=4096)
        servers = {"serve": Server(model), "serve --replicas 1": Server(model, "--replicas", "1")}
        names, per_request, per_token = list(servers), defaultdict(list), defaultdict(list)
        times: dict[str, list[float]] = {name: [] for name in names}
        rates: defaultdict[str, list[float]] = defaultdict(list)
        try:
            for server in servers.values():  # warm-up
                streams(server, count)
                requests(server, [])
            for number in range(2 * ROUNDS):
                name = names[number % 2]
                server = servers[name]
                for process, spent in server.spent(partial(requests, server, times[name])).items():
                    per_request[name, process].append(spent / REQUESTS)
                begun = time.perf_counter()
                for process, spent in server.spent(partial(streams, server, count)).items():
                    per_token[name, process].append(spent / count / OUTPUT_TOKENS)
                rates[name].append(count * OUTPUT_TOKENS / (time.perf_counter() - begun))
        finally:
            for server in servers.values():
                server.close()
    print("                    process  CPU ms/request  CPU us/token")
    for name, process in per_request:
        request, token = (statistics.median(each[name, process]) for each in (per_request, per_token))
        print(f"{name:18}  {process:>7}  {1e3 * request:14.2f}  {1e6 * token:12.1f}")
    for name in names:
        p50, p90 = (1e3 * statistics.quantiles(times[name], n=10)[at] for at in (4, 8))
        rate = statistics.median(rates[name])
        print(f"{name:18}  short request {p50:.1f} ms (P50), {p90:.1f} ms (P90); {rate:.0f} tokens/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 16)
