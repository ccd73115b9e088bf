"""Ops that take tensors out of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops import join
from loadplan.compiler.ops.arguments import one, place, resized
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Chunk:
    """`parts` equal pieces along `dim`; one for each target of the rule when `parts` is None.

    Unlike `torch.chunk`, a size that is not a multiple of `parts` is refused: use `Split` for unequal parts.
    """

    spread: ClassVar[Spread] = "each"
    dim: int = 0
    parts: int | None = None

    def bind(self, context: Binding, *args: TensorType) -> Chunk:
        return self if self.parts is not None else replace(self, parts=context.results)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        dim = place(self, self.dim, len(arg.shape))
        if self.parts is None or self.parts < 1:
            raise ShapeError(f"{self}: the number of parts is not known")
        size, rest = divmod(arg.shape[dim], self.parts)
        if rest:
            raise ShapeError(
                f"{self} of {arg}: {arg.shape[dim]} is not a multiple of {self.parts}; use Split for unequal parts"
            )
        return (TensorType(resized(arg.shape, dim, size), arg.dtype),) * self.parts

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        assert self.parts is not None, "bound"
        dim = self.dim % len(args[0].shape)
        size = args[0].shape[dim] // self.parts
        return tuple(pieces.narrow(args[0], dim, i * size, (i + 1) * size) for i in range(self.parts))

    def reverse(self, *args: TensorType) -> Op:
        return join.Concatenate(self.dim)


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces of the given `sizes` along `dim`; the sizes of the rule's targets when `sizes` is None."""

    spread: ClassVar[Spread] = "each"
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def bind(self, context: Binding, *args: TensorType) -> Split:
        if self.sizes is not None:
            return self
        if None in context.targets:
            raise ShapeError(f"{self}: sizes are not given, and no signature declares the targets")
        sizes = tuple(target.shape[place(self, self.dim, len(target.shape))] for target in context.targets if target)
        return replace(self, sizes=sizes)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        dim = place(self, self.dim, len(arg.shape))
        if self.sizes is None or sum(self.sizes) != arg.shape[dim] or min(self.sizes, default=0) < 0:
            raise ShapeError(
                f"{self} of {arg}: sizes are counts and must add up to {arg.shape[dim]}, not {sum(self.sizes or ())}"
            )
        return tuple(TensorType(resized(arg.shape, dim, size), arg.dtype) for size in self.sizes)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        dim = self.dim % len(args[0].shape)
        return tuple(pieces.narrow(args[0], dim, low, high) for low, high in self._spans())

    def reverse(self, *args: TensorType) -> Op:
        return join.Concatenate(self.dim)

    def _spans(self) -> Iterator[tuple[int, int]]:
        return pairwise(accumulate(self.sizes or (), initial=0))


@dataclass(frozen=True, slots=True)
class SplitModulelist:
    """A list (experts, numbered from 0) of the slices along `dim`, without that dim."""

    spread: ClassVar[Spread] = "each"
    makes_list: ClassVar[bool] = True
    dim: int = 0

    def bind(self, context: Binding, *args: TensorType) -> SplitModulelist:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        dim = place(self, self.dim, len(arg.shape))
        return (TensorType((*arg.shape[:dim], *arg.shape[dim + 1 :]), arg.dtype),) * arg.shape[dim]

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        (arg,) = args
        dim = self.dim % len(arg.shape)
        shape = (*arg.shape[:dim], *arg.shape[dim + 1 :])
        return tuple(pieces.reshape(pieces.narrow(arg, dim, i, i + 1), shape) for i in range(arg.shape[dim]))

    def reverse(self, *args: TensorType) -> Op:
        return join.MergeModulelist(self.dim)


@dataclass(frozen=True, slots=True)
class Slice:
    """The positions `low` to `high` (excluded) along `dim`; the rest is given up, so it has no inverse."""

    spread: ClassVar[Spread] = "each"
    dim: int
    low: int
    high: int

    def bind(self, context: Binding, *args: TensorType) -> Slice:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        dim = place(self, self.dim, len(arg.shape))
        if not 0 <= self.low <= self.high <= arg.shape[dim]:
            raise ShapeError(f"{self} of {arg}: dim {dim} has {arg.shape[dim]}")
        return (TensorType(resized(arg.shape, dim, self.high - self.low), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.narrow(args[0], self.dim % len(args[0].shape), self.low, self.high),)

    def reverse(self, *args: TensorType) -> Op:
        whole = args[0].shape[self.dim]
        if (self.low, self.high) == (0, whole):
            return self
        raise ShapeError(
            f"{self} of {args[0]} gives {whole - (self.high - self.low)} of {whole} positions up: it has no inverse"
        )
