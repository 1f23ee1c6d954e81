"""Soak: thousands of mixed requests over HTTP, with the memory of the server and what it still holds (MEASURED).

The engine and the server are real; the model is scripted and its steps take no time. Requests are streamed or whole,
on both routes, with shared prefixes, several choices, stop strings and log-probabilities. Some are invalid, and some
clients leave in the middle of a stream. After every tenth part, the bench prints the server's memory. At the end it
checks that no request runs or waits, that no block is in use, and that every answer had the status that it should have.

python tests/bench/bench_soak.py [REQUESTS]    Default: 20000. Takes about 4 minutes.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from scripted import scripted_process

CLIENTS = 64
NUM_BLOCKS = 512
SETTINGS = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": NUM_BLOCKS, "max_queue_size": 256}


def request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return a route, a body, and the status of the answer."""
    words = "".join(rng.choices("abcdefgh", k=rng.randrange(4, 120)))
    text = rng.choice(["system prompt " * 4, ""]) + words
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "stream": rng.random() < 0.6, "ignore_eos": True}
    body |= rng.choice([{}, {}, {"n": 2}, {"stop": ["c"]}, {"temperature": 0}, {"priority": 1}, {"seed": 3}])
    if rng.random() < 0.04:
        body |= rng.choice([{"max_tokens": -1}, {"temperature": 9}, {"unknown": 1}, {"max_tokens": 100_000}])
        return "/v1/completions", body | {"prompt": text}, 400
    if rng.random() < 0.5:
        chat = {"messages": [{"role": "user", "content": text}]} | rng.choice([{}, {"logprobs": True}])
        return "/v1/chat/completions", body | chat, 200
    return "/v1/completions", body | {"prompt": text} | rng.choice([{}, {"logprobs": 2}]), 200


async def send(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Send one request and return what came of it: the status, "left" for a client that left, or "wrong ..."."""
    route, body, expected = request(rng)
    leaves = body["stream"] and expected == 200 and rng.random() < 0.1
    async with client.stream("POST", route, json=body) as answer:
        if leaves:
            async for _ in answer.aiter_raw():
                return "left"
        text = await answer.aread()
    if answer.status_code != expected:
        return f"wrong {answer.status_code} instead of {expected}: {text[:200]!r}"
    if body["stream"] and expected == 200 and not text.endswith(b"data: [DONE]\n\n"):
        return f"wrong end of a stream: {text[-200:]!r}"
    return str(answer.status_code)


async def soak(url: str, process: psutil.Process, total: int) -> list[str]:
    """Send the requests and return what is wrong."""
    outcomes: Counter[str] = Counter()
    rng = random.Random(0)
    begun = time.perf_counter()

    def report() -> None:
        memory, threads, files = process.memory_info().rss / 2**20, process.num_threads(), process.num_fds()
        seconds = time.perf_counter() - begun
        print(f"{outcomes.total():8}  {memory:10.1f}  {threads:7}  {files:5}  {seconds:8.1f}", flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        print("requests  memory MiB  threads  files  seconds")
        report()

        async def work() -> None:
            while (number := outcomes.total() + len(running)) < total:
                running.add(number)
                try:
                    outcome = await send(client, rng)
                finally:
                    running.discard(number)
                outcomes[outcome] += 1
                if outcomes.total() % (total // 10) == 0:
                    report()

        running: set[int] = set()
        await asyncio.gather(*(work() for _ in range(CLIENTS)))
        await asyncio.sleep(2)
        await client.post("/reset_prefix_cache")
        metrics = (await client.get("/metrics")).text
    report()
    print(", ".join(f"{count} x {outcome}" for outcome, count in sorted(outcomes.items())))
    wrong = [outcome for outcome in outcomes if outcome.startswith("wrong")]
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_blocks_cached"):
        found = re.search(rf"^llmsched:{gauge}{{.*}} (\S+)$", metrics, re.MULTILINE)
        if found is None or float(found[1]):
            wrong.append(f"{gauge} is {found[1] if found else 'missing'} at the end; it should be 0")
    return wrong


def main() -> None:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with scripted_process(**SETTINGS) as (child, url):
        wrong = asyncio.run(soak(url, psutil.Process(child.pid), total))
        if child.poll() is not None:
            wrong.append(f"the server ended with {child.returncode}")
    print("\n".join(wrong) or "nothing wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
