"""Sizes of graphs, and the estimate of their memory."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from llmsched.engine.memory.graph_memory import MAX_GRAPH_ROWS, MAX_STRIDE, graph_sizes


@given(st.integers(1, 70000))
@example(128)
@example(100)
@example(1)
def test_every_step_of_decodes_has_a_graph_that_fits(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, min(max_rows, MAX_GRAPH_ROWS))
    for rows in range(1, sizes[-1] + 1):
        size = min(size for size in sizes if size >= rows)
        assert size < 2 * rows or size == rows == 1
        assert size - rows < MAX_STRIDE


def test_sizes_that_the_help_names() -> None:
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert graph_sizes(200) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 200]
