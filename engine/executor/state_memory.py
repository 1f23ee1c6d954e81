"""Memory for recurrent states, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import torch

from llmsched.engine.executor.buffers import to_device
from llmsched.engine.executor.host_blocks import HostBlocks
from llmsched.engine.kv.recurrent_state import StateMoves
from llmsched.engine.model.recurrent_layers import LayerState, StateTensors


class StateMemory:
    """Recurrent states of all sequences on `device`, in `num_slots` slots, and host memory for swapped states."""

    def __init__(self, layers: ListLike[LayerState], num_slots: int, device: torch.device) -> None:
        self.tensors = StateTensors(layers, num_slots, device)
        self.host: HostBlocks | None = None
        self._device = device

    def reserve_host(self, num_states: int) -> None:
        self.host = None  # frees its memory first
        if num_states:
            self.host = HostBlocks(self.tensors, num_states, self._device)

    def clear(self, slots: ListLike[int]) -> None:
        """Reset the states in these slots to the state before the first token."""
        if slots:
            self.tensors.clear(to_device(np.array(slots, np.int64), self._device))

    def copy(self, pairs: ListLike[tuple[int, int]]) -> None:
        """Copy a state for each pair (source, destination). All sources are read before anything is written."""
        if pairs:
            slots = to_device(np.array(pairs, np.int64), self._device)
            self.tensors.copy(slots[:, 0], slots[:, 1])

    def move(self, moves: StateMoves) -> None:
        """Make the copies in the order that StateMoves states."""
        if moves.swap_out:
            assert self.host is not None
            self.host.swap_out(moves.swap_out)
        self.copy(moves.copies)
        if moves.swap_in:
            assert self.host is not None
            self.host.swap_in(moves.swap_in)
