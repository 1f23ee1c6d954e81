"""Step times of a Llama-3.1-8B, compared with the least time that its bytes and its arithmetic take.

These are measurements: only an error makes them fail. Times are medians of wall time after a warm-up; a step ends when
its tokens are on the host, so it includes the engine's own work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from batches import Shape, make_batch
from configs import resolved
from tiny_models import build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_suite.rows import CheckRow, failure
from llmsched.engine.core import Engine
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.request import SamplingParams
from llmsched.engine.text.tokenizer import Tokenizer
from llmsched.kernels import dispatch
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.toml_files import UnknownNameError

BLOCK = 16


@dataclass(frozen=True)
class Size:
    """Dimensions of the model (Llama-3.1-8B's by default) and of the measurements."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    context: int = 1024
    prefill: int = 2048
    batches: tuple[int, ...] = (1, 32)
    warmup: int = 8
    repeats: int = 30
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer_weights(self) -> int:
        """Number of weights in all layers; each takes part in every token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """KV bytes per token of context."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights on the device, the embedding included."""
        return (self.layer_weights + 2 * self.head_weights) * self.dtype.itemsize

    def output_tokens(self, batch: int) -> int:
        """Return an output length for which all sequences decode to the end: the first ones start earlier."""
        return self.warmup + self.repeats + batch * self.context // self.prefill + batch + 8

    def decode_bytes(self, batch: int) -> int:
        """Return the bytes that a decode step must read: all weights except unused rows of the embedding, and KV."""
        return (self.layer_weights + self.head_weights) * self.dtype.itemsize + batch * self.context * self.kv_bytes

    @property
    def prefill_flops(self) -> float:
        """Return the FLOP of one prefill: 2 per weight and token, causal attention, and the last token's logits."""
        attention = 2 * self.prefill * self.prefill * self.heads * self.head_dim * self.layers
        return 2.0 * self.layer_weights * self.prefill + attention + 2.0 * self.head_weights


SMALL = Size(
    layers=2, hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=320, context=40, prefill=48, batches=(1, 3),
    warmup=1, repeats=3, dtype=torch.float32,
)  # fmt: skip


@dataclass(frozen=True)
class DeviceLimits:
    """Bytes/s and FLOP/s of the device, and their source."""

    bandwidth: float
    flops: float
    source: str


def measure_speed(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Measure bandwidth, attention alone, decode steps and a prefill step."""
    size = fitting(SMALL if small else Size(), device)
    copied, multiplied = copy_bandwidth(device, small), product_flops(device, small)
    limits = limits_of(device, copied, multiplied)
    bandwidth = f"{limits.bandwidth / 1e9:,.0f} GB/s ({limits.source})"
    data = {"measured": copied, "floor_uses": limits.bandwidth}
    yield CheckRow("copy bandwidth", f"{copied / 1e9:,.0f} GB/s", bandwidth, data=data)
    flops, data = f"{limits.flops / 1e12:,.1f} TFLOP/s", {"measured": multiplied, "floor_uses": limits.flops}
    yield CheckRow("bf16 products", f"{multiplied / 1e12:,.1f} TFLOP/s", flops, data=data)
    for case, sequences in attention_cases(size).items():
        name = f"attention alone, {case}"
        yield attempt(name, lambda sequences=sequences, name=name: attention_row(name, size, sequences, device, limits))
    started = time.perf_counter()
    model = make_model(size, device)
    name = f"random weights on the device, {size.layers} layers"
    yield CheckRow(name, f"{time.perf_counter() - started:.1f} s", data={"layers": size.layers})
    for batch in size.batches:
        name = f"decode, batch {batch}, context {size.context}"
        yield attempt(name, lambda batch=batch, name=name: decode_row(name, model, size, batch, device, limits))
    name = f"prefill of {size.prefill}"
    yield attempt(name, lambda: prefill_row(name, model, size, device, limits))


def attempt(name: str, make: Callable[[], CheckRow]) -> CheckRow:
    """Run one measurement; report its failure as a row, so that the others still run."""
    try:
        return make()
    except Exception as error:
        return failure(name, error)


def fitting(size: Size, device: str) -> Size:
    """Return the size with as many layers as fit on the device."""
    if device != "cuda":
        return size
    free = 0.9 * torch.cuda.mem_get_info()[0]
    while size.layers > 1 and size.weight_bytes + 1.5 * max(size.batches) * size.context * size.kv_bytes > free:
        size = replace(size, layers=size.layers - 1)
    return size


# -- the device -----------------------------------------------------------------------------------------------


def limits_of(device: str, bandwidth: float, flops: float) -> DeviceLimits:
    """Return the datasheet's limits, or measured ones for a GPU that is not listed."""
    if device == "cuda":
        try:
            spec = find_gpu(torch.cuda.get_device_name())
        except UnknownNameError:
            return DeviceLimits(bandwidth, flops, "measured, not listed")
        return DeviceLimits(spec.bandwidth, spec.bf16_flops or flops, f"datasheet, {spec.key}")
    return DeviceLimits(bandwidth, flops, "measured")


def timed(run: Callable[[], Any], device: str, *, warmup: int, repeats: int) -> float:
    """Return the median seconds of one call, by the device's clock if it has one."""
    for _ in range(warmup):
        run()
    if device != "cuda":
        return median(wall(run) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in marks) / 1e3


def wall(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def copy_bandwidth(device: str, small: bool) -> float:
    """Return the bytes read and written per second by a copy much larger than any cache."""
    source = torch.ones((1 << 22) if small else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device, warmup=3, repeats=10)
    return 2 * source.nbytes / seconds


def product_flops(device: str, small: bool) -> float:
    """Return the FLOP/s of a large square bf16 product."""
    width = 128 if small else 8192
    one = torch.randn(width, width, device=device).to(torch.bfloat16)
    seconds = timed(lambda: one @ one, device, warmup=3, repeats=10)
    return 2.0 * width**3 / seconds


Sequences = tuple[tuple[int, int], ...]


def attention_cases(size: Size) -> dict[str, Sequences]:
    """Return batches of (new tokens, context) with KV larger than the GPU's cache."""
    batch, context = max(size.batches), size.context
    decodes, long, prompt = ((1, context),) * batch, ((1, context * batch),), ((size.prefill, size.prefill),)
    return {
        f"{batch} decodes of {context}": decodes,
        f"a decode of {context * batch}": long,
        f"a decode of {context * batch} among {batch - 1} of {context // 2}": ((1, context // 2),) * (batch - 1) + long,
        f"a prefill of {size.prefill}": prompt,
        f"a prefill of {size.prefill} beside {batch} decodes of {context}": decodes + prompt,
    }


def attention_row(name: str, size: Size, sequences: Sequences, device: str, limits: DeviceLimits) -> CheckRow:
    """Time one layer's attention. The floor is one read of the decodes' KV, and the products of visible keys."""
    made = make_batch(Shape(name, sequences, size.heads, size.kv_heads, size.head_dim), dtype=size.dtype, device=device)
    width, dtype_bytes = size.kv_heads * size.head_dim, size.dtype.itemsize
    kv_bytes = sum(2 * context * width * dtype_bytes for count, context in sequences if count == 1)
    visible = sum(count * (context - count / 2) for count, context in sequences if count > 1)
    flops = 4 * visible * size.heads * size.head_dim
    work = made.prepare()
    seconds = timed(
        lambda: dispatch.paged_attention(*made.tensors, work=work, **made.options),
        device,
        warmup=5,
        repeats=size.repeats,
    )
    floor = kv_bytes / limits.bandwidth + flops / limits.flops
    return beside(name, seconds, floor, {"kv_bytes": kv_bytes, "flops": flops})


# -- the engine -----------------------------------------------------------------------------------------------


def make_model(size: Size, device: str) -> Any:
    """Make a Llama with random weights on the device."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype).eval().requires_grad_(False)


def make_engine(model: Any, size: Size, batch: int, device: str, *, looks_ahead: bool = True) -> Engine:
    longest = max(size.context, size.prefill) + size.output_tokens(batch)
    num_blocks = math.ceil(1.2 * batch * (longest / BLOCK + 1))  # admission leaves a tenth free
    config = resolved(
        max_model_len=longest,
        max_num_batched_tokens=size.prefill,
        max_num_seqs=batch,
        block_size=BLOCK,
        enable_prefix_caching=False,
        async_scheduling=looks_ahead,
    )
    executor = TorchExecutor(model, num_blocks=num_blocks, block_size=BLOCK, device=device, kv_dtype=size.dtype)
    info = ModelInfo("llama", "LlamaForCausalLM", size.vocab, longest, frozenset())
    return Engine(config, info, Tokenizer(build_tokenizer()), executor, make_kv(config, num_blocks))


def decode_row(name: str, model: Any, size: Size, batch: int, device: str, limits: DeviceLimits) -> CheckRow:
    """Time steps in which `batch` sequences decode, with contexts around size.context, with and without lookahead."""
    times, waiting = (decode_times(model, size, batch, device, looks_ahead) for looks_ahead in (True, False))
    seconds = median(times)
    data = {"tokens_per_s": batch / seconds, "step_s": seconds, "slowest_step_s": max(times), "batch": batch}
    data["step_s_without_lookahead"] = median(waiting)
    row = beside(name, seconds, size.decode_bytes(batch) / limits.bandwidth, data)
    return replace(row, found=f"{batch / seconds:,.0f} tokens/s, {row.found}")


def decode_times(model: Any, size: Size, batch: int, device: str, looks_ahead: bool) -> list[float]:
    """Return the seconds of each step of `decode_row`."""
    engine = make_engine(model, size, batch, device, looks_ahead=looks_ahead)
    steps = size.warmup + size.repeats
    params = SamplingParams(temperature=0, max_tokens=size.output_tokens(batch), ignore_eos=True)
    length = size.context - steps // 2
    for index in range(batch):
        engine.add_request(str(index), [(index * 7919 + 31 * place) % size.vocab for place in range(length)], params)
    while engine.scheduler.waiting or any(not request.num_output_tokens for request in engine.scheduler.running):
        engine.step()
    times = [wall(engine.step) for _ in range(steps)][size.warmup :]
    assert len(engine.scheduler.running) == batch, "some sequences ended before the measurement did"
    engine.executor.close()  # type: ignore[attr-defined]
    return times


def prefill_row(name: str, model: Any, size: Size, device: str, limits: DeviceLimits) -> CheckRow:
    """Time a step that computes one prompt of size.prefill tokens and nothing else."""
    engine = make_engine(model, size, 1, device)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for index in range(3 + max(3, size.repeats // 4)):
        engine.add_request(str(index), [(index + 31 * place) % size.vocab for place in range(size.prefill)], params)
        times.append(wall(engine.step))
        assert not engine.has_work()
    seconds = median(times[3:])
    engine.executor.close()  # type: ignore[attr-defined]
    data = {"tokens_per_s": size.prefill / seconds, "step_s": seconds, "flops": size.prefill_flops}
    row = beside(name, seconds, size.prefill_flops / limits.flops, data)
    return replace(row, found=f"{size.prefill / seconds:,.0f} tokens/s, {row.found}")


def beside(name: str, seconds: float, floor: float, data: dict[str, Any]) -> CheckRow:
    found = f"{1e3 * seconds:.3g} ms, {seconds / floor:.2f} x the floor"
    return CheckRow(name, found, f"floor {1e3 * floor:.3g} ms", data=data | {"seconds": seconds, "floor_s": floor})
