"""Shape and dtype of a tensor: what every rule of the compiler reads and returns, and what a plan states."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from loadplan.runtime.dtype import DType


@dataclass(frozen=True, slots=True)
class TensorType:
    """Elements per dim, and the element type; prints as `BF16[4096,128]`."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, dense."""
        return self.numel * self.dtype.bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)
