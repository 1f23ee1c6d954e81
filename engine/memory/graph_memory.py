"""CUDA graphs of decodes: their sizes, and the memory that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.memory.activation_memory import expert_bytes, mlp_bytes

if TYPE_CHECKING:
    from llmsched.engine.architecture.shape import ModelShape

#: Most rows of a graph. A step with more decodes keeps the GPU busy for longer than the CPU needs for its launches.
MAX_GRAPH_ROWS = 512

#: Largest distance between two sizes in rows. Padding to the next power of two would double the work of large steps.
MAX_STRIDE = 64

#: Memory that the driver holds for one layer of one graph; logs of vLLM show about 24 MiB for graphs of whole models.
LAYER_BYTES = 512 << 10


class CapturedGraphs(NamedTuple):
    num_graphs: int
    max_rows: int
    seconds: float
    num_bytes: int


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured: 1, 2, 4 ... 64, 128, 192 ..., and the largest.

    The largest is max_rows, but at most MAX_GRAPH_ROWS.
    """
    largest = min(max_rows, MAX_GRAPH_ROWS)
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] + min(sizes[-1], MAX_STRIDE)))
    return sizes


def graph_bytes(shape: ModelShape, max_rows: int, dtype_bytes: int, kinds: int = 1) -> int:
    """Return an estimate of the memory of all graphs for steps of up to `max_rows` decodes.

    `kinds` is the number of graphs for each number of rows: 2 with LoRA adapters, else 1.
    """
    sizes = graph_sizes(max_rows)
    logits = 2 * sizes[-1] * shape.vocab_size * dtype_bytes  # computed by any graph, and copied to where all put them
    layers = sum(group.layers for group in shape.geometry.groups)
    mlp = max(of_layer(shape, sizes[-1], dtype_bytes) for of_layer in (mlp_bytes, expert_bytes))
    return mlp + logits + kinds * len(sizes) * layers * LAYER_BYTES
