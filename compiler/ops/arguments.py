"""Checks that the type rules of ops share."""

from __future__ import annotations

from collections.abc import Sequence

from loadplan.compiler.ir import ShapeError
from loadplan.runtime.tensor_type import TensorType


def one(op: object, args: Sequence[TensorType]) -> TensorType:
    """The only argument."""
    if len(args) != 1:
        raise ShapeError(f"{op} takes one tensor, not {len(args)}")
    return args[0]


def place(op: object, dim: int, ndim: int) -> int:
    """`dim` counted from the front; negative ones count from the back."""
    if not -ndim <= dim < ndim:
        raise ShapeError(f"{op}: dim {dim} of a tensor with {ndim} dims")
    return dim % ndim


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with `size` along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])
