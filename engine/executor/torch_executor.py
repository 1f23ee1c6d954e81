"""Executor that runs a model over the paged KV cache and samples tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.rotary import rotary_limit
from llmsched.engine.config import ModelImplementation
from llmsched.engine.errors import ModelError
from llmsched.engine.executor.base import Executor, RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.executor.batch import PackedBatch, pack, split, to_device
from llmsched.engine.executor.host_blocks import HostBlocks
from llmsched.engine.executor.sampler import PendingLogprobs, PendingSample, Sampler, collect_logprobs, enqueue_logprobs
from llmsched.engine.executor.stopwatch import Stopwatch
from llmsched.engine.executor.warmup import warmup_steps
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.memory.activations import LOGITS_BYTES
from llmsched.engine.model.paged import KVCache, PagedContext
from llmsched.engine.model.transformers_model import paged_model
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import SamplingParams, Sequence
from llmsched.kernels.dispatch import prepare_attention

#: Sampling parameters of rehearsals.
_GREEDY = SamplingParams(temperature=0)


class SampledTokens:
    """Ids of the tokens that one step samples, on the device."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._ids: list[torch.Tensor] = []

    def add(self, sequences: ListLike[Sequence], token_ids: torch.Tensor) -> None:
        """Add the ids [N] of the tokens that continue N sequences."""
        self._sequences += sequences
        self._ids.append(token_ids)

    def of(self, sequences: ListLike[Sequence], device: torch.device) -> torch.Tensor:
        """Return the ids [N] of the tokens that continue `sequences`, without waiting for the device."""
        if sequences == self._sequences and len(self._ids) == 1:
            return self._ids[0]
        places = {sequence: place for place, sequence in enumerate(self._sequences)}
        wanted = np.array([places[sequence] for sequence in sequences], dtype=np.int64)
        return torch.cat(self._ids)[to_device(wanted, device)]


class _LaunchedPart(NamedTuple):
    """Part of a launched step (see `split`): the rows of the step with these `indices`.

    `sampling_rows` are the rows of the part that sample, and `sampled` has their tokens. The first `prompt_counts[0]`
    of the `prompt_logprobs` belong to row 0 of the part, the next `prompt_counts[1]` to row 1, and so on.
    """

    indices: ListLike[int]
    sampling_rows: list[int]
    sampled: PendingSample | None
    prompt_counts: list[int]
    prompt_logprobs: list[PendingLogprobs]

    def collect(self) -> list[RowResult]:
        """Wait for the device and return one result per row."""
        results = [RowResult() for _ in self.indices]
        if self.sampled is not None:
            for index, result in zip(self.sampling_rows, self.sampled.collect(), strict=True):
                results[index] = result
        found = collect_logprobs(self.prompt_logprobs)
        for result, end, count in zip(results, accumulate(self.prompt_counts), self.prompt_counts, strict=True):
            result.prompt_logprobs = found[end - count : end]
            if any(math.isnan(each.logprob) for each in result.prompt_logprobs):
                result.error = "the model computed logits that are not numbers for the prompt of this sequence"
        return results


class _LaunchedStep(NamedTuple):
    """Step that the device may still be computing. `copies` are stopwatches of copies from and to host memory."""

    num_rows: int
    parts: list[_LaunchedPart]
    stopwatch: Stopwatch
    copies: list[Stopwatch]


class TorchExecutor(Executor):
    """Executor of one model and its KV cache on one device. Not thread-safe: only the engine thread may call it.

    On a GPU it looks ahead: a step reads the ids of pending tokens on the device, so its launch need not wait until the
    host knows them. On a CPU, `launch` computes the step, so looking ahead would gain nothing.

    Other rows of a batch change a row's logits only through rounding, because matrix products of different sizes add
    numbers in different orders. The change is about 1e-6 (fp32) or a few bf16 ulps, which can swap two tokens with
    nearly equal logits.

    Without `layout`, all layers keep the KV of all tokens. Raises ModelError if the engine would not compute the same
    logits as transformers, if the model does not support max_model_len tokens, or if its layers do not suit the layout.
    """

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
        layout: KVLayout | None = None,
        model_impl: ModelImplementation = "auto",
        logits_bytes: int = LOGITS_BYTES,
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
        self.num_blocks = num_blocks
        self._model = paged_model(model, model_impl)
        #: What computes the model: fused or transformers.
        self.model_impl = self._model.implementation
        self._cache = KVCache.allocate(self._model.layers, num_blocks, self.layout, kv_dtype, self.device)
        self.kv_cache_bytes = self._cache.num_bytes
        #: Number of logits per token. Only ids below it can be sampled or biased.
        self.vocab_size = self._model.vocab_size
        self._host = HostBlocks(self._cache, num_host_blocks, self.device) if num_host_blocks else None
        self._logits_at_once = max(1, logits_bytes // (4 * self._model.vocab_size))
        self._sampler = Sampler(self._logits_at_once)
        self._sampled = SampledTokens()
        #: Called before sampling with the sequences and the logits [R, vocab_size] of their next tokens.
        self.on_logits: Callable[[ListLike[Sequence], torch.Tensor], None] | None = None

    def launch(self, plan: StepPlan) -> _LaunchedStep:
        """Queue the work of a step; see `Executor.launch`. On a CPU, this computes the step."""
        self._sampler.forget(plan.finished)
        previous, self._sampled = self._sampled, SampledTokens()
        if self._host is not None:
            self._host.take_times()  # drop the times of a step that failed
        stopwatch = Stopwatch(self.device)
        with torch.inference_mode():
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
            parts = [self._launch_part(part, previous) for part in split(plan.rows, self._logits_at_once)]
        stopwatch.stop()
        copies = [] if self._host is None else self._host.take_times()
        return _LaunchedStep(len(plan.rows), parts, stopwatch, copies)

    def collect(self, pending: _LaunchedStep) -> StepResult:
        """Wait for the results of a step. `elapsed` is the device's time for it, without waiting in the queue."""
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
        """Compute the rows like `execute`, but without sampling. Return the logits [T, vocab_size] of every token."""
        with torch.inference_mode():
            return self._forward(pack(rows, self.block_size), every_token=True)

    def close(self) -> None:
        """Release the model and the cache. The executor cannot be used afterwards."""
        del self._model, self._cache, self._host
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch_part(self, part: ListLike[tuple[int, ScheduledRow]], previous: SampledTokens) -> _LaunchedPart:
        indices, rows = zip(*part, strict=True)
        batch = pack(rows, self.block_size)
        pending = [rows[index].sequence for index in batch.pending_rows]
        logits = self._forward(batch, previous.of(pending, self.device) if pending else None)
        sampling = [rows[index].sequence for index in batch.sampling_rows]
        if self.on_logits is not None and sampling:
            self.on_logits(sampling, logits[: len(sampling)])
        sampled = None
        if sampling:
            sampled = self._sampler.enqueue(logits[: len(sampling)], sampling)
            self._sampled.add(sampling, sampled.token_ids)
        prompt_logprobs: list[PendingLogprobs] = []
        if len(logits) > len(sampling):  # log-probabilities of prompt tokens were asked for
            targets: list[int] = []
            wanted: list[int] = []
            for row, count in zip(rows, batch.prompt_counts, strict=True):
                targets += row.sequence.token_ids[row.start + 1 : row.start + 1 + count]
                wanted += [row.sequence.sampling.prompt_logprobs or 0] * count
            token_ids = to_device(np.array(targets, dtype=np.int64), self.device)
            prompt_logprobs = enqueue_logprobs(logits[len(sampling) :], token_ids, wanted, self._logits_at_once)
        return _LaunchedPart(indices, batch.sampling_rows, sampled, batch.prompt_counts, prompt_logprobs)

    def _forward(
        self, batch: PackedBatch, pending_ids: torch.Tensor | None = None, *, every_token: bool = False
    ) -> torch.Tensor:
        """Run a forward pass. Return the logits [R, vocab_size] of the batch's `logit_rows`, or of every token.

        `pending_ids` (int64, on the device) are the ids of the last tokens of the batch's `pending_rows`.
        """
        input_ids, positions = (to_device(array, self.device) for array in (batch.input_ids, batch.positions))
        if pending_ids is not None:
            ends = batch.cu_seqlens_q[1:][batch.pending_rows].astype(np.int64) - 1
            input_ids.index_copy_(0, to_device(ends, self.device), pending_ids)
        put = self._put
        context = PagedContext(
            self._cache,
            put("slot_mapping", batch.slot_mapping),
            put("block_tables", batch.block_tables),
            put("cu_seqlens_q", batch.cu_seqlens_q),
            put("context_lens", batch.context_lens),
            prepare_attention(self._model.attention, batch.cu_seqlens_q, batch.context_lens, self.device, put),
        )
        # A step of decodes alone needs the logits of every token, in order, so no selection is needed.
        every_token |= len(batch.sampling_rows) == len(batch.input_ids)
        logit_rows = None if every_token else to_device(batch.logit_rows, self.device)
        return self._model.forward(input_ids, positions, context, logit_rows)

    def _put(self, _: str, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self.device)

    def warmup(
        self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, progress: Progress = silent
    ) -> int | None:
        """Compute the `warmup_steps`, which compiles the kernels and overwrites the cache.

        Returns the peak of the bytes allocated in addition to weights and cache, or None on a CPU, where torch does not
        count bytes.
        """
        before, work = 0, "warming up"
        if self.device.type == "cuda":
            work = "compiling kernels"
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        for name, rows, sampling in warmup_steps(max_num_batched_tokens, max_num_seqs, max_model_len):
            progress(f"{work}: {name}", 0, 1)
            dummies = [self._dummy_row(row, count, start, sampling) for row, (start, count) in enumerate(rows)]
            self.execute(StepPlan(dummies))
            self._sampler.forget(str(row) for row in range(len(rows)))
            progress(f"{work}: {name}", 1, 1)
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) - before

    def rehearsal(self, rows: ListLike[tuple[int, int]], num_swapped: int = 0) -> StepPlan:
        """Return a plan of a step whose time is to be measured.

        `rows` has (number of context tokens, number of new tokens) for each sequence. Sequences are greedy. The step
        also swaps `num_swapped` blocks out and in again. Computing the plan overwrites the cache, so afterwards the
        engine must not serve requests.
        """
        dummies = [self._dummy_row(index, count, start, _GREEDY) for index, (start, count) in enumerate(rows)]
        pairs = [(number, number) for number in range(num_swapped)]
        return StepPlan(dummies, swap_out=pairs, swap_in=pairs)

    def _dummy_row(self, row: int, num_tokens: int, start: int, sampling: SamplingParams) -> ScheduledRow:
        """Return a row of an invented sequence that has `start` computed tokens and `num_tokens` new tokens.

        `row` is the row's number in the step. Rows share blocks if the cache has too few.
        """
        end = start + num_tokens
        ids = [(row * 7919 + position * 104729) % self.vocab_size for position in range(end)]
        sequence = Sequence(str(row), ids, end, sampling, seed=row, stop_ids=frozenset())
        width = -(-end // self.block_size)
        blocks = (np.arange(width, dtype=np.int32) + row * width) % self.num_blocks
        table = np.tile(blocks, (self.layout.num_groups, 1))
        return ScheduledRow(sequence, start, num_tokens, table, sample=True)
