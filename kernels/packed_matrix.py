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

    - codes: int8 [M, N], or uint8 [M, N / 2] with two 4-bit codes in a byte.
    - scales, offsets: float16 or float32 [M, N / G], for groups of G = 16 or 32 neighbouring codes. None: all offsets
      are 0.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties in which matrices must agree so that their rows can be joined."""
        return self.codes.dtype, self.shape[1], self.scales.dtype, self.scales.shape[1], self.offsets is None

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype.is_signed else 4

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    def rows(self, index: Tensor | slice) -> PackedMatrix:
        return PackedMatrix._make(None if part is None else part[index] for part in self)

    def unpacked(self) -> Tensor:
        """Return the matrix as float32 [M, N]."""
        codes, (num_rows, groups) = self.codes, self.scales.shape
        if self.bits == 4:
            codes = codes.view(num_rows, -1, 1, BLOCK // 2).repeat(1, 1, 2, 1)
            codes[:, :, 1] >>= 4
            codes &= 15
        numbers = codes.reshape(num_rows, groups, -1).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            numbers += self.offsets.float()[..., None]
        return numbers.flatten(1)
