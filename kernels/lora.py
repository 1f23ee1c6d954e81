"""Specification of the ops of LoRA adapters (Hu et al., 2021), in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class LoraMatrices(NamedTuple):
    """Matrices of L adapters for a linear layer with N inputs and M outputs, of which W outputs are adapted.

    The adapted outputs are S spans, one for each projection in the layer. All ranks are padded to R with zeros.

    - a: [L, S x R, N]. The rows s x R to (s + 1) x R - 1 are the matrix A of span s.
    - b: [L, R, W]. The columns are the rows of the matrices B, one span after the other, times the adapter's scale.
    - spans: first output and number of outputs of each span.
    """

    a: Tensor
    b: Tensor
    spans: tuple[tuple[int, int], ...]


def prepare_lora(
    adapters: npt.NDArray[np.int32], num_adapters: int, put: Callable[[npt.NDArray[np.generic]], Tensor]
) -> Any:
    """Prepare the LoRA products of a step. Return the argument `work` of `add_lora`.

    `adapters` [T] has the adapter of each token, from 0 to num_adapters - 1, or -1 for none. `put` copies an array to
    the device. The number and the shapes of the copied arrays depend only on T and `num_adapters`, so that a CUDA graph
    can be replayed over new contents of these arrays.
    """
    return put(adapters)


def add_lora(output: Tensor, rows: Tensor, matrices: LoraMatrices, work: Any) -> None:
    """Add B A x to each row of `output` [T, M] in place, where x is the row of `rows` [T, N].

    A and B are the matrices of the token's adapter. Rows of tokens without an adapter do not change. Each sum is
    rounded once, to the type of `output`.
    """
    rank = matrices.b.shape[1]
    for adapter, (a, b) in enumerate(zip(matrices.a.float(), matrices.b.float(), strict=True)):
        own = (work == adapter).nonzero()[:, 0]
        inner, column = rows[own].float() @ a.T, 0
        for span, (first, width) in enumerate(matrices.spans):
            added = inner[:, span * rank : (span + 1) * rank] @ b[:, column : column + width]
            part = output[:, first : first + width]
            part[own] = (part[own].float() + added).to(output.dtype)
            column += width
