"""Time that /health takes to answer while a server is attacked (MEASURED).

Run `python tests/bench/bench_attacks.py [NAME ...]`: it starts `llmsched serve demo` for each attack, attacks it, and
prints the median, the 95th percentile and the longest time of /health. The aim is a 95th percentile below 100 ms on two
quiet cores, of which the attacker takes one. Takes about 4 minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import attacks
from attacks import COMPLETIONS, all_at_once, ask, completion, idle_connections, one_byte_chunks
from costly_grammars import GRAMMARS

CHAT = "/v1/chat/completions"
#: A server whose context is short, as in the reports.
SHORT = ("--max-model-len", "512")


@contextmanager
def serving(*arguments: str, nofile: int | None = None) -> Iterator[tuple[str, Path]]:
    """Start `llmsched serve demo`; once it is ready, yield its URL and the file with its log."""
    command = [sys.executable, "-c", "from llmsched.cli.main import main; main()", "serve", "demo", "--port", "0"]
    limit = ["bash", "-c", f'ulimit -n {nofile}; exec "$@"', "serve"] if nofile else []
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        child = subprocess.Popen(
            [*limit, *command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ}
        )
        try:
            assert child.stdout is not None
            url = next(line.split()[1] for line in child.stdout if line.startswith("ready: ")).removesuffix("/v1")
            yield url, Path(log.name)
        finally:
            child.kill()
            child.wait()


def connections(count: int) -> Callable[[str, Path], str]:
    """Return an attack that holds connections without a request."""

    def attack(url: str, log: Path) -> str:
        lines = len(log.read_text().splitlines())
        with idle_connections(url, count) as sockets:
            time.sleep(5)
            gone = sum(map(attacks.closed, sockets))
        return f"{gone} of {count} closed, {len(log.read_text().splitlines()) - lines} log lines"

    return attack


def chunks(connections: int) -> Callable[[str, Path], str]:
    """Return an attack that sends bodies of a million chunks of one byte."""
    return lambda url, _: counted(all_at_once(connections, lambda _: one_byte_chunks(url, 1_000_000)))


def burst(count: int) -> Callable[[str, Path], str]:
    """Return an attack that sends streaming requests at once."""

    def attack(url: str, _: Path) -> str:
        answers = attacks.burst(url, count, completion(max_tokens=400, ignore_eos=True, stream=True))
        late = sum(b"queue_full" in first for status, first in answers if status == 200)
        retry = sum(b"retry-after" in first.lower() for status, first in answers if status == 429)
        statuses = {status: sum(s == status for s, _ in answers) for status in (200, 429)}
        return f"{counted(statuses)}, {retry} with Retry-After, {late} refused after 200"

    return attack


def large(bodies: list[bytes], path: str = COMPLETIONS) -> Callable[[str, Path], str]:
    """Return an attack that sends large bodies at once, beside requests of one token."""

    def attack(url: str, _: Path) -> str:
        small: list[float] = []
        with attacks.ThreadPoolExecutor(len(bodies)) as pool:
            sent = [pool.submit(ask, url, path, body) for body in bodies]
            while not all(each.done() for each in sent):
                begun = time.perf_counter()
                ask(url, COMPLETIONS, completion())
                small.append(time.perf_counter() - begun)
        small.sort()
        statuses = [each.result()[0] for each in sent]
        return (
            f"{counted({status: statuses.count(status) for status in set(statuses)})}; 1 token beside it: median "
            f"{1000 * small[len(small) // 2]:.0f} ms, longest {1000 * small[-1]:.0f} ms"
        )

    return attack


def grammars() -> list[bytes]:
    """Return requests with schemas and expressions that cost much to compile."""
    bodies = []
    for spec in GRAMMARS.values():
        value = spec.text if spec.kind == "regex" else json.loads(spec.text)
        name = "json" if spec.kind == "json_schema" else spec.kind
        bodies.append(completion(structured_outputs={name: value}))
    return bodies


def counted(statuses: dict[Any, int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items(), key=str))


def prompts(characters: int) -> bytes:
    return completion(prompt=[("word " * characters)[:characters]] * 1024)


IDS = b'{"prompt": [' + b"1," * 3_900_000 + b"1]}"
MESSAGES = json.dumps({"messages": [{"role": "user", "content": ""}] * 100_000}).encode()

#: Attack -> arguments of the server, limit of open files, function.
ATTACKS: dict[str, tuple[tuple[str, ...], int | None, Callable[[str, Path], str]]] = {
    "none": ((), None, lambda url, _: time.sleep(5) or "-"),
    "S01 1,100 idle connections, 1,024 files": ((), 1024, connections(1100)),
    "S01 400 idle connections, 256 files": ((), 256, connections(400)),
    "S02 1 M chunks of 1 byte, 1 connection": ((), None, chunks(1)),
    "S02 1 M chunks of 1 byte, 32 connections": ((), None, chunks(32)),
    "S02 the same without the key": (("--api-key", "k"), None, chunks(32)),
    "S03 3,000 streams, 2,048 may wait": (SHORT, None, burst(3000)),
    "S03 4,000 streams, 2,048 may wait": (SHORT, None, burst(4000)),
    "S04 12 x 1,024 prompts of 7,600 characters": (SHORT, None, large([prompts(7600)] * 12)),
    "S04 12 texts of 7 MB": (("--max-model-len", "2048"), None, large([completion(prompt="word " * 1_400_000)] * 12)),
    "S04 12 x 100,000 empty messages": (SHORT, None, large([MESSAGES] * 12, CHAT)),
    "S10 12 x 3.9 M token ids": (SHORT, None, large([IDS] * 12)),
    f"{len(GRAMMARS)} costly grammars": ((), None, large(grammars())),
}


def main() -> None:
    print(f"{'attack':<44} {'/health p50':>12} {'p95':>8} {'max':>8}  outcome")
    for name, (arguments, nofile, attack) in ATTACKS.items():
        if sys.argv[1:] and not any(given in name for given in sys.argv[1:]):
            continue
        with serving(*arguments, nofile=nofile) as (url, log):
            with attacks.watched(url) as health:
                outcome = attack(url, log)
            p50, p95, longest = (f"{1000 * health.at(share):.0f} ms" for share in (0.5, 0.95, 1))
            if failed := sum(count for status, count in health.statuses.items() if status != 200):
                outcome += f"; /health failed {failed} times"
            print(f"{name:<44} {p50:>12} {p95:>8} {longest:>8}  {outcome}", flush=True)


if __name__ == "__main__":
    main()
