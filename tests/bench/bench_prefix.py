"""CPU time of the KV manager without a model, MEASURED on this machine: medians.

python tests/bench/bench_prefix.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.sampling_params import SamplingParams

BLOCK = 16
NUM_BLOCKS = 8_192
NUM_RUNNING = 256


def main() -> None:
    for count in (2_048, 32_768):
        print(f"{count} tokens")
        lookups(random.Random(0).choices(range(100_000), k=count))
    print("others")
    crowded_root()
    decode_steps()


def lookups(prompt: list[int]) -> None:
    kv = KVManager(NUM_BLOCKS, KVLayout(BLOCK))
    write(kv, make(prompt))
    waiting = make(prompt)
    on_its_way = KVManager(NUM_BLOCKS, KVLayout(BLOCK))
    on_its_way.admit(writer := make([*prompt, 1]), on_its_way.prefix_cache.find(writer))
    show("find_prefix, all cached, first look", median(kv.prefix_cache.find, prompt))
    show("find_prefix, all cached, looked up before", median(lambda _: kv.prefix_cache.find(waiting), prompt))
    show("find_prefix, nothing cached", median(kv.prefix_cache.find, prompt[::-1]))
    show("find_prefix and find_in_flight, all on its way", median(lambda r: look_in_flight(on_its_way, r), prompt))
    show("find, classify, admit and release, all cached", median(lambda r: come_and_go(kv, r), prompt))
    show("admit, commit and release, all new, pool full", rewriting(prompt))


def make(prompt: list[int]) -> Request:
    return Request("r", list(prompt), len(prompt), SamplingParams(), 0, frozenset())


def write(kv: KVManager, request: Request) -> None:
    kv.admit(request, kv.prefix_cache.find(request))
    request.num_computed_tokens = request.num_tokens
    kv.commit(request)
    kv.release(request)


def look_in_flight(kv: KVManager, request: Request) -> int:
    return kv.prefix_cache.num_coming(request, kv.prefix_cache.find(request))


def come_and_go(kv: KVManager, request: Request) -> None:
    hit = kv.prefix_cache.find(request)
    kv.prefix_cache.classify(request, hit)
    kv.admit(request, hit)
    kv.copies.take()
    kv.release(request)


def median(action: Callable[[Request], object], prompt: list[int], repeats: int = 201) -> float:
    """Return the median seconds of action(a new request)."""
    samples = []
    for _ in range(repeats):
        request = make(prompt)
        started = time.perf_counter()
        action(request)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def rewriting(prompt: list[int]) -> float:
    """Use a new prompt each time in a full pool, so that every block is evicted, written and cached again."""
    kv = KVManager(2 * len(prompt) // BLOCK, KVLayout(BLOCK))
    samples = []
    for i in range(21):
        request = make([i, *prompt[1:]])
        started = time.perf_counter()
        write(kv, request)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def crowded_root() -> None:
    """Cache thousands of prompts that begin alike and diverge within the first block."""
    kv = KVManager(NUM_BLOCKS, KVLayout(BLOCK))
    for i in range(4_000):
        write(kv, make([*range(8), i, *range(23)]))
    show(
        "find_prefix among 4000 that part in the first block", median(kv.prefix_cache.find, [*range(8), -1, *range(23)])
    )


def decode_steps() -> None:
    """Do the KV part of a step in which 256 requests decode."""
    kv = KVManager(NUM_RUNNING * 64, KVLayout(BLOCK))
    running = [make(random.Random(i).choices(range(100_000), k=500 + i % BLOCK)) for i in range(NUM_RUNNING)]
    for request in running:
        kv.admit(request, kv.prefix_cache.find(request))
        request.num_computed_tokens = request.num_tokens - 1
        kv.commit(request)
    show("decode of 256, none at a block boundary", statistics.median(decode(kv, running, 0) for _ in range(201)))
    show("decode of 256, each 16th at a boundary", statistics.median(decode(kv, running, 1) for _ in range(64)))


def decode(kv: KVManager, running: list[Request], advance: int) -> float:
    started = time.perf_counter()
    for request in running:
        table = request.table
        if request.num_tokens > table.capacity:
            kv.blocks.grow(request)
        request.num_computed_tokens += advance
        if request.num_computed_tokens >= table.commit_at:
            kv.commit(request)
        request.token_ids.extend([7] * advance)
    return time.perf_counter() - started


def show(what: str, seconds: float) -> None:
    print(f"  {what:<56}{seconds * 1e6:>10.1f} us")


if __name__ == "__main__":
    main()
