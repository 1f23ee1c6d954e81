"""A Llama-3.1-8B with random weights, built with the default settings, and run in process and over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from statistics import median
from typing import Any
from unittest.mock import patch

from tiny_models import build_tokenizer

from gpu_suite.limits import attempt
from gpu_suite.llama import SMALL, Size, fitting, make_config, make_model
from gpu_suite.rows import CheckRow, failure
from gpu_suite.steps import without_graphs
from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.model import loader
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels import dispatch

#: Requests, tokens of a prompt and of an output.
LOAD, SMALL_LOAD = (64, 512, 128), (3, 20, 8)

#: Program of the client: sends all requests at once, and prints the seconds until the last answer has ended.
CLIENT = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen
url, bodies = sys.argv[1], json.loads(sys.stdin.read())
def ask(body):
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        return answer.read().endswith(b"data: [DONE]\\n\\n")
with ThreadPoolExecutor(len(bodies)) as pool:
    started = time.perf_counter()
    complete = list(pool.map(ask, bodies))
    print(json.dumps([time.perf_counter() - started, all(complete)]))
"""


def measure_serving(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Build an engine, run the same load twice in process, without lookahead, and over HTTP."""
    size, load = fitting(SMALL if small else Size(), device), SMALL_LOAD if small else LOAD
    started = time.perf_counter()
    engine = make_engine(size, device, small=small)
    yield CheckRow("ready after", f"{time.perf_counter() - started:.1f} s", data={"layers": size.layers})
    yield memory_row(engine)
    compiled = dispatch.num_compiled()
    first: list[list[int]] = []
    for name, looks_ahead, has_graphs in (
        ("in process", True, True),
        ("again", True, True),
        ("no lookahead", False, True),
        ("eager", True, False),
    ):
        engine = engine_beside(engine, async_scheduling=looks_ahead)
        with nullcontext() if has_graphs else without_graphs(engine.executor):
            tokens, row = run_load(name, engine, load)
        yield row
        first = first or tokens
        same = sum(one == two for one, two in zip(first, tokens, strict=True))
        yield CheckRow(f"equal outputs, {name}", f"{same} of {len(tokens)}", data={"equal": same})
    late = dispatch.num_compiled() - compiled
    yield CheckRow("kernels compiled after the warm-up", str(late), "0", late == 0)
    yield attempt("over HTTP", lambda: http_row("over HTTP", engine, load))


def make_engine(size: Size, device: str, *, small: bool) -> Engine:
    """Build an engine from a directory without weights, which are made on the device instead of read."""
    with tempfile.TemporaryDirectory() as folder, patch.object(
        loader, "load_model", lambda *_, **__: make_model(size, device)
    ):  # fmt: skip
        make_config(size).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        limits = {"kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 4, "max_num_batched_tokens": 32} if small else {}
        return build_engine(
            EngineConfig(
                model=folder, device=device, max_model_len=256 if small else 8192,
                dtype=str(size.dtype).removeprefix("torch."), **limits,
            )
        )  # fmt: skip


def memory_row(engine: Engine) -> CheckRow:
    plan: Any = engine.plan
    found = ", ".join(f"{part} {count / 2**30:.2f} GiB" for part, count in plan.fixed_parts.items())
    data = {"plan": plan.fixed_parts, "kv_bytes": plan.kv_bytes, "num_blocks": plan.num_blocks}
    data["measured"] = None if plan.measured is None else asdict(plan.measured)
    return CheckRow("planned memory", f"KV {plan.kv_bytes / 2**30:.2f} GiB, {found}", f"{plan.measured}", data=data)


def prompts(load: tuple[int, int, int]) -> list[list[int]]:
    count, length, _ = load
    return [[4 + (index * 7919 + place * 31) % 290 for place in range(length)] for index in range(count)]


def run_load(name: str, engine: Engine, load: tuple[int, int, int]) -> tuple[list[list[int]], CheckRow]:
    """Run all requests at once. Return their output tokens, and a row with the rate and the times of steps."""
    params = SamplingParams(temperature=0, max_tokens=load[2], ignore_eos=True)
    found: dict[str, list[int]] = {}
    times = []
    started = time.perf_counter()
    for index, prompt in enumerate(prompts(load)):
        engine.add_request(str(index), prompt, params)
        found[str(index)] = []
    while engine.has_work():
        before = time.perf_counter()
        for output in engine.step():
            found[output.request_id] += output.token_ids
        times.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started
    rate, step = load[0] * load[2] / seconds, median(times[-load[2] // 2 :])
    data = {"seconds": seconds, "tokens_per_s": rate, "decode_step_s": step, "slowest_step_s": max(times)}
    text = f"{rate:,.0f} tokens/s, a decode step {1e3 * step:.3g} ms, the slowest step {1e3 * max(times):.3g} ms"
    return list(found.values()), CheckRow(f"{load[0]} x {load[1]} in, {load[2]} out, {name}", text, data=data)


def http_row(name: str, engine: Engine, load: tuple[int, int, int]) -> CheckRow:
    """Run the load over HTTP, from a client in its own process. Without a web framework, say so."""
    try:
        from scripted import LiveServer
    except ImportError as error:
        return CheckRow(name, f"not measured: {error}")
    server = LiveServer(engine_beside(engine), name="llama").start()
    try:
        bodies = [
            {"model": "llama", "prompt": prompt, "max_tokens": load[2], "temperature": 0, "ignore_eos": True,
             "stream": True}
            for prompt in prompts(load)
        ]  # fmt: skip
        command = [sys.executable, "-c", CLIENT, f"{server.url}/v1/completions"]
        done = subprocess.run(command, input=json.dumps(bodies), capture_output=True, text=True, check=False)
        if done.returncode:
            return failure(name, RuntimeError(done.stderr[-200:]))
        seconds, complete = json.loads(done.stdout)
    finally:
        server.close()
    rate = load[0] * load[2] / seconds
    return CheckRow(name, f"{rate:,.0f} tokens/s", "all answers complete", complete, {"tokens_per_s": rate})
