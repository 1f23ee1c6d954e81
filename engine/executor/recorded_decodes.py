"""Recordings of forward passes on a CPU that compute only a few decodes."""
# With few rows, the Python code between kernels takes a large part of a step. So the first pass with some number of
# rows is recorded, and later passes with as many rows replay the recording. What it reads must have the same addresses
# in every step (see StepBuffers).

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from llmsched.engine.errors import one_line
from llmsched.engine.executor.graphs import ModelInputs, set_tables
from llmsched.engine.model.paged_cache import PagedModel
from llmsched.kernels.dispatch import backend_name, load_backend

#: Rows up to which passes are recorded. With more rows, products take so long that calls of kernels do not matter.
MAX_ROWS = 8
#: Tokens of the longest context up to which passes are recorded. With longer ones, attention takes so long that calls
#: do not matter, and each recording would keep the results of all splits of attention.
MAX_CONTEXT = 1 << 14

logger = logging.getLogger(__name__)


class RecordedDecodes:
    """Recorded forward passes of a model over decodes: one for each number of rows. A row is one sequence.

    `tables` [groups, MAX_ROWS, blocks] (int32) are the block tables that the recordings read. Steps with adapters, or
    with more blocks, run without recordings. The model must be `recordable`.
    """

    def __init__(self, model: PagedModel, tables: torch.Tensor) -> None:
        self._model, self._tables = model, tables
        self._backend: Any = load_backend(backend_name("cpu"))
        #: Recordings and their logits, by the number of rows and by the size of the arrays that they read.
        self._recorded: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._fails = False
        self._backend.compile_replay()

    def size_for(self, num_rows: int) -> int | None:
        """Return `num_rows` if steps with as many decodes are recorded, else None."""
        return None if self._fails or num_rows > MAX_ROWS else num_rows

    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Record or replay a pass, and return the logits [rows, vocab_size].

        The logits are valid until the next call. Except for the block tables, the tensors in `inputs` must have the
        same addresses as in earlier passes with as many rows.
        """
        context, size = inputs.context, len(inputs.input_ids)
        fits = inputs.fixed_bytes is not None and context.block_tables.shape[2] <= self._tables.shape[2]
        if not fits or context.lora:
            return self._model.forward(inputs.input_ids, inputs.positions, context, None)
        set_tables(self._tables, inputs)
        key = size, inputs.fixed_bytes or 0
        if key in self._recorded:
            recording, logits = self._recorded[key]
            recording.replay()
            return logits
        context = replace(context, block_tables=self._tables[:, :size])
        recording = self._backend.Recording()
        try:
            with recording:
                logits = self._model.forward(inputs.input_ids, inputs.positions, context, None)
        except self._backend.NotRecordableError as error:
            logger.warning("decodes run without recordings: %s", one_line(error))
            self._fails = True
            return self._model.forward(inputs.input_ids, inputs.positions, context, None)
        self._recorded[key] = recording, logits
        return logits


def recorded_decodes(model: PagedModel, num_groups: int, block_size: int, max_model_len: int) -> RecordedDecodes | None:
    """Return recordings for sequences of up to `max_model_len` tokens, or None if the model is not `recordable`."""
    if not model.recordable:
        return None
    num_blocks = -(-min(max_model_len, MAX_CONTEXT) // block_size)
    return RecordedDecodes(model, torch.zeros(num_groups, MAX_ROWS, num_blocks, dtype=torch.int32))
