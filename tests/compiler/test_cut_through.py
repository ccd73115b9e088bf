"""How results are cut when arguments are, against torch on whole tensors and on each rank's parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import cuts

from loadplan.compiler.cut_through import Cut, cut_through
from loadplan.compiler.ir import Op, Stored, apply
from loadplan.compiler.ops import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    FoldBatchNorm,
    Interleave,
    MergeModulelist,
    Permute,
    PermuteForRope,
    Reshape,
    Transpose,
)
from loadplan.compiler.reference import evaluate
from loadplan.compiler.shard import ShardError
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    first, made = 0, list[torch.Tensor]()
    for shape in shapes:
        tensor = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        first += tensor.numel()
        made.append(tensor)
    return made


def held(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """What a rank holds of a whole tensor."""
    if cut is None:
        return tensor
    dim, intervals = cut
    spans = [tensor.narrow(dim, low, high - low) for low, high in intervals[rank]]
    return torch.cat(spans, dim) if spans else tensor.narrow(dim, 0, 0)


def computed(op: Op, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of `op`, by torch's own ops."""
    kinds = [TensorType(tuple(tensor.shape), DType.F64) for tensor in tensors]
    args = [apply(Stored(str(number), kind))[0] for number, kind in enumerate(kinds)]
    stored = {str(number): tensor for number, tensor in enumerate(tensors)}
    return [evaluate(value, stored) for value in apply(op, *args)]


def check(op: Op, tensors: list[torch.Tensor], parts: tuple[Cut, ...], ranks: int) -> tuple[Cut, ...]:
    """The op on what each rank holds is what the rank holds of the op's results; and these tile."""
    kinds = tuple(TensorType(tuple(tensor.shape), DType.F64) for tensor in tensors)
    made = cut_through(op, kinds, parts)
    wholes = computed(op, tensors)
    for rank in range(ranks):
        local = computed(op, [held(tensor, cut, rank) for tensor, cut in zip(tensors, parts, strict=True)])
        for whole, cut, part in zip(wholes, made, local, strict=True):
            assert torch.equal(held(whole, cut, rank), part)
    for whole, cut in zip(wholes, made, strict=True):
        if cut is not None:
            spans = sorted(span for intervals in cut[1] for span in intervals)
            assert [b for _, b in spans] == [a for a, _ in spans[1:]] + [whole.shape[cut[0]]] and spans[0][0] == 0
    return made


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ranks=st.integers(2, 3),
    inner=st.sampled_from([(), (2,), (3, 2)]),
    data=st.data(),
)
def test_any_parts_joined_along_the_dim_that_is_cut(
    sizes: list[int], ranks: int, inner: tuple[int, ...], data: st.DataObject
) -> None:
    """Queries, keys and values of any sizes, each cut over the ranks in its own way; matrices, biases and more."""
    dim = data.draw(st.integers(0, len(inner)))
    shapes = [(*inner[:dim], size, *inner[dim:]) for size in sizes]
    parts: tuple[Cut, ...] = tuple((dim, data.draw(cuts(size, ranks))) for size in sizes)
    op = Concatenate(dim)
    check(op, numbered(*shapes), parts, ranks)


@given(rows=st.integers(1, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), ranks=st.integers(2, 3))
def test_parts_joined_along_another_dim_must_be_cut_alike(rows: int, sizes: list[int], ranks: int) -> None:
    cut: Cut = (0, tuple(((rank * rows, (rank + 1) * rows),) for rank in range(ranks)))
    tensors = numbered(*((ranks * rows, size) for size in sizes))
    assert check(Concatenate(1), tensors, (cut,) * len(sizes), ranks) == (cut,)


OPS = [
    (Transpose(0, 1), (4, 6), 0),
    (Transpose(0, 1), (4, 6), 1),
    (Permute((2, 0, 1)), (2, 4, 3), 1),
    (Conv3dToLinear(3, (2, 2, 1)), (4, 3, 2, 2, 1), 0),
    (Reshape((-1, 6)), (4, 2, 3), 0),
    (PermuteForRope(head_dim=4), (8, 3), 0),
    (PermuteForRope(head_dim=4), (8, 4), 1),
    (Interleave(1), (4, 6), 0),
    (Chunk(1, 2), (4, 6), 0),
    (MergeModulelist(0), (4, 6), 1),
]


@pytest.mark.parametrize(("op", "shape", "dim"), OPS, ids=str)
@pytest.mark.parametrize("ranks", [2])
def test_other_ops(op: Op, shape: tuple[int, ...], dim: int, ranks: int) -> None:
    step = shape[dim] // ranks
    cut: Cut = (dim, tuple(((rank * step, (rank + 1) * step),) for rank in range(ranks)))
    assert None not in check(op, numbered(shape), (cut,), ranks)


@given(shape=st.sampled_from([(4, 6), (2, 4, 6), (8, 4)]), ranks=st.integers(1, 3), data=st.data())
def test_what_is_not_refused_is_right(shape: tuple[int, ...], ranks: int, data: st.DataObject) -> None:
    """Any cut of any argument of these ops: either the ranks' results are a cut of the result, or it is refused."""
    ops: list[Any] = [op for op, fits, _ in OPS if len(fits) == len(shape)]
    op = data.draw(st.sampled_from(ops))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut: Cut = (dim, data.draw(cuts(shape[dim], ranks)))
    try:
        check(op, numbered(shape), (cut,), ranks)
    except ShardError:
        return


def test_whole_arguments_give_whole_results() -> None:
    assert cut_through(Concatenate(0), (TensorType((2,), DType.F32),) * 2, (None, None)) == (None,)


HALVES = (0, (((0, 2),), ((2, 4),)))
COLUMNS = (1, (((0, 3),), ((3, 6),)))
F = TensorType((4, 6), DType.F32)


@pytest.mark.parametrize(
    ("op", "types", "parts", "says"),
    [
        (
            Concatenate(0),
            (F, F),
            (HALVES, None),
            "the ranks together hold 12 positions along dim 0, there are 8; cut all",
        ),
        (
            Concatenate(0),
            (F, F),
            (HALVES, COLUMNS),
            "cannot be applied to what rank 0 holds (cut along dim 0, cut along",
        ),
        (Concatenate(1), (F, F), (HALVES, None), "cannot be applied to what rank 0 holds (cut along dim 0, whole)"),
        (Concatenate(1), (F, F), (HALVES, (0, HALVES[1][::-1])), "what rank 0 makes of its parts is no cut of [4, 12]"),
        (Reshape((2, 12)), (F,), (HALVES,), "cannot be applied to what rank 0 holds"),
        (Reshape((24,)), (F,), (COLUMNS,), "cannot be applied to what rank 0 holds"),
        (
            FoldBatchNorm(),
            (F, *[TensorType((4,), DType.F32)] * 4),
            (HALVES, HALVES, None, HALVES, HALVES),
            "must all be cut alike along dim 0: cut along dim 0, cut along dim 0, whole,",
        ),
        (
            FoldBatchNorm(),
            (F, *[TensorType((4,), DType.F32)] * 4),
            (COLUMNS, *[None] * 4),
            "must all be cut alike along dim 0",
        ),
    ],
)
def test_what_cannot_be_joined(op: Op, types: tuple[TensorType, ...], parts: tuple[Cut, ...], says: str) -> None:
    with pytest.raises(ShardError, match=re.escape(says)):
        cut_through(op, types, parts)


def test_rows_go_through_kernels() -> None:
    types = (F, *[TensorType((4,), DType.F32)] * 4, TensorType((), DType.I64))
    assert cut_through(FoldBatchNorm(), types, (*[HALVES] * 5, None)) == (HALVES, HALVES)
