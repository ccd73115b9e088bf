"""Ops on the lists of experts that several tensors share, or that may be stored quantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops.arguments import one, place, resized
from loadplan.compiler.ops.join import MergeModulelist
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class FuseRuns:
    """One tensor per run of list numbers: in each, every list's run stacked, and the stacks joined along `concat_dim`.

    `gate[0..n]` and `up[0..n]` with runs of `k` and `n - k` become `[k, gate + up, ...]` and `[n - k, gate + up, ...]`:
    the experts of two modalities, stored as one list. The sizes of the runs are those of the rule's declared targets,
    else equal, rounded up. `lists` is the number of sources.
    """

    spread: ClassVar[Spread] = "all"
    stack_dim: int = 0
    concat_dim: int = 1
    lists: int | None = None
    runs: tuple[int, ...] | None = None

    def bind(self, context: Binding, *args: TensorType) -> FuseRuns:
        lists = self.lists or len(context.names)
        return replace(self, lists=lists, runs=self.runs or self._runs_for(context, args, len(args) // lists))

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        length = self._length(args)
        if self.runs is None or sum(self.runs) != length or min(self.runs) < 1:
            raise ShapeError(f"{self}: runs must be of one or more, and add up to the {length} of a list")
        ndim = len(args[0].shape) + 1
        stack, join = place(self, self.stack_dim, ndim), place(self, self.concat_dim, ndim)
        if stack == join:
            raise ShapeError(f"{self}: stacks are joined along another dim than they are stacked on")
        stacks = [MergeModulelist(stack).infer(*args[low : low + length])[0] for low in range(0, len(args), length)]
        for index, found in enumerate(stacks[1:], start=1):
            if found.dtype != stacks[0].dtype or resized(found.shape, join, 0) != resized(stacks[0].shape, join, 0):
                raise ShapeError(f"{self}: list {index} is {found}, list 0 is {stacks[0]}; only dim {join} may differ")
        joined = resized(stacks[0].shape, join, sum(found.shape[join] for found in stacks))
        return tuple(TensorType(resized(joined, stack, run), stacks[0].dtype) for run in self.runs)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        assert self.lists is not None and self.runs is not None, "bound"
        length = len(args) // self.lists
        ndim = len(args[0].shape) + 1
        return tuple(
            pieces.concatenate(
                [
                    pieces.stack(args[first + low : first + high], self.stack_dim % ndim)
                    for first in range(0, len(args), length)
                ],
                self.concat_dim % ndim,
            )
            for low, high in pairwise(accumulate(self.runs, initial=0))
        )

    def reverse(self, *args: TensorType) -> Op:
        length = self._length(args)
        ndim = len(args[0].shape) + 1
        stack, join = self.stack_dim % ndim, self.concat_dim % ndim
        at = join - (join > stack)  # the same dim of one tensor of a list
        return SplitRuns(stack, join, tuple(arg.shape[at] for arg in args[::length]))

    def _length(self, args: Sequence[TensorType]) -> int:
        """Of each list."""
        if not args or not self.lists or len(args) % self.lists:
            raise ShapeError(f"{self} of {len(args)} tensors: they must be lists of equal length")
        return len(args) // self.lists

    def _runs_for(self, context: Binding, args: Sequence[TensorType], length: int) -> tuple[int, ...]:
        declared = [target for target in context.targets if target is not None]
        if declared and len(declared) == context.results:
            return tuple(target.shape[place(self, self.stack_dim, len(target.shape))] for target in declared)
        size = -(-length // context.results)
        return tuple(min(size, length - low) for low in range(0, size * context.results, size))


@dataclass(frozen=True, slots=True)
class SplitRuns:
    """The inverse of `FuseRuns`: the lists, one after the other, each by number through all the runs.

    `widths` are the sizes of the lists' parts along `concat_dim`; equal ones, for each target of the rule, when None.
    """

    spread: ClassVar[Spread] = "all"
    makes_list: ClassVar[bool] = True
    stack_dim: int = 0
    concat_dim: int = 1
    widths: tuple[int, ...] | None = None

    def bind(self, context: Binding, *args: TensorType) -> SplitRuns:
        if self.widths is not None or not args:
            return self
        width, rest = divmod(args[0].shape[place(self, self.concat_dim, len(args[0].shape))], context.results)
        if rest:
            raise ShapeError(f"{self} of {args[0]}: dim {self.concat_dim} does not divide by {context.results}")
        return replace(self, widths=(width,) * context.results)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if not args:
            raise ShapeError(f"{self} of no tensors")
        ndim = len(args[0].shape)
        stack, join = place(self, self.stack_dim, ndim), place(self, self.concat_dim, ndim)
        for index, arg in enumerate(args[1:], start=1):
            same_ndim = len(arg.shape) == ndim
            if (
                arg.dtype != args[0].dtype
                or not same_ndim
                or resized(arg.shape, stack, 0) != resized(args[0].shape, stack, 0)
            ):
                raise ShapeError(f"{self}: run {index} is {arg}, run 0 is {args[0]}; only dim {stack} may differ")
        if stack == join or self.widths is None or sum(self.widths) != args[0].shape[join]:
            raise ShapeError(f"{self} of {args[0]}: widths are along another dim than the list, and must fill it")
        return tuple(
            TensorType(_without(resized(arg.shape, join, width), stack), arg.dtype)
            for width in self.widths
            for arg in args
            for _ in range(arg.shape[stack])
        )

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        ndim = len(args[0].shape)
        stack, join = self.stack_dim % ndim, self.concat_dim % ndim
        return tuple(
            pieces.reshape(number, _without(number.shape, stack))
            for low, high in pairwise(accumulate(self.widths or (), initial=0))
            for arg in args
            for number in _numbers(pieces.narrow(arg, join, low, high), stack)
        )

    def reverse(self, *args: TensorType) -> Op:
        return FuseRuns(
            self.stack_dim, self.concat_dim, len(self.widths or ()), tuple(arg.shape[self.stack_dim] for arg in args)
        )


@dataclass(frozen=True, slots=True)
class PlainFloats:
    """The tensor as it is; refused unless it is made of plain floating point numbers.

    For weights that are published quantised as well: a dense one passes, and one whose values need scales beside them
    is refused here instead of being taken for numbers.
    """

    spread: ClassVar[Spread] = "each"

    def bind(self, context: Binding, *args: TensorType) -> PlainFloats:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if not arg.dtype.is_float:
            raise ShapeError(
                f"{self} of {arg}: these are quantised values, which mean nothing without their scales; "
                "dequantise the checkpoint first"
            )
        return (arg,)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (args[0],)

    def reverse(self, *args: TensorType) -> Op:
        return self


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _numbers(layout: Layout, dim: int) -> Iterator[Layout]:
    """The slices of one position along `dim`."""
    return (pieces.narrow(layout, dim, index, index + 1) for index in range(layout.shape[dim]))
