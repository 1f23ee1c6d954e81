"""Multi-head latent attention (MLA), in which the keys and values of all heads come from one vector per token.

The cache holds, for each token, a latent vector c of R numbers and a rotary key r of P numbers. Head h has matrices K_h
[N, R] and V_h [M, R]: its key is K_h c followed by r, and its value is V_h c. So `weight` [heads x (N + M), R] has, for
each head, the rows of K_h and then those of V_h.

There are two ways to compute the same attention. "Expanded" computes the keys and values of all heads first. "Absorbed"
multiplies each query by K_h, so that all heads attend to the latent vectors, and each output by V_h. A query then takes
more operations for each key, but the cache is read once for all heads. Source: DeepSeek-V2, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

#: Most bytes of expanded keys and values at one time, if one head of the longest sequence does not need more.
EXPANDED_BYTES = 128 << 20


class LatentWidths(NamedTuple):
    """Widths in latent attention, by the letters of this module's docstring."""

    rank: int  # R
    rope: int  # P
    key: int  # N
    value: int  # M

    @classmethod
    def of(cls, query: Tensor, latents: Tensor, rope_keys: Tensor, weight: Tensor) -> LatentWidths:
        """Return the widths of the arguments of `reference.latent_attention`."""
        key = query.shape[2] - rope_keys.shape[3]
        return cls(latents.shape[3], rope_keys.shape[3], key, weight.shape[0] // query.shape[1] - key)

    @property
    def expanded(self) -> int:
        """Numbers per head and token that `expanded` and the copies of its results need."""
        return self.key + self.value + 2 * max(self.key + self.rope, self.value)

    def expands(self, lengths: npt.NDArray[Any], contexts: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return for which sequences the expanded way takes fewer operations.

        `lengths` are the numbers of new tokens, and `contexts` include them.
        """
        # Multiplications per head, for S new tokens and a context of C:
        #   absorbed   S x C x (2 R + P) + S x R x (N + M)
        #   expanded   S x C x (N + P + M) + C x R x (N + M)
        # For a layer of DeepSeek-V2-Lite and a context of 4,096, one core takes 538 ms expanded and 1,101 ms absorbed
        # if 512 tokens are new, and 171 and 73 ms if 32 are (measured).
        lengths, contexts = lengths.astype("int64"), contexts.astype("int64")  # products exceed 32 bits
        saved = lengths * contexts * (2 * self.rank - self.key - self.value)
        found: npt.NDArray[np.bool_] = saved > (contexts - lengths) * self.rank * (self.key + self.value)
        return found

    def fewest_expanded(self, context: int, most: int) -> int | None:
        """Return the smallest number of new tokens, from 2 to `most`, with which a context is expanded, or None."""
        per_token = self.rank * (self.key + self.value)
        slope = context * (2 * self.rank - self.key - self.value) + per_token  # see `expands`
        count = max(2, context * per_token // slope + 1) if slope > 0 else context + 1
        return count if count <= min(most, context) else None

    def longest_at_once(self, heads: int, item_size: int) -> int:
        """Return the most context tokens for which all heads are expanded at one time."""
        return EXPANDED_BYTES // (heads * self.expanded * item_size)

    def heads_at_once(self, heads: int, context: int, item_size: int) -> int:
        """Return how many heads are expanded at one time for `context` tokens of `item_size` bytes per number."""
        return max(1, min(heads, EXPANDED_BYTES // (max(1, context) * self.expanded * item_size)))


def absorbed(query: Tensor, weight: Tensor) -> Tensor:
    """Multiply queries [T, heads, N] by the heads' key matrices. Return [T, heads, R]."""
    by_head = weight.view(query.shape[1], -1, weight.shape[1])[:, : query.shape[2]]
    return query.transpose(0, 1).bmm(by_head).transpose(0, 1)


def released(attended: Tensor, weight: Tensor, width: int) -> Tensor:
    """Multiply weighted sums of latent vectors, [T, heads, R], by the heads' value matrices. Return [T, heads, M].

    `width` is M.
    """
    by_head = weight.view(attended.shape[1], -1, weight.shape[1])[:, -width:]
    return attended.transpose(0, 1).bmm(by_head.transpose(1, 2)).transpose(0, 1)


def expanded(latents: Tensor, weight: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the keys [heads, C, N] and values [heads, C, M] of latent vectors [C, R]. `width` is N."""
    both = (latents @ weight.T).view(len(latents), heads, -1).transpose(0, 1)
    return both[..., :width], both[..., width:]
