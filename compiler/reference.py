"""The op graph computed on whole tensors with torch's own ops: what every plan must come to.

Nothing here knows of pieces, slices or copies, so that a fault of the lowering cannot hide in it. One rule an op class;
an op from outside loadplan brings its own (`register_reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TypeVar

import torch

from loadplan.cache.error import LoadplanError
from loadplan.compiler.ir import Node, Stored, Value
from loadplan.compiler.ops import (
    Cast,
    Chunk,
    Concatenate,
    Conv3dToLinear,
    FoldBatchNorm,
    FuseRuns,
    Interleave,
    LinearToConv3d,
    MergeMessageQueries,
    MergeModulelist,
    Permute,
    PermuteForRope,
    PlainFloats,
    Reshape,
    Slice,
    Split,
    SplitModulelist,
    SplitRuns,
    Transpose,
    UnpadVocab,
)
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype, torch_layout

OpT = TypeVar("OpT")


class ReferenceFault(LoadplanError, TypeError):
    """An op has no rule here, or a tensor is not of the type that the graph says."""


def evaluate(value: Value, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`value`, made of the stored `tensors`; each node is computed once. May be a view of a stored tensor.

    Packed values (F4, F6) go in and come out as torch holds them (`torch_layout`), and are computed one element a byte.

    Raises:
        ReferenceFault: an op has no rule, or a tensor's shape or dtype is not that of its node.
        KeyError: a stored tensor is not in `tensors`.
    """
    found = _results(value.node, tensors, {})[value.index]
    return _packed(found, value.type) if value.type.dtype.is_packed else found


def register_reference(op_class: type[OpT], rule: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
    """Compute ops of `op_class` by `rule(op, *tensors)`, which returns the result, or a tuple of several."""
    _compute.register(op_class, rule)


def _results(
    node: Node, tensors: Mapping[str, torch.Tensor], done: dict[Node, tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    if node not in done:
        if isinstance(node.op, Stored):
            result: torch.Tensor | tuple[torch.Tensor, ...] = _stored(node.op, tensors[node.op.name])
        else:
            result = _compute(node.op, *(_results(arg.node, tensors, done)[arg.index] for arg in node.args))
        done[node] = _checked(node, result if isinstance(result, tuple) else (result,))
    return done[node]


def _stored(op: Stored, tensor: torch.Tensor) -> torch.Tensor:
    shape, dtype = torch_layout(op.type)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ReferenceFault(f"{op.name} is {tensor.dtype}{list(tensor.shape)}, the graph says {op.type}")
    return _unpacked(tensor, op.type) if op.type.dtype.is_packed else tensor


def _checked(node: Node, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    wanted = [(kind.shape, torch_dtype(kind.dtype)) for kind in node.types]
    if [(tuple(tensor.shape), tensor.dtype) for tensor in made] != wanted:
        shown = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in made)
        raise ReferenceFault(f"{node.op} made {shown}, its type rule says {', '.join(map(str, node.types))}")
    return made


def _unpacked(tensor: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """One element a byte: the bits of each, lowest first, in the order in which they lie."""
    bits = kind.dtype.bits
    flat = tensor.contiguous().view(torch.uint8).reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    weights = 1 << torch.arange(bits, dtype=torch.uint8)
    return (flat.reshape(kind.numel, bits) * weights).sum(1, dtype=torch.uint8).reshape(kind.shape)


def _packed(tensor: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """The inverse of `_unpacked`."""
    shape, dtype = torch_layout(kind)
    flat = tensor.reshape(-1, 1) >> torch.arange(kind.dtype.bits, dtype=torch.uint8) & 1
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    return (flat.reshape(kind.nbytes, 8) * weights).sum(1, dtype=torch.uint8).view(dtype).reshape(shape)


@singledispatch
def _compute(op: object, *args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    kind = type(op)
    raise ReferenceFault(
        f"{kind.__module__}.{kind.__qualname__} has no rule to compute it on whole tensors; give it one with "
        f"loadplan.compiler.reference.register_reference({kind.__qualname__}, rule)"
    )


@_compute.register
def _(op: Cast, arg: torch.Tensor) -> torch.Tensor:
    return arg.to(torch_dtype(op.dtype))


@_compute.register
def _(op: Concatenate, *args: torch.Tensor) -> torch.Tensor:
    return torch.cat(args, op.dim)


@_compute.register
def _(op: MergeModulelist, *args: torch.Tensor) -> torch.Tensor:
    return torch.stack(args, op.dim)


@_compute.register
def _(op: Chunk, arg: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert op.parts is not None, "bound"
    return arg.tensor_split(op.parts, op.dim)


@_compute.register
def _(op: Split, arg: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return arg.split(op.sizes, op.dim)  # type: ignore[no-any-return, no-untyped-call]


@_compute.register
def _(op: SplitModulelist, arg: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return arg.unbind(op.dim)


@_compute.register
def _(op: Slice, arg: torch.Tensor) -> torch.Tensor:
    return arg.narrow(op.dim, op.low, op.high - op.low)


@_compute.register
def _(op: Permute, arg: torch.Tensor) -> torch.Tensor:
    return arg.permute(op.order)


@_compute.register
def _(op: Transpose, arg: torch.Tensor) -> torch.Tensor:
    return arg.transpose(op.dim0, op.dim1)


@_compute.register
def _(op: Reshape, arg: torch.Tensor) -> torch.Tensor:
    return arg.reshape(op.shape)


@_compute.register
def _(op: Interleave, arg: torch.Tensor) -> torch.Tensor:
    dim = op.dim % arg.ndim
    if op.inverse:
        return torch.stack(arg.tensor_split(2, dim), dim + 1).reshape(arg.shape)
    front = (slice(None),) * dim
    return torch.cat([arg[(*front, slice(0, None, 2))], arg[(*front, slice(1, None, 2))]], dim)


@_compute.register
def _(op: PermuteForRope, arg: torch.Tensor) -> torch.Tensor:
    assert op.head_dim is not None, "bound"
    heads, half = arg.shape[0] // op.head_dim, op.head_dim // 2
    view = (heads, 2, half) if op.inverse else (heads, half, 2)
    return arg.reshape(*view, *arg.shape[1:]).transpose(1, 2).reshape(arg.shape)


@_compute.register
def _(op: Conv3dToLinear, arg: torch.Tensor) -> torch.Tensor:
    return arg.reshape(arg.shape[0], op.in_channels * op.kernel_size[0] * op.kernel_size[1] * op.kernel_size[2])


@_compute.register
def _(op: LinearToConv3d, arg: torch.Tensor) -> torch.Tensor:
    return arg.reshape(arg.shape[0], op.in_channels, *op.kernel_size)


@_compute.register
def _(op: FuseRuns, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert op.lists is not None and op.runs is not None, "bound"
    stacks = [torch.stack(part, op.stack_dim) for part in _shares(args, op.lists)]
    return torch.cat(stacks, op.concat_dim).split(op.runs, op.stack_dim)  # type: ignore[no-any-return, no-untyped-call]


@_compute.register
def _(op: SplitRuns, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = torch.cat(args, op.stack_dim).split(op.widths, op.concat_dim)  # type: ignore[no-untyped-call]
    return tuple(number for part in parts for number in part.unbind(op.stack_dim))


@_compute.register
def _(op: PlainFloats, arg: torch.Tensor) -> torch.Tensor:
    return arg


@_compute.register
def _(op: UnpadVocab, arg: torch.Tensor) -> torch.Tensor:
    return arg[: op.rows]


@_compute.register
def _(op: MergeMessageQueries, *args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if op.inverse:
        return args[0][:, [0, 3]].flatten(0, 1), args[0][:, [1, 2]].flatten(0, 1)
    query, mlp = args[0][::2], args[0][1::2]
    key, value = args[1][::2], args[1][1::2]
    return torch.stack([query, key, value, mlp], 1)


@_compute.register
def _(op: FoldBatchNorm, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight, gamma, beta, mean, var, *others = (arg.to(torch.float64) for arg in args)
    shift = others[0] if others and others[0].ndim else torch.zeros_like(mean)
    scale = gamma / torch.sqrt(var + op.eps)
    folded = (weight.movedim(0, -1) * scale).movedim(-1, 0)
    return folded.to(args[0].dtype), (beta + (shift - mean) * scale).to(args[0].dtype)


def _shares(args: tuple[torch.Tensor, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    size = len(args) // count
    return [args[low : low + size] for low in range(0, len(args), size)]
