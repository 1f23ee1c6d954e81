"""Executor that runs a model over the paged KV cache and samples tokens."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.context_limit import rotary_limit
from llmsched.engine.config import ModelImplementation
from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.executor.base import Executor, RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.executor.batch import PackedBatch, pack, split
from llmsched.engine.executor.buffers import MAX_STEP_BYTES, StepBuffers, step_bytes, to_device
from llmsched.engine.executor.graphs import CHECKED_CONTEXTS, DecodeGraphs, ModelInputs, Recorder, cuda_recorder
from llmsched.engine.executor.host_blocks import HostBlocks
from llmsched.engine.executor.in_flight import LaunchedPart, LaunchedStep, PackedPart, SampledTokens
from llmsched.engine.executor.recorded_decodes import RecordedDecodes, recorded_decodes
from llmsched.engine.executor.sampler import PendingLogprobs, Sampler, enqueue_logprobs, parameters_of
from llmsched.engine.executor.state_memory import StateMemory
from llmsched.engine.executor.stopwatch import Stopwatch
from llmsched.engine.executor.warmup import expanding_steps, warmup_steps
from llmsched.engine.garbage_collection import paused_collection
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.recurrent_state import RowState
from llmsched.engine.memory.activation_memory import LOGITS_BYTES
from llmsched.engine.memory.graph_memory import CapturedGraphs, graph_sizes
from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.kv_scales import ScaleName, kv_scales
from llmsched.engine.model.paged_cache import KVCache, PagedContext
from llmsched.engine.model.recurrent_layers import StepStates
from llmsched.engine.model.transformers_model import paged_model
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels.dispatch import prepare_attention, prepare_lora

logger = logging.getLogger(__name__)

#: Sampling parameters of rehearsals.
_GREEDY = SamplingParams(temperature=0)


class TorchExecutor(Executor):
    """Executor that runs one model on one device. Not thread-safe: only the engine thread may call it.

    Raises ModelError if the engine cannot compute the model exactly, if the model does not support max_model_len
    tokens, or if `layout` does not suit the layers.
    """

    # On a GPU it looks ahead: a step reads the ids of pending tokens on the device, so its launch need not wait until
    # the host knows them. On a CPU, `launch` computes the step, so looking ahead would gain nothing. Other rows of a
    # batch change a row's logits only through rounding, because matrix products of different sizes add numbers in
    # different orders. The change is about 1e-6 (fp32) or a few bf16 ulps, which can swap two tokens with nearly equal
    # logits.

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        kv_dtype: torch.dtype,
        max_model_len: int | None = None,
        num_host_blocks: int = 0,
        num_states: int = 0,
        num_host_states: int = 0,
        layout: KVLayout | None = None,
        model_impl: ModelImplementation = "auto",
        adapters: Adapters | None = None,
        logits_bytes: int = LOGITS_BYTES,
        checkpoint_scales: Mapping[ScaleName, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        limit = rotary_limit(read_fields(model.config))
        if limit is not None and max_model_len is not None and max_model_len > limit:
            raise ModelError(
                f"{type(model).__name__} changes its rotary embeddings beyond {limit} tokens, so shorter and longer "
                f"sequences cannot share a batch; max_model_len is {max_model_len}, choose {limit} or less"
            )
        self.device = torch.device(device)
        self.looks_ahead = self.device.type == "cuda"
        self.layout = layout or KVLayout(block_size)
        self.block_size = block_size
        #: Stream of all work on a GPU, because graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream(self.device) if self.looks_ahead else None  # type: ignore[no-untyped-call]
        self._model = paged_model(model, model_impl, adapters)
        self._num_adapters = 0 if adapters is None else len(adapters)
        #: What computes the model: fused or transformers.
        self.model_impl = self._model.implementation
        self._kv_dtype = kv_dtype
        self._kv_scales = kv_scales(self._model, kv_dtype, model.dtype, self.device, checkpoint_scales, max_model_len)
        self._buffers = StepBuffers(self.device, 1 << 16)
        #: Number of logits per token. Only ids below it can be sampled or biased.
        self.vocab_size = self._model.vocab_size
        self.reserve(num_blocks)
        with self._on_stream():
            self._states = StateMemory(self._model.states, num_states, self.device) if self._model.states else None
        self.reserve_host(num_host_blocks, num_host_states)
        self._logits_at_once = max(1, logits_bytes // (4 * self._model.vocab_size))
        self._sampler = Sampler(self._logits_at_once)
        self._sampled = SampledTokens()
        #: Called before sampling with the sequences and the logits [R, vocab_size] of their next tokens.
        self.on_logits: Callable[[ListLike[Sequence], torch.Tensor], None] | None = None

    def reserve(self, num_blocks: int) -> None:
        """Replace the KV cache by a new, empty one. Drop all graphs and host blocks, which belong to the old one."""
        self.used_bytes()  # waits for all work, also for weights that are still being loaded on the default stream
        self._graphs: DecodeGraphs | RecordedDecodes | None = None
        self._host: HostBlocks | None = None
        self._cache = KVCache([], [], [])
        self.used_bytes()  # returns their memory
        with self._on_stream():
            self._cache = KVCache.allocate(
                self._model.layers, num_blocks, self.layout, self._kv_dtype, self.device, self._kv_scales
            )
        self.num_blocks = num_blocks
        self.kv_cache_bytes = self._cache.num_bytes

    def reserve_host(self, num_host_blocks: int, num_host_states: int = 0) -> None:
        """Reserve host memory, to which KV blocks and recurrent states can be swapped."""
        with self._on_stream():
            if num_host_blocks:
                self._host = HostBlocks(self._cache, num_host_blocks, self.device)
            if self._states is not None:
                self._states.reserve_host(num_host_states)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states."""
        return 0 if self._states is None else self._states.tensors.num_bytes

    def _on_stream(self) -> AbstractContextManager[Any]:
        # On a CPU, torch.cuda.stream(None) would initialise CUDA if the machine has a GPU.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._sampler.forget(plan.finished)
        previous, self._sampled = self._sampled, SampledTokens()
        state_host = None if self._states is None else self._states.host
        hosts = [host for host in (self._host, state_host) if host is not None]
        for host in hosts:
            host.take_times()  # drop the times of a step that failed
        with torch.inference_mode(), self._on_stream():
            stopwatch = Stopwatch(self.device)
            # Copy KV blocks in the order that StepPlan states.
            if plan.swap_out:
                assert self._host is not None
                self._host.swap_out(plan.swap_out)
            if plan.copies:
                pairs = to_device(np.array(plan.copies, dtype=np.int64), self.device)
                self._cache.copy_blocks(pairs[:, 0], pairs[:, 1])
            if plan.swap_in:
                assert self._host is not None
                self._host.swap_in(plan.swap_in)
            if self._states is not None:
                self._states.move(plan.state_moves)
            parts = [
                self._launch_part(self._pack_part(part, previous), previous, self._sampled)
                for part in split(plan.rows, self._logits_at_once)
            ]
            stopwatch.stop()
        self.mask_seconds = self._sampler.mask_seconds
        copies = [stopwatch for host in hosts for stopwatch in host.take_times()]
        return LaunchedStep(len(plan.rows), parts, stopwatch, copies)

    def collect(self, pending: LaunchedStep) -> StepResult:
        results = [RowResult() for _ in range(pending.num_rows)]
        for part in pending.parts:
            for index, found in zip(part.indices, part.collect(), strict=True):
                earlier = results[index]
                found.prompt_logprobs = earlier.prompt_logprobs + found.prompt_logprobs
                found.error = earlier.error or found.error
                results[index] = found
        # This also waits for rows that do not sample; otherwise their time would count for the next step.
        elapsed = pending.stopwatch.seconds()
        return StepResult(results, elapsed, sum(stopwatch.seconds() for stopwatch in pending.copies))

    def logits(self, rows: ListLike[ScheduledRow]) -> torch.Tensor:
        """Compute rows without sampling. Return the logits [T, vocab_size] of all their tokens."""
        with torch.inference_mode(), self._on_stream():
            batch, inputs = self._pack(rows, every_token=True)
            self._buffers.upload()
            logits = self._forward(batch, inputs)
        if self._stream is not None:
            self._stream.synchronize()
        return logits

    def close(self) -> None:
        del self._graphs, self._model, self._cache, self._host, self._states, self._buffers
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _pack_part(self, part: ListLike[tuple[int, ScheduledRow]], previous: SampledTokens) -> PackedPart:
        indices, rows = zip(*part, strict=True)
        decodes = all(row.sample and row.num_tokens == 1 for row in rows)
        size = self._graphs.size_for(len(rows)) if decodes and self._graphs is not None else None
        batch, inputs = self._pack(rows, size)
        sampling = [row.sequence.ahead(later) for row in rows if row.sample for later in range(1 + len(row.draft))]
        packed = PackedPart(indices, rows, batch, inputs, sampling)
        if sampling:
            self._sampled.add_sequences(sampling)
            packed = packed._replace(parameters=self._buffers.put(parameters_of(sampling)))
        if batch.pending_rows:
            ends = batch.cu_seqlens_q[1:][batch.pending_rows].astype(np.int64) - 1
            places = previous.places([rows[index].sequence for index in batch.pending_rows])
            packed = packed._replace(pending=(self._buffers.put(ends), self._buffers.put(places)))
        return packed

    def _pack(
        self, rows: ListLike[ScheduledRow], size: int | None = None, *, every_token: bool = False
    ) -> tuple[PackedBatch, ModelInputs]:
        # Nothing is queued on the device here: the caller uploads the arrays. `size` pads decodes for a graph.
        batch = pack(rows, self.block_size, size)
        buffers = self._buffers
        buffers.begin()
        input_ids, positions = buffers.put(batch.input_ids), buffers.put(batch.positions)
        slots = buffers.put(batch.slot_mapping)
        lengths = buffers.put(batch.cu_seqlens_q), buffers.put(batch.context_lens)
        works = prepare_attention(
            self._model.attention, batch.cu_seqlens_q, batch.context_lens, self.device, buffers.put
        )
        lora = []
        if batch.adapters is not None:
            lora.append(prepare_lora(batch.adapters, self._num_adapters, self.device, buffers.put))
        states = None
        if self._states is not None and batch.states is not None:
            own = buffers.put(batch.states.single_slots)
            single = None if len(own) == len(batch.input_ids) else buffers.put(batch.states.single)
            states = StepStates(self._states.tensors, single, own, batch.states.pieces)
        fixed_bytes = buffers.num_used if buffers.fits else None
        tables = buffers.put(batch.block_tables)
        context = PagedContext(self._cache, slots, tables, *lengths, works, lora, states)
        # A step of decodes alone needs the logits of every token, in order, so no selection is needed.
        every_token |= size is not None or len(batch.sampling_rows) == len(batch.input_ids)
        logit_rows = None if every_token else buffers.put(batch.logit_rows)
        return batch, ModelInputs(input_ids, positions, context, logit_rows, fixed_bytes, size is not None)

    def _launch_part(self, packed: PackedPart, previous: SampledTokens, current: SampledTokens) -> LaunchedPart:
        batch, sampling = packed.batch, packed.sampling
        self._buffers.upload()
        if packed.pending is not None:
            ends, places = packed.pending
            packed.inputs.input_ids.index_copy_(0, ends, previous.ids()[places])
        logits = self._forward(batch, packed.inputs)
        if self.on_logits is not None and sampling:
            self.on_logits(sampling, logits[: len(sampling)])
        sampled = None
        if sampling:
            sampled = self._sampler.enqueue(logits[: len(sampling)], sampling, packed.parameters)
            current.add_ids(sampled.token_ids)
        prompt_logprobs: list[PendingLogprobs] = []
        if any(batch.prompt_counts):
            targets: list[int] = []
            wanted: list[int] = []
            for row, count in zip(packed.rows, batch.prompt_counts, strict=True):
                targets += row.sequence.token_ids[row.start + 1 : row.start + 1 + count]
                wanted += [row.sequence.sampling.prompt_logprobs or 0] * count
            token_ids = to_device(np.array(targets, dtype=np.int64), self.device)
            prompt_logprobs = enqueue_logprobs(logits[len(sampling) :], token_ids, wanted, self._logits_at_once)
        return LaunchedPart(packed.indices, batch.sampling_rows, sampled, batch.prompt_counts, prompt_logprobs)

    def _forward(self, batch: PackedBatch, inputs: ModelInputs) -> torch.Tensor:
        if batch.states is not None and self._states is not None:
            self._states.clear(batch.states.fresh)
        if inputs.use_graph and self._graphs is not None:
            logits = self._graphs.run(inputs)
        else:
            logits = self._model.forward(inputs.input_ids, inputs.positions, inputs.context, inputs.logit_rows)
        if batch.states is not None and self._states is not None:
            self._states.copy(batch.states.copies)
        return logits

    def warmup(
        self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, progress: Progress = silent
    ) -> int | None:
        """Compute steps that compile all kernels. The steps overwrite the cache.

        Returns the largest number of bytes that were allocated in addition to weights and cache. Returns None on a CPU,
        where torch does not count bytes.
        """
        before, work = 0, "warming up"
        if self.device.type == "cuda":
            work = "compiling kernels"
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        sizes = (max_num_batched_tokens, max_num_seqs, max_model_len)
        num_shapes = len(set(self._model.attention))
        num_bytes = step_bytes(*sizes, self.layout.num_groups, self.block_size, num_shapes)
        self._graphs = None
        with self._on_stream():
            self._buffers = StepBuffers(self.device, min(num_bytes, MAX_STEP_BYTES))
        steps = warmup_steps(*sizes)
        if self.device.type == "cuda":
            steps += expanding_steps(set(self._model.attention), max_num_batched_tokens, max_model_len)
        for name, rows, sampling in steps:
            progress(f"{work}: {name}", 0, 1)
            dummies = [self._dummy_row(row, count, start, sampling) for row, (start, count) in enumerate(rows)]
            for row in dummies if self._num_adapters else ():
                row.sequence.adapter = int(row.sequence.request_id) % self._num_adapters
            self.execute(StepPlan(dummies))
            self._sampler.forget(str(row) for row in range(len(rows)))
            progress(f"{work}: {name}", 1, 1)
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) - before

    def capture(
        self, max_rows: int, max_model_len: int, progress: Progress = silent, record: Recorder | None = None
    ) -> CapturedGraphs | None:
        """Capture CUDA graphs for decodes of up to `max_rows` sequences. Call `warmup(...)` first.

        This overwrites the KV cache. If the capture fails, logs a warning that says why and returns None. On a CPU,
        if `record` is not given, passes are recorded later, and the result is None.
        """
        if record is None:
            if self._stream is None:
                self._graphs = recorded_decodes(self._model, self.layout.num_groups, self.block_size, max_model_len)
                return None
            record = cuda_recorder(self._stream)
        self._graphs = None
        started, before, sizes = time.perf_counter(), self.used_bytes(), graph_sizes(max_rows)
        contexts = [min(length, max_model_len) for length in CHECKED_CONTEXTS]
        gc.collect()  # what it frees during a capture can make the capture fail
        try:
            with torch.inference_mode(), self._on_stream(), paused_collection():
                blocks = -(-max_model_len // self.block_size)
                tables = torch.zeros(self.layout.num_groups, sizes[-1], blocks, dtype=torch.int32, device=self.device)
                graphs = DecodeGraphs(self._model, tables, record)
                for tensor in (*self._cache.keys, *self._cache.values):
                    attended = tensor[: -(-max(contexts) // self.block_size)]  # by the checks
                    attended.copy_(torch.randn(attended.shape, dtype=torch.float16, device=self.device))  # also to fp8
                captured = list(product(reversed(sizes), (False, True) if self._num_adapters else (False,)))
                for done, (size, adapted) in enumerate(captured):
                    progress("capturing CUDA graphs", done, len(captured))
                    graphs.capture(self._decode_inputs(size, 1, adapted))
                    for length in contexts:
                        graphs.check(self._decode_inputs(size, length, adapted))
        except Exception as error:
            # The end of a capture that failed raises another error. A variable for it would keep the cache alive.
            reason = one_line(error.__context__ or error)
            logger.warning("decodes run without CUDA graphs, because they cannot be captured: %s", reason)
            return None
        progress("capturing CUDA graphs", len(captured), len(captured))
        self._graphs = graphs
        num_bytes = max(0, self.used_bytes() - before)
        return CapturedGraphs(len(captured), sizes[-1], time.perf_counter() - started, num_bytes)

    def _decode_inputs(self, size: int, context: int, adapted: bool = False) -> ModelInputs:
        row = self._dummy_row(0, 1, context - 1, _GREEDY)
        if adapted:
            row.sequence.adapter = 0
        _, inputs = self._pack([row], size)
        self._buffers.upload()
        return inputs

    def used_bytes(self) -> int:
        """Return the bytes of GPU memory that all programs use, 0 on a CPU.

        Before it measures, it waits for queued work and makes torch release the memory that torch keeps for later.
        """
        if self._stream is None:
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reserved_bytes(self) -> int:
        """Return the bytes of GPU memory that torch holds, 0 on a CPU."""
        return 0 if self._stream is None else torch.cuda.memory_reserved(self.device)

    def rehearsal(self, rows: ListLike[tuple[int, int]], num_swapped: int = 0) -> StepPlan:
        """Return a plan of invented sequences, with which the time of a step can be measured.

        `rows` has (context tokens, new tokens) for each sequence. The step also swaps `num_swapped` blocks out and in.
        It overwrites the cache, so the engine must not serve requests afterwards.
        """
        dummies = [self._dummy_row(index, count, start, _GREEDY) for index, (start, count) in enumerate(rows)]
        pairs = [(number, number) for number in range(num_swapped)]
        return StepPlan(dummies, swap_out=pairs, swap_in=pairs)

    def _dummy_row(self, row: int, num_tokens: int, start: int, sampling: SamplingParams) -> ScheduledRow:
        end = start + num_tokens
        ids = [(row * 7919 + position * 104729) % self.vocab_size for position in range(end)]
        sequence = Sequence(str(row), ids, end, sampling, seed=row, stop_ids=frozenset())
        width = -(-end // self.block_size)
        blocks = (np.arange(width, dtype=np.int32) + row * width) % max(1, self.num_blocks)
        table = np.tile(blocks, (self.layout.num_groups, 1))
        state = None if self._states is None else RowState(row % self._states.tensors.num_slots)
        return ScheduledRow(sequence, start, num_tokens, table, sample=True, state=state)
