"""Steps of a Llama-3.1-8B in the executor: how long each takes, what it launches, and for how long the GPU is busy.

A step's time is wall time until its tokens are on the host. "Ahead" is the time of a step if the next one is launched
before its tokens are known, as the engine does. The floor is the time that the step's bytes or its products take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_suite.limits import DeviceLimits, attempt, measured_limits, timed, wall
from gpu_suite.llama import SMALL, Size, fitting, make_model
from gpu_suite.rows import CheckRow
from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.executor.warmup import EVERYTHING, PLAIN
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels import dispatch

BLOCK = 16
GREEDY = SamplingParams(temperature=0)
#: Steps that the profiler records.
PROFILED = 5
#: Share of the free memory that holds KV. Rows of a step share blocks if there are too few.
KV_SHARE = 0.6

Rows = list[tuple[int, int]]  # (context, new tokens) of each sequence


def measure_steps(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Measure steps of many kinds, then the same decodes without graphs and through transformers."""
    size = fitting(SMALL if small else Size(), device)
    limits, model = measured_limits(device, small=small), make_model(size, device)
    executor = make_executor(model, size, device, "fused")

    def row(name: str, rows: Rows, sampling: SamplingParams = GREEDY) -> CheckRow:
        return attempt(name, lambda: step_row(name, executor, size, rows, sampling, limits, device))

    yield from prepare(executor, size)
    compiled = dispatch.num_compiled()
    for name, (rows, sampling) in scenarios(size).items():
        yield row(name, rows, sampling)
    late = dispatch.num_compiled() - compiled
    yield CheckRow("kernels compiled after the warm-up", str(late), "0", late == 0)
    for batch in size.batches:
        yield attempt(f"products alone, {batch} rows", partial(products_row, executor, size, batch, device))
    compared = {f"{batch} decodes of {size.context}": batch for batch in (1, size.many, max(size.batches))}
    with without_graphs(executor):
        for name, batch in compared.items():
            yield row(f"{name}, eager", [(size.context - 1, 1)] * batch)
    executor.close()
    executor = make_executor(model, size, device, "transformers")
    yield from prepare(executor, size)
    for name, batch in compared.items():
        yield row(f"{name}, transformers", [(size.context - 1, 1)] * batch)
        with without_graphs(executor):
            yield row(f"{name}, transformers, eager", [(size.context - 1, 1)] * batch)
    executor.close()


def scenarios(size: Size) -> dict[str, tuple[Rows, SamplingParams]]:
    """Return the steps by name: their rows, and the sampling parameters of all rows."""
    many, context = size.many, size.context
    found: dict[str, tuple[Rows, SamplingParams]] = {}
    for length in (context, size.long_context):
        for batch in size.batches:
            found[f"{batch} decodes of {length}"] = [(length - 1, 1)] * batch, GREEDY
    decodes = [(context - 1, 1)] * many
    long = [(size.longest - 1, 1)]
    chunk = size.prefill - many
    found[f"a decode of {size.longest} among {many - 1} of {context}"] = long + decodes[1:], GREEDY
    found[f"a prefill of {size.prefill}"] = [(0, size.prefill)], GREEDY
    found[f"a chunk of {chunk} beside {many} decodes of {context}"] = [(0, chunk), *decodes], GREEDY
    found[f"a chunk of {chunk} after {size.long_context - chunk} beside {many} decodes"] = (
        [(size.long_context - chunk, chunk), *decodes],
        GREEDY,
    )
    for batch in (many, max(size.batches)):
        found[f"{batch} decodes of {context}, top_p"] = [(context - 1, 1)] * batch, PLAIN
    found[f"{many} decodes of {context}, penalties and logprobs"] = decodes, EVERYTHING
    return found


def make_executor(model: Any, size: Size, device: str, impl: Any) -> TorchExecutor:
    num_blocks = 2 * size.many * size.longest // BLOCK
    if device == "cuda":
        torch.cuda.empty_cache()
        num_blocks = int(KV_SHARE * torch.cuda.mem_get_info()[0]) // (BLOCK * size.kv_bytes)
    return TorchExecutor(
        model, num_blocks=num_blocks, block_size=BLOCK, device=device, kv_dtype=size.dtype, model_impl=impl,
        max_model_len=size.longest,
    )  # fmt: skip


def prepare(executor: TorchExecutor, size: Size) -> Iterator[CheckRow]:
    """Warm the executor up and capture its graphs. Return how long both took."""
    name, rows = f"warm-up, {executor.model_impl}", max(size.batches)
    started = time.perf_counter()
    executor.warmup(size.prefill, rows, size.longest)
    yield CheckRow(name, f"{time.perf_counter() - started:.1f} s", data={"seconds": time.perf_counter() - started})
    captured = executor.capture(rows, size.longest)
    yield CheckRow(f"graphs, {executor.model_impl}", f"{captured}")


@contextmanager
def without_graphs(executor: Any) -> Iterator[None]:
    graphs, executor._graphs = executor._graphs, None
    try:
        yield
    finally:
        executor._graphs = graphs


def step_row(
    name: str,
    executor: TorchExecutor,
    size: Size,
    rows: Rows,
    sampling: SamplingParams,
    limits: DeviceLimits,
    device: str,
) -> CheckRow:
    """Time one kind of step, alone and ahead, and profile it."""
    dummies = [executor._dummy_row(index, count, start, sampling) for index, (start, count) in enumerate(rows)]
    plan = StepPlan(dummies)
    for _ in range(size.warmup):
        executor.execute(plan)
    alone = median(wall(lambda: executor.execute(plan)) for _ in range(size.repeats))
    ahead = wall(lambda: run_ahead(executor, plan, size.repeats)) / size.repeats
    launches, busy = profiled(lambda: executor.execute(plan), device)
    executor._sampler.forget(str(index) for index in range(len(rows)))
    floor = size.least_seconds(rows, limits.bandwidth, limits.flops)
    data = {
        "rows": len(rows),
        "tokens": sum(count for _, count in rows),
        "step_s": alone,
        "step_ahead_s": ahead,
        "tokens_per_s": len(rows) / ahead,
        "launches": launches,
        "gpu_busy_s": busy,
        "gap_s": alone - busy,
        "gap_ahead_s": ahead - busy,
        "floor_s": floor,
        "layers": size.layers,
    }
    found = f"{1e3 * ahead:.3g} ms ahead, {1e3 * alone:.3g} ms alone, GPU busy {1e3 * busy:.3g} ms, {launches} launches"
    return CheckRow(name, f"{found}, {ahead / floor:.2f} x the floor", f"floor {1e3 * floor:.3g} ms", data=data)


def run_ahead(executor: TorchExecutor, plan: StepPlan, count: int) -> None:
    """Run the step `count` times, each launched before the results of the one before are collected."""
    pending = executor.launch(plan)
    for _ in range(count - 1):
        following = executor.launch(plan)
        executor.collect(pending)
        pending = following
    executor.collect(pending)


def profiled(run: Callable[[], Any], device: str) -> tuple[int, float]:
    """Return the launches of one call, and the seconds for which the GPU is busy. Both are 0 without a GPU."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        for _ in range(PROFILED):
            run()
    events = recorded.events() or []
    launches = sum(event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")) for event in events)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("ProfilerStep", "##"))
    ]
    return round(launches / PROFILED), 1e-6 * covered(spans) / PROFILED


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def products_row(executor: TorchExecutor, size: Size, batch: int, device: str) -> CheckRow:
    """Time all matrix products of a step of decodes, on a GPU in one graph: what remains if all else took no time."""
    decoder: Any = executor._model
    kernels = decoder._kernels
    hidden = torch.randn(batch, size.hidden, device=device).to(size.dtype)
    heads = torch.randn(batch, size.heads * size.head_dim, device=device).to(size.dtype)
    inner = torch.randn(batch, size.inner, device=device).to(size.dtype)

    def run() -> None:
        for layer in decoder._layers:
            layer.project.compute(kernels, hidden)
            layer.output.compute(kernels, heads)
            layer.mlp.up.compute(kernels, hidden)
            layer.mlp.down.compute(kernels, inner)
        decoder._head.compute(kernels, hidden)

    with torch.inference_mode():
        replay: Callable[[], Any] = captured(run) if device == "cuda" else run
        seconds = timed(replay, device, warmup=3, repeats=size.repeats)
    data = {"seconds": seconds, "rows": batch}
    return CheckRow(f"products alone, {batch} rows", f"{1e3 * seconds:.3g} ms", data=data)


def captured(run: Callable[[], None]) -> Callable[[], Any]:
    """Return a function that replays a CUDA graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
