"""Ops on learned queries, of which a layer has several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops.arguments import one
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class MergeMessageQueries:
    """Two tensors of two rows a layer, `[2 * layers, size]`, as one of four, `[layers, 4, size]`; `inverse`: back.

    A layer's pair of the first tensor (query, mlp) encloses its pair of the second one (key, value): the four are
    query, key, value, mlp. Facts: `Inkling2LoopMergeMessageQueries` of transformers 5.24.
    """

    spread: ClassVar[Spread] = "all"
    inverse: bool = False

    def bind(self, context: Binding, *args: TensorType) -> MergeMessageQueries:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if self.inverse:
            arg = one(self, args)
            if len(arg.shape) != 3 or arg.shape[1] != 4:
                raise ShapeError(f"{self} of {arg}: it takes [layers, 4, size]")
            return (TensorType((2 * arg.shape[0], arg.shape[2]), arg.dtype),) * 2
        if len(args) != 2 or args[0] != args[1] or len(args[0].shape) != 2 or args[0].shape[0] % 2:
            raise ShapeError(f"{self} of {', '.join(map(str, args))}: it takes two [2 * layers, size] of one type")
        return (TensorType((args[0].shape[0] // 2, 4, args[0].shape[1]), args[0].dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        if self.inverse:
            (arg,) = args
            layers, _, size = arg.shape
            ends = pieces.concatenate([pieces.narrow(arg, 1, 0, 1), pieces.narrow(arg, 1, 3, 4)], 1)
            return tuple(pieces.reshape(part, (2 * layers, size)) for part in (ends, pieces.narrow(arg, 1, 1, 3)))
        rows, size = args[0].shape
        outer, inner = (pieces.reshape(arg, (rows // 2, 2, size)) for arg in args)
        return (pieces.concatenate([pieces.narrow(outer, 1, 0, 1), inner, pieces.narrow(outer, 1, 1, 2)], 1),)

    def reverse(self, *args: TensorType) -> Op:
        return MergeMessageQueries(not self.inverse)
