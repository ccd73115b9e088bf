"""Ops that make one tensor of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops import split
from loadplan.compiler.ops.arguments import place, resized
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Concatenate:
    """The arguments joined along `dim`, in the order in which the rule lists its sources."""

    spread: ClassVar[Spread] = "all"
    dim: int = 0

    def bind(self, context: Binding, *args: TensorType) -> Concatenate:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if not args:
            raise ShapeError(f"{self} of no tensors")
        dim = place(self, self.dim, len(args[0].shape))
        for index, arg in enumerate(args[1:], start=1):
            same_ndim = len(arg.shape) == len(args[0].shape)
            if (
                arg.dtype != args[0].dtype
                or not same_ndim
                or resized(arg.shape, dim, 0) != resized(args[0].shape, dim, 0)
            ):
                raise ShapeError(f"{self}: tensor {index} is {arg}, tensor 0 is {args[0]}; only dim {dim} may differ")
        return (TensorType(resized(args[0].shape, dim, sum(arg.shape[dim] for arg in args)), args[0].dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.concatenate(args, self.dim % len(args[0].shape)),)

    def reverse(self, *args: TensorType) -> Op:
        return split.Split(self.dim, tuple(arg.shape[self.dim] for arg in args))


@dataclass(frozen=True, slots=True)
class MergeModulelist:
    """The tensors of a list (experts, by number) stacked along a new dim `dim`."""

    spread: ClassVar[Spread] = "list"
    dim: int = 0

    def bind(self, context: Binding, *args: TensorType) -> MergeModulelist:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if not args:
            raise ShapeError(f"{self} of no tensors")
        for index, arg in enumerate(args[1:], start=1):
            if arg != args[0]:
                raise ShapeError(f"{self}: number {index} is {arg}, number 0 is {args[0]}; all must be alike")
        shape = args[0].shape
        dim = place(self, self.dim, len(shape) + 1)
        return (TensorType((*shape[:dim], len(args), *shape[dim:]), args[0].dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.stack(args, self.dim % (len(args[0].shape) + 1)),)

    def reverse(self, *args: TensorType) -> Op:
        return split.SplitModulelist(self.dim)
