"""The op that changes values: a cast of floating point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, ShapeError, Spread
from loadplan.compiler.ops.arguments import one
from loadplan.compiler.pieces import Layout
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Cast:
    """Each element rounded to the nearest value of `dtype`; only between F16, BF16, F32 and F64.

    Integers, bools and scaled eight-bit floats are refused: a cast of those by value loses what they mean.
    The cast works element by element, so it rides on the pieces: a sliced tensor casts its own elements only.
    """

    spread: ClassVar[Spread] = "each"
    dtype: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType(self.dtype))

    def bind(self, context: Binding, *args: TensorType) -> Cast:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if not (arg.dtype.is_float and self.dtype.is_float):
            raise ShapeError(f"cast of {arg} to {self.dtype}: only F16, BF16, F32 and F64 are cast by value")
        return (TensorType(arg.shape, self.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.recast(args[0], self.dtype),)

    def reverse(self, *args: TensorType) -> Cast:
        """The cast back; exact only if this one widened."""
        return Cast(args[0].dtype)
