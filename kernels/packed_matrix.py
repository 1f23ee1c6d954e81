"""Matrix that stays quantised in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

#: Number of codes in one block: a matrix of 4-bit codes has the first half of a block in the low bits of 16 bytes, and
#: the second half in the high bits.
BLOCK = 32
#: Numbers of a matrix that are unpacked to memory at a time: few enough for a CPU's caches.
TILE_NUMBERS = 1 << 19


class PackedMatrix(NamedTuple):
    """Matrix [M, N] of the numbers code x scale + offset, where N is a multiple of 32.

    - codes: int8 or float8_e4m3fn [M, N], or uint8 [M, N / 2] with two 4-bit codes in a byte.
    - scales: float16, bfloat16 or float32 [M, N / G], for groups of G neighbouring codes. G is a multiple of 16.
    - offsets: [M, N / G], float32 or of the type of `scales`. None: all offsets are 0.
    - table: float32 [16]. The 4-bit code c stands for the number table[c]. None: a code stands for itself.
    - order: int64 [N]. Column j is multiplied by input order[j]. None: by input j. A matrix of several experts has
      [E, N], with an order for each of E equal parts of the rows.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties in which matrices must agree so that their rows can be joined."""
        types = self.codes.dtype, self.scales.dtype, None if self.offsets is None else self.offsets.dtype
        shared = (None if part is None else tuple(part.tolist()) for part in (self.table, self.order))
        return *types, self.shape[1], self.scales.shape[1], *shared

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype.is_signed else 4

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    def rows(self, index: Tensor | slice) -> PackedMatrix:
        from llmsched.kernels.fp8 import as_bytes

        offsets = None if self.offsets is None else self.offsets[index]
        codes = as_bytes(self.codes)[index].view(self.codes.dtype)
        return self._replace(codes=codes, scales=self.scales[index], offsets=offsets)

    def unpacked(self) -> Tensor:
        """Return the matrix as float32 [M, N], with its columns in the order of the inputs."""
        import torch

        codes, (num_rows, groups) = self.codes, self.scales.shape
        if self.bits == 4:
            codes = codes.view(num_rows, -1, 1, BLOCK // 2).repeat(1, 1, 2, 1)
            codes[:, :, 1] >>= 4
            codes &= 15
        numbers = codes.reshape(num_rows, groups, -1)
        numbers = numbers.float() if self.table is None else self.table[numbers.int()]
        numbers = numbers * self.scales.float()[..., None]
        if self.offsets is not None:
            numbers += self.offsets.float()[..., None]
        matrix = numbers.flatten(1)
        if self.order is None:
            return matrix
        places = self.order.argsort(-1).view(-1, matrix.shape[1])
        parts = matrix.view(len(places), -1, matrix.shape[1])
        return torch.cat([part[:, own] for part, own in zip(parts, places, strict=True)])


def packed_pairs(codes: Tensor) -> Tensor:
    """Return 4-bit codes, uint8 [A, N], with two codes in a byte, [A, N / 2], in the order of a PackedMatrix."""
    halves = codes.reshape(len(codes), -1, 2, BLOCK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
