"""CUDA graphs of forward passes that compute only decodes."""
# The launches of a pass are recorded once and replayed as one launch. A graph has a fixed number of rows, and each row
# has one token. A step of decodes is padded to the next larger graph. Steps with drafts run without a graph.
#
# What a graph reads must have the same addresses in every step (see StepBuffers). All graphs share one pool of memory
# and one tensor of logits, because they never run at the same time. So logits must be used before the next replay.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmsched.engine.model.paged_cache import PagedContext, PagedModel

#: Largest norm of the difference between the logits of a graph and of the same pass without it, relative to their norm.
TOLERANCE = 0.01
#: Context lengths with which graphs are checked. With the longer one, attention is divided among programs and joined.
CHECKED_CONTEXTS = (2, 2048)

_COPIES = frozenset({"to", "_to_copy", "copy_", "cpu", "cuda"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})
_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class NotCapturableError(Exception):
    """Error for a model whose forward pass cannot run as a CUDA graph. The message says why."""


class NothingWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operations raise NotCapturableError if the host would have to wait for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # Indexing has a tag for the case of a mask, which selects a number of elements that only the device knows.
        waits = any(map(_is_mask, args[1])) if name in _INDEXING else not _DEPENDENT.isdisjoint(func.tags)
        if waits and args[0].device.type == self._device_type:
            raise NotCapturableError(f"{func} waits for values on the device")
        with self:  # see also the operations of which this one consists
            result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            if isinstance(source, torch.Tensor) and source.device.type != result.device.type:
                raise NotCapturableError(f"{func} copies between {source.device.type} and {result.device.type}")
        return result


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class ModelInputs(NamedTuple):
    input_ids: torch.Tensor
    positions: torch.Tensor
    context: PagedContext
    logit_rows: torch.Tensor | None
    #: Bytes of StepBuffers before the block tables, the only array whose size depends on contexts. None: an array
    #: before the block tables did not fit.
    fixed_bytes: int | None
    use_graph: bool = False  # True if the inputs are padded to the size of a graph


#: Function that runs a pass and returns a function that queues the work of the pass again.
Recorder = Callable[[Callable[[], torch.Tensor]], Callable[[], None]]


def cuda_recorder(stream: torch.cuda.Stream) -> Recorder:
    """Return a Recorder that captures CUDA graphs on `stream`. All these graphs share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile, for example to read the free memory.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except Exception:
            # torch leaves its allocator in capture mode, in which it does not free memory, if a capture ends badly.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
                torch._C._cuda_releasePool(stream.device_index, pool)
            raise
        return graph.replay

    return record


class _Graph(NamedTuple):
    replay: Callable[[], None]
    run: Callable[[], torch.Tensor]  # computes the same pass without the graph
    works: list[Any]
    lora: list[Any]
    fixed_bytes: int | None


class DecodeGraphs:
    """CUDA graphs of a model's forward passes over decodes: one for each number of rows. A row is one sequence.

    Steps in which some rows have an adapter use separate graphs, so that other steps do not take longer.
    `tables` [groups, rows, blocks] (int32) are the block tables that the graphs read. They must be large enough for
    every step.
    """

    def __init__(self, model: PagedModel, tables: torch.Tensor, record: Recorder) -> None:
        self._model, self._tables, self._record = model, tables, record
        self._graphs: dict[tuple[int, bool], _Graph] = {}  # by number of rows, and whether some rows have an adapter
        self._logits: torch.Tensor | None = None  # [rows of the largest graph, vocab_size]
        #: Numbers of rows of the graphs, in ascending order.
        self.sizes: list[int] = []

    def size_for(self, num_rows: int) -> int | None:
        """Return the number of rows of the smallest graph that has at least `num_rows` rows, or None."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def capture(self, inputs: ModelInputs) -> None:
        """Capture a graph of the model's forward pass, with as many rows as `inputs` has. Capture the largest first.

        Raises NotCapturableError if the host would have to wait for the device during the forward pass.
        """
        size = len(inputs.input_ids)
        if inputs.fixed_bytes is None:
            raise NotCapturableError("the arrays of a step do not fit into the StepBuffers")
        works, lora = [*inputs.context.works], [*inputs.context.lora]
        context = replace(inputs.context, block_tables=self._tables[:, :size], works=works, lora=lora)
        forward = partial(self._model.forward, inputs.input_ids, inputs.positions, context, None)
        self._set_tables(inputs)
        with NothingWaits(self._tables.device):
            forward()
        computed = forward()
        logits = self._logits = computed if self._logits is None else self._logits

        def run() -> torch.Tensor:
            return logits[:size].copy_(forward())

        self._graphs[_key(inputs)] = _Graph(self._record(run), run, works, lora, inputs.fixed_bytes)
        self.sizes = sorted({size for size, _ in self._graphs})

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Replay the graph that has as many rows as `inputs`, and return the logits [rows, vocab_size].

        The logits are valid until the next call. Except for the block tables, the tensors in `inputs` must have the
        same addresses as when the graph was captured.
        """
        graph = self._graphs[_key(inputs)]
        if inputs.fixed_bytes != graph.fixed_bytes:
            raise RuntimeError(f"a step has arrays of {inputs.fixed_bytes} bytes, its graph of {graph.fixed_bytes}")
        graph.works[:] = inputs.context.works  # on a GPU, these are the same addresses and numbers again
        graph.lora[:] = inputs.context.lora
        self._set_tables(inputs)
        graph.replay()
        assert self._logits is not None
        return self._logits[: len(inputs.input_ids)]

    def check(self, inputs: ModelInputs) -> None:
        """Raise NotCapturableError if a replay of the graph computes other logits than the model without a graph.

        Only the logits of the first and the last row are compared.
        """
        states = inputs.context.states
        kept = [] if states is None else [(part, states.slots, part[states.slots]) for part in states.tensors.tensors]
        found = self.run(inputs)[[0, -1]].float()
        for part, slots, state in kept:  # the pass has replaced the recurrent states
            part[slots] = state
        expected = self._graphs[_key(inputs)].run()[[0, -1]].float()
        if not (found - expected).norm() <= TOLERANCE * expected.norm():  # also if logits are not numbers
            raise NotCapturableError("a replayed pass computes other logits")

    def _set_tables(self, inputs: ModelInputs) -> None:
        set_tables(self._tables, inputs)


def set_tables(target: torch.Tensor, inputs: ModelInputs) -> None:
    """Copy the block tables of a step to the first rows and columns of `target`."""
    tables = inputs.context.block_tables
    target[:, : tables.shape[1], : tables.shape[2]].copy_(tables)


def _key(inputs: ModelInputs) -> tuple[int, bool]:
    return len(inputs.input_ids), bool(inputs.context.lora)
