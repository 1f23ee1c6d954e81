"""Least time of steps: the matrix products and the attention of all layers, through the engine's calls, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_kernels import best_times
from bench_products import all_products

from llmsched.engine import EngineConfig
from llmsched.engine.build import build_engine
from llmsched.engine.executor.buffers import StepBuffers
from llmsched.engine.executor.recorded_decodes import MAX_ROWS
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.kernels.cpu.recording import Recording

Step = list[tuple[int, int]]  # tokens before the step and new tokens of each sequence


def load_executor(config: EngineConfig) -> TorchExecutor:
    """Load a model as `llmsched serve` does on a CPU. Raises TypeError for a model whose layers are not fused."""
    executor = build_engine(config).executor
    if not isinstance(executor, TorchExecutor) or executor.model_impl != "fused":
        raise TypeError(f"{config.model} does not run through fused layers, whose products can be told apart")
    return executor


def floors(executor: TorchExecutor, steps: list[Step], seconds: float) -> list[float]:
    """Return the best time of each step's products and attention, in seconds. The steps take turns for `seconds`."""
    with torch.inference_mode():
        contenders = {str(number): products_and_attention(executor, step) for number, step in enumerate(steps)}
        return list(best_times(contenders, seconds, "cpu").values())


def products_and_attention(executor: TorchExecutor, step: Step) -> Callable[[], None]:
    decoder: Any = executor._model
    tokens, dtype = sum(new for _, new in step), decoder._dtype
    multiply = all_products(executor, dtype, tokens, num_logits=len(step))
    buffers = executor._buffers = StepBuffers(executor.device, 1 << 20)
    _, inputs = executor._pack(executor.rehearsal(step).rows)
    executor._buffers.upload()
    context, calls = inputs.context, [layer.call for layer in decoder._layers]
    queries = [torch.randn(tokens, call.heads, call.shape.key_dim).to(dtype) for call in calls]

    def run() -> None:
        multiply()
        for index, (query, call) in enumerate(zip(queries, calls, strict=True)):
            keys, values, group, scales = context.cache.of_layer(index)
            decoder._kernels.paged_attention(
                query, keys, values, context.block_tables[group], context.cu_seqlens_q, context.context_lens,
                work=context.works[index], scale=call.scale, window=call.shape.window, softcap=call.softcap,
                sinks=call.sinks, slopes=call.slopes, kv_scales=scales,
            )  # fmt: skip

    if tokens > MAX_ROWS:
        return run
    with Recording() as recording:
        run()

    def replay(inputs: object = (run, buffers)) -> None:  # a recording does not keep its inputs
        recording.replay()

    return replay
