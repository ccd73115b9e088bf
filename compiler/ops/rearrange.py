"""Ops that move the elements of one tensor: dims swapped, split, merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops.arguments import one, place, resized
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Permute:
    """Dim `i` of the result is dim `order[i]` of the argument."""

    spread: ClassVar[Spread] = "each"
    order: tuple[int, ...]

    def bind(self, context: Binding, *args: TensorType) -> Permute:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if sorted(self.order) != list(range(len(arg.shape))):
            raise ShapeError(f"{self} of {arg}: the order must name each of its {len(arg.shape)} dims once")
        return (TensorType(tuple(arg.shape[dim] for dim in self.order), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.permute(args[0], self.order),)

    def reverse(self, *args: TensorType) -> Op:
        return Permute(tuple(self.order.index(dim) for dim in range(len(self.order))))


@dataclass(frozen=True, slots=True)
class Transpose:
    """Two dims swapped.

    With `check_dims`, a tensor that already has the shape of its target stays as it is: for models published in both
    orders. Where the two dims are equal the shape cannot tell, and the op is refused: say which by `check_dims=False`
    or by leaving the op out.
    """

    spread: ClassVar[Spread] = "each"
    dim0: int = 0
    dim1: int = 1
    check_dims: bool = False

    def bind(self, context: Binding, *args: TensorType) -> Op:
        if not self.check_dims:
            return self
        arg = one(self, args)
        (swapped,) = replace(self, check_dims=False).infer(arg)
        if len(context.targets) != 1 or context.targets[0] is None:
            raise ShapeError(f"{self}: no signature declares the shape to compare with")
        if swapped == arg:
            raise ShapeError(f"{self} of {arg}: both orders have this shape; say which it is with check_dims=False")
        return Reshape(arg.shape) if arg.shape == context.targets[0].shape else replace(self, check_dims=False)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        return (TensorType(tuple(arg.shape[dim] for dim in self._order(len(arg.shape))), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.permute(args[0], self._order(len(args[0].shape))),)

    def reverse(self, *args: TensorType) -> Op:
        return self

    def _order(self, ndim: int) -> list[int]:
        first, second = place(self, self.dim0, ndim), place(self, self.dim1, ndim)
        order = list(range(ndim))
        order[first], order[second] = second, first
        return order


@dataclass(frozen=True, slots=True)
class Reshape:
    """The elements in row-major order under another shape; one size may be -1, to be worked out."""

    spread: ClassVar[Spread] = "each"
    shape: tuple[int, ...]

    def bind(self, context: Binding, *args: TensorType) -> Reshape:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ShapeError(f"{self}: sizes are counts, and at most one may be -1")
        known = prod(size for size in self.shape if size != -1)
        shape = self.shape
        if -1 in shape:
            if known == 0 or arg.numel % known:
                raise ShapeError(f"{self} of {arg}: {arg.numel} elements do not divide by {known}")
            shape = tuple(arg.numel // known if size == -1 else size for size in shape)
        if prod(shape) != arg.numel:
            raise ShapeError(f"{self} of {arg}: {arg.numel} elements are not {prod(shape)}")
        return (TensorType(shape, arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        rest = prod(args[0].shape) // max(prod(size for size in self.shape if size != -1), 1)
        return (pieces.reshape(args[0], tuple(rest if size == -1 else size for size in self.shape)),)

    def reverse(self, *args: TensorType) -> Op:
        return Reshape(args[0].shape)


@dataclass(frozen=True, slots=True)
class Interleave:
    """Along `dim`, the even positions first, then the odd ones: `a0 b0 a1 b1` becomes `a0 a1 b0 b1`.

    `inverse` puts them back. The size must be even.
    """

    spread: ClassVar[Spread] = "each"
    dim: int = 0
    inverse: bool = False

    def bind(self, context: Binding, *args: TensorType) -> Interleave:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        dim = place(self, self.dim, len(arg.shape))
        if arg.shape[dim] % 2:
            raise ShapeError(f"{self} of {arg}: dim {dim} has {arg.shape[dim]}, which is odd")
        return (arg,)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        dim = self.dim % len(args[0].shape)
        half = args[0].shape[dim] // 2
        return (swap_halves(args[0], dim, (2, half) if self.inverse else (half, 2)),)

    def reverse(self, *args: TensorType) -> Op:
        return replace(self, inverse=not self.inverse)


@dataclass(frozen=True, slots=True)
class PermuteForRope:
    """Rows of each attention head from rotary pairs side by side to halves (`inverse`: back), on dim 0.

    Rows are viewed as `(heads, head_dim / 2, 2)` and become `(heads, 2, head_dim / 2)`. The size of a head is
    `head_dim`, else taken from the config (`head_dim`, or `hidden_size / num_attention_heads`), inside `subconfig_key`
    if given; so keys with fewer heads than queries come out right. Only tensors with 1 or 2 dims are taken.
    With `permute_layer_names`, only groups whose pattern has one of these as a whole name component are permuted.
    """

    spread: ClassVar[Spread] = "each"
    subconfig_key: str | None = None
    permute_layer_names: tuple[str, ...] | None = None
    inverse: bool = False
    head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.permute_layer_names is not None:
            object.__setattr__(self, "permute_layer_names", tuple(self.permute_layer_names))

    def bind(self, context: Binding, *args: TensorType) -> Op:
        arg = one(self, args)
        names = self.permute_layer_names
        if names is not None and not set(names) & {part for name in context.names for part in name.split(".")}:
            return Reshape(arg.shape)
        return self if self.head_dim is not None else replace(self, head_dim=self._configured(context))

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if self.head_dim is None:
            raise ShapeError(f"{self}: the size of a head is not known")
        is_even = self.head_dim > 0 and self.head_dim % 2 == 0
        if len(arg.shape) not in (1, 2) or not is_even or arg.shape[0] % self.head_dim:
            raise ShapeError(
                f"{self} of {arg}: rows must be whole heads of {self.head_dim} (an even number), in a tensor of 1 or 2 dims"
            )
        return (arg,)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        assert self.head_dim is not None, "bound"
        (arg,) = args
        heads = arg.shape[0] // self.head_dim
        split = pieces.reshape(arg, (heads, self.head_dim, *arg.shape[1:]))
        half = self.head_dim // 2
        return (pieces.reshape(swap_halves(split, 1, (2, half) if self.inverse else (half, 2)), arg.shape),)

    def reverse(self, *args: TensorType) -> Op:
        return replace(self, inverse=not self.inverse)

    def _configured(self, context: Binding) -> int:
        find = context.config.find_int
        declared = find("head_dim", self.subconfig_key)
        if declared is not None:
            return declared
        hidden, heads = find("hidden_size", self.subconfig_key), find("num_attention_heads", self.subconfig_key)
        if not hidden or not heads or hidden % heads:
            raise ShapeError(
                f"{self}: the config has neither head_dim nor hidden_size and num_attention_heads; pass head_dim"
            )
        return hidden // heads


@dataclass(frozen=True, slots=True)
class Conv3dToLinear:
    """The weight of a `Conv3d` whose stride is its kernel, `[out, in, t, h, w]`, as that of a `Linear`, `[out, in*t*h*w]`."""

    spread: ClassVar[Spread] = "each"
    in_channels: int
    kernel_size: tuple[int, int, int]

    def bind(self, context: Binding, *args: TensorType) -> Conv3dToLinear:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if len(arg.shape) != 5 or arg.shape[1:] != (self.in_channels, *self.kernel_size):
            raise ShapeError(f"{self} of {arg}: not the weight of such a convolution")
        return (TensorType((arg.shape[0], prod(arg.shape[1:])), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.reshape(args[0], (args[0].shape[0], prod(args[0].shape[1:]))),)

    def reverse(self, *args: TensorType) -> Op:
        return LinearToConv3d(self.in_channels, self.kernel_size)


@dataclass(frozen=True, slots=True)
class LinearToConv3d:
    """The inverse of `Conv3dToLinear`."""

    spread: ClassVar[Spread] = "each"
    in_channels: int
    kernel_size: tuple[int, int, int]

    def bind(self, context: Binding, *args: TensorType) -> LinearToConv3d:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        inner = (self.in_channels, *self.kernel_size)
        if len(arg.shape) != 2 or arg.shape[1] != prod(inner):
            raise ShapeError(f"{self} of {arg}: the second dim must be {prod(inner)}")
        return (TensorType((arg.shape[0], *inner), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        return (pieces.reshape(args[0], (args[0].shape[0], self.in_channels, *self.kernel_size)),)

    def reverse(self, *args: TensorType) -> Op:
        return Conv3dToLinear(self.in_channels, self.kernel_size)


def swap_halves(layout: Layout, dim: int, view: tuple[int, int]) -> Layout:
    """`dim` viewed as the two dims `view`, which are swapped and merged again."""
    shape = layout.shape
    split = pieces.reshape(layout, (*shape[:dim], *view, *shape[dim + 1 :]))
    order = list(range(len(split.shape)))
    order[dim], order[dim + 1] = dim + 1, dim
    return pieces.reshape(pieces.permute(split, order), resized(shape, dim, view[0] * view[1]))
