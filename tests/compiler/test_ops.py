"""Every op by a table: its type rule, what it refuses in which words, what it makes, and that its inverse undoes it.

The result of the lowering is compared with torch on whole tensors (`reference.evaluate`), and both with values written
out by hand where a published layout defines the op. An op that is exported without a row here fails the suite.
"""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass, fields

import numpy as np
import pytest
import torch
from by_hand import Numbers, elements, tensor_type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Graph, graphs, storage_numel, stored_tensor

from loadplan.compiler import ops, pieces
from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Binding, ComputeOp, Config, Node, Op, ShapeError, Stored, Value, apply
from loadplan.compiler.lower_graph import Lowering
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
from loadplan.compiler.reference import ReferenceFault, evaluate, register_reference
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype, torch_layout


@dataclass(frozen=True)
class Row:
    """An op on arguments of these types gives results of these types."""

    op: Op
    args: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op} {' '.join(self.args)}"


def row(op: Op, text: str) -> Row:
    """From `F32[2] F32[3] -> F32[5]`."""
    left, right = text.split("->")
    return Row(op, tuple(left.split()), tuple(right.split()))


ROWS = [
    row(Cast(DType.BF16), "F32[2,3] -> BF16[2,3]"),
    row(Cast(DType.F64), "F16[] -> F64[]"),
    row(Cast(DType.F32), "BF16[0,4] -> F32[0,4]"),
    row(Cast(DType.F16), "F16[3] -> F16[3]"),
    row(Chunk(0, 2), "F32[4,3] -> F32[2,3] F32[2,3]"),
    row(Chunk(-1, 3), "I32[2,6] -> I32[2,2] I32[2,2] I32[2,2]"),
    row(Chunk(1, 1), "U8[2,5] -> U8[2,5]"),
    row(Chunk(0, 2), "F32[0,5] -> F32[0,5] F32[0,5]"),
    row(Concatenate(0), "F32[4,3] F32[1,3] F32[0,3] -> F32[5,3]"),
    row(Concatenate(-2), "BF16[3,1,2] BF16[3,4,2] -> BF16[3,5,2]"),
    row(Concatenate(1), "I64[2,7] -> I64[2,7]"),
    row(Conv3dToLinear(3, (2, 2, 1)), "F32[5,3,2,2,1] -> F32[5,12]"),
    row(FoldBatchNorm(), "F32[4,3,2,2] F32[4] F32[4] F32[4] F32[4] -> F32[4,3,2,2] F32[4]"),
    row(FoldBatchNorm(0.5), "F16[3,1] F32[3] F32[3] F32[3] F64[3] I64[] -> F16[3,1] F16[3]"),
    row(FoldBatchNorm(0), "BF16[2,2] F32[2] BF16[2] F32[2] F32[2] BF16[2] -> BF16[2,2] BF16[2]"),
    row(FoldBatchNorm(), "F32[1,2] F32[1] F32[1] F32[1] F32[1] F32[1] I64[] -> F32[1,2] F32[1]"),
    row(FuseRuns(0, 1, 2, (2, 1)), "F32[3,2] F32[3,2] F32[3,2] F32[4,2] F32[4,2] F32[4,2] -> F32[2,7,2] F32[1,7,2]"),
    row(FuseRuns(0, 1, 1, (1, 2)), "F16[2] F16[2] F16[2] -> F16[1,2] F16[2,2]"),
    row(FuseRuns(-1, 0, 3, (1,)), "U8[2,5] U8[1,5] U8[3,5] -> U8[6,5,1]"),
    row(FuseRuns(1, 2, 2, (1, 1)), "F32[2,3] F32[2,3] F32[2,1] F32[2,1] -> F32[2,1,4] F32[2,1,4]"),
    row(Interleave(0), "F32[6] -> F32[6]"),
    row(Interleave(-1), "F32[3,4] -> F32[3,4]"),
    row(Interleave(1, inverse=True), "F32[2,8,3] -> F32[2,8,3]"),
    row(Interleave(0), "F32[0,3] -> F32[0,3]"),
    row(LinearToConv3d(2, (1, 3, 2)), "F32[4,12] -> F32[4,2,1,3,2]"),
    row(MergeMessageQueries(), "F32[4,3] F32[4,3] -> F32[2,4,3]"),
    row(MergeMessageQueries(inverse=True), "BF16[3,4,1] -> BF16[6,1] BF16[6,1]"),
    row(MergeModulelist(0), "F32[2,3] F32[2,3] F32[2,3] -> F32[3,2,3]"),
    row(MergeModulelist(-1), "F16[2] F16[2] -> F16[2,2]"),
    row(MergeModulelist(1), "F16[2,4] F16[2,4] -> F16[2,2,4]"),
    row(MergeModulelist(0), "F32[] F32[] -> F32[2]"),
    row(Permute((2, 0, 1)), "F32[2,3,4] -> F32[4,2,3]"),
    row(Permute(()), "F32[] -> F32[]"),
    row(PermuteForRope(head_dim=4), "F32[8,3] -> F32[8,3]"),
    row(PermuteForRope(head_dim=6, inverse=True), "F32[12] -> F32[12]"),
    row(PermuteForRope(head_dim=2), "F32[0,3] -> F32[0,3]"),
    row(PlainFloats(), "BF16[2,3] -> BF16[2,3]"),
    row(Reshape((3, 4)), "F32[2,6] -> F32[3,4]"),
    row(Reshape((2, -1, 3)), "F32[2,6] -> F32[2,2,3]"),
    row(Reshape(()), "F32[1,1] -> F32[]"),
    row(Reshape((4, -1)), "F32[0,4] -> F32[4,0]"),
    row(Slice(0, 1, 3), "F32[4,2] -> F32[2,2]"),
    row(Slice(-1, 2, 2), "F32[4,2] -> F32[4,0]"),
    row(Slice(1, 0, 5), "F32[2,5] -> F32[2,5]"),
    row(Split(0, (4, 2, 2)), "F32[8,2] -> F32[4,2] F32[2,2] F32[2,2]"),
    row(Split(-1, (0, 3)), "F32[2,3] -> F32[2,0] F32[2,3]"),
    row(SplitModulelist(0), "F32[3,2] -> F32[2] F32[2] F32[2]"),
    row(SplitModulelist(-1), "F32[2,3,2] -> F32[2,3] F32[2,3]"),
    row(SplitRuns(0, 1, (1, 2)), "F32[2,3] F32[1,3] -> F32[1] F32[1] F32[1] F32[2] F32[2] F32[2]"),
    row(SplitRuns(2, -2, (3,)), "F32[2,3,1] F32[2,3,2] -> F32[2,3] F32[2,3] F32[2,3]"),
    row(Transpose(), "F32[2,5] -> F32[5,2]"),
    row(Transpose(-1, 0), "F32[2,3,4] -> F32[4,3,2]"),
    row(Transpose(1, 1), "F32[2,3] -> F32[2,3]"),
    row(UnpadVocab(3), "F32[5,2] -> F32[3,2]"),
    row(UnpadVocab(4), "F16[4] -> F16[4]"),
]

REFUSED = [
    (Cast(DType.F16), "I32[2]", "cast of I32[2] to F16: only F16, BF16, F32 and F64 are cast by value"),
    (Cast(DType.U8), "F32[2]", "cast of F32[2] to U8: only F16, BF16, F32 and F64 are cast by value"),
    (Cast(DType.F32), "F8_E4M3[2]", "cast of F8_E4M3[2] to F32: only F16, BF16, F32 and F64 are cast by value"),
    (Cast(DType.BF16), "F32[2] F32[2]", "Cast(dtype=<DType.BF16: 'BF16'>) takes one tensor, not 2"),
    (
        Chunk(0, 3),
        "F32[8,2]",
        "Chunk(dim=0, parts=3) of F32[8,2]: 8 is not a multiple of 3; use Split for unequal parts",
    ),
    (
        Chunk(-1, 4),
        "F32[2,6]",
        "Chunk(dim=-1, parts=4) of F32[2,6]: 6 is not a multiple of 4; use Split for unequal parts",
    ),
    (Chunk(0), "F32[8]", "Chunk(dim=0, parts=None): the number of parts is not known"),
    (Chunk(0, 0), "F32[8]", "Chunk(dim=0, parts=0): the number of parts is not known"),
    (Chunk(2, 2), "F32[8,2]", "Chunk(dim=2, parts=2): dim 2 of a tensor with 2 dims"),
    (Concatenate(0), "", "Concatenate(dim=0) of no tensors"),
    (Concatenate(0), "F32[]", "Concatenate(dim=0): dim 0 of a tensor with 0 dims"),
    (
        Concatenate(0),
        "F32[2,3] F32[2,4]",
        "Concatenate(dim=0): tensor 1 is F32[2,4], tensor 0 is F32[2,3]; only dim 0 may differ",
    ),
    (
        Concatenate(-1),
        "F32[2,3] F32[2,3] F16[2,3]",
        "Concatenate(dim=-1): tensor 2 is F16[2,3], tensor 0 is F32[2,3]; only dim 1 may differ",
    ),
    (
        Concatenate(0),
        "F32[2,3] F32[2,3,1]",
        "Concatenate(dim=0): tensor 1 is F32[2,3,1], tensor 0 is F32[2,3]; only dim 0 may differ",
    ),
    (
        Conv3dToLinear(3, (2, 2, 2)),
        "F32[4,3,2,2,1]",
        "Conv3dToLinear(in_channels=3, kernel_size=(2, 2, 2)) of F32[4,3,2,2,1]: not the weight of such a convolution",
    ),
    (
        Conv3dToLinear(3, (2, 2, 2)),
        "F32[4,24]",
        "Conv3dToLinear(in_channels=3, kernel_size=(2, 2, 2)) of F32[4,24]: not the weight of such a convolution",
    ),
    (FuseRuns(), "F32[2]", f"{FuseRuns()} of 1 tensors: they must be lists of equal length"),
    (
        FuseRuns(0, 1, 2, (2,)),
        "F32[2] F32[2] F32[2]",
        f"{FuseRuns(0, 1, 2, (2,))} of 3 tensors: they must be lists of equal length",
    ),
    (
        FuseRuns(0, 1, 1, (2, 1)),
        "F32[2] F32[2]",
        f"{FuseRuns(0, 1, 1, (2, 1))}: runs must be of one or more, and add up to the 2 of a list",
    ),
    (
        FuseRuns(0, 1, 1, (2, 0)),
        "F32[2] F32[2]",
        f"{FuseRuns(0, 1, 1, (2, 0))}: runs must be of one or more, and add up to the 2 of a list",
    ),
    (
        FuseRuns(0, 0, 1, (2,)),
        "F32[2] F32[2]",
        f"{FuseRuns(0, 0, 1, (2,))}: stacks are joined along another dim than they are stacked on",
    ),
    (
        FuseRuns(0, 1, 1, (2,)),
        "F32[2] F32[3]",
        "MergeModulelist(dim=0): number 1 is F32[3], number 0 is F32[2]; all must be alike",
    ),
    (
        FuseRuns(0, 1, 2, (1,)),
        "F32[2,3] F32[2,4]",
        f"{FuseRuns(0, 1, 2, (1,))}: list 1 is F32[1,2,4], list 0 is F32[1,2,3]; only dim 1 may differ",
    ),
    (Interleave(0), "F32[5]", "Interleave(dim=0, inverse=False) of F32[5]: dim 0 has 5, which is odd"),
    (Interleave(1), "F32[4]", "Interleave(dim=1, inverse=False): dim 1 of a tensor with 1 dims"),
    (
        LinearToConv3d(3, (2, 2, 2)),
        "F32[4,25]",
        "LinearToConv3d(in_channels=3, kernel_size=(2, 2, 2)) of F32[4,25]: the second dim must be 24",
    ),
    (
        MergeMessageQueries(),
        "F32[4,3]",
        f"{MergeMessageQueries()} of F32[4,3]: it takes two [2 * layers, size] of one type",
    ),
    (
        MergeMessageQueries(),
        "F32[3,3] F32[3,3]",
        f"{MergeMessageQueries()} of F32[3,3], F32[3,3]: it takes two [2 * layers, size] of one type",
    ),
    (MergeMessageQueries(True), "F32[2,3,3]", f"{MergeMessageQueries(True)} of F32[2,3,3]: it takes [layers, 4, size]"),
    (MergeModulelist(0), "", "MergeModulelist(dim=0) of no tensors"),
    (
        MergeModulelist(0),
        "F32[2] F32[2] F32[3]",
        "MergeModulelist(dim=0): number 2 is F32[3], number 0 is F32[2]; all must be alike",
    ),
    (
        MergeModulelist(0),
        "F32[2] BF16[2]",
        "MergeModulelist(dim=0): number 1 is BF16[2], number 0 is F32[2]; all must be alike",
    ),
    (MergeModulelist(2), "F32[2]", "MergeModulelist(dim=2): dim 2 of a tensor with 2 dims"),
    *(
        (FoldBatchNorm(), text, f"FoldBatchNorm(eps=1e-05): {text.replace(' ', ', ')}: {reason}")
        for text, reason in (
            ("F32[4,3] F32[4] F32[4] F32[4]", "not a convolution's weight and what a batch normalisation has"),
            ("F32[] F32[] F32[] F32[] F32[]", "not a convolution's weight and what a batch normalisation has"),
            (
                "F32[2,2] F32[2] F32[2] F32[2] F32[2] I64[] F32[2]",
                "not a convolution's weight and what a batch normalisation has",
            ),
            (
                "F32[2,2] F32[2] F32[2] F32[2] F32[2] I64[] I64[]",
                "not a convolution's weight and what a batch normalisation has",
            ),
            ("F32[4,3] F32[4] F32[4] F32[4] F32[3]", "the normalisation is not of the 4 channels that come in"),
            ("F32[4,3] F32[4] F32[4] F32[4] I32[4]", "only F16, BF16, F32 and F64 are folded"),
        )
    ),
    (
        FoldBatchNorm(1.5),
        "F32[1,1] F32[1] F32[1] F32[1] F32[1]",
        "FoldBatchNorm(eps=1.5): options {'eps': '1.5'}: eps, a text from 0 to below 1, and nothing else",
    ),
    (Permute((0, 0)), "F32[2,3]", "Permute(order=(0, 0)) of F32[2,3]: the order must name each of its 2 dims once"),
    (Permute((1, 0)), "F32[2]", "Permute(order=(1, 0)) of F32[2]: the order must name each of its 1 dims once"),
    *(
        (
            PermuteForRope(head_dim=size),
            text,
            (
                f"PermuteForRope(subconfig_key=None, permute_layer_names=None, inverse=False, head_dim={size}) of {text}"
                f": rows must be whole heads of {size} (an even number), in a tensor of 1 or 2 dims"
            ),
        )
        for size, text in (
            (4, "F32[6,2]"),
            (3, "F32[6,2]"),
            (0, "F32[6,2]"),
            (-2, "F32[6]"),
            (2, "F32[2,2,2]"),
            (2, "F32[]"),
        )
    ),
    (
        PermuteForRope(),
        "F32[6]",
        (
            "PermuteForRope(subconfig_key=None, permute_layer_names=None, inverse=False, head_dim=None): "
            "the size of a head is not known"
        ),
    ),
    (
        PlainFloats(),
        "F8_E4M3[2]",
        "PlainFloats() of F8_E4M3[2]: these are quantised values, which mean nothing without their scales; dequantise the checkpoint first",
    ),
    (Reshape((4, 2)), "F32[2,3]", "Reshape(shape=(4, 2)) of F32[2,3]: 6 elements are not 8"),
    (Reshape((4, -1)), "F32[2,3]", "Reshape(shape=(4, -1)) of F32[2,3]: 6 elements do not divide by 4"),
    (Reshape((0, -1)), "F32[0,3]", "Reshape(shape=(0, -1)) of F32[0,3]: 0 elements do not divide by 0"),
    (Reshape((-1, -1)), "F32[4]", "Reshape(shape=(-1, -1)): sizes are counts, and at most one may be -1"),
    (Reshape((-2, -3)), "F32[6]", "Reshape(shape=(-2, -3)): sizes are counts, and at most one may be -1"),
    (Slice(0, 1, 5), "F32[4]", "Slice(dim=0, low=1, high=5) of F32[4]: dim 0 has 4"),
    (Slice(0, 3, 2), "F32[4]", "Slice(dim=0, low=3, high=2) of F32[4]: dim 0 has 4"),
    (Slice(0, -1, 2), "F32[4]", "Slice(dim=0, low=-1, high=2) of F32[4]: dim 0 has 4"),
    (
        Split(0, (4, 2)),
        "F32[8]",
        "Split(dim=0, sizes=(4, 2)) of F32[8]: sizes are counts and must add up to 8, not 6",
    ),
    (
        Split(0, (9, -1)),
        "F32[8]",
        "Split(dim=0, sizes=(9, -1)) of F32[8]: sizes are counts and must add up to 8, not 8",
    ),
    (Split(0), "F32[8]", "Split(dim=0, sizes=None) of F32[8]: sizes are counts and must add up to 8, not 0"),
    (SplitModulelist(0), "F32[]", "SplitModulelist(dim=0): dim 0 of a tensor with 0 dims"),
    (SplitRuns(), "", f"{SplitRuns()} of no tensors"),
    (
        SplitRuns(),
        "F32[2,3]",
        f"{SplitRuns()} of F32[2,3]: widths are along another dim than the list, and must fill it",
    ),
    (
        SplitRuns(0, 1, (1, 1)),
        "F32[2,3]",
        f"{SplitRuns(0, 1, (1, 1))} of F32[2,3]: widths are along another dim than the list, and must fill it",
    ),
    (
        SplitRuns(1, 1, (3,)),
        "F32[2,3]",
        f"{SplitRuns(1, 1, (3,))} of F32[2,3]: widths are along another dim than the list, and must fill it",
    ),
    (
        SplitRuns(0, 1, (3,)),
        "F32[2,3] F32[1,4]",
        f"{SplitRuns(0, 1, (3,))}: run 1 is F32[1,4], run 0 is F32[2,3]; only dim 0 may differ",
    ),
    (Transpose(0, 2), "F32[2,3]", "Transpose(dim0=0, dim1=2, check_dims=False): dim 2 of a tensor with 2 dims"),
    (
        UnpadVocab(),
        "F32[4]",
        "UnpadVocab(rows=None): neither the config (unpadded_vocab_size) nor a signature says how many rows are words",
    ),
    (UnpadVocab(5), "F32[4,2]", "UnpadVocab(rows=5) of F32[4,2]: it has not so many rows"),
]


def stored(*texts: str) -> tuple[dict[str, Entry], list[Value]]:
    """Stored tensors of these types, side by side in a file, and their values."""
    entries: dict[str, Entry] = {}
    offset = 0
    for number, text in enumerate(texts):
        kind = tensor_type(text)
        entries[f"t{number}"] = Entry(f"t{number}", kind, "f", offset)
        offset += kind.nbytes
    return entries, [apply(Stored(entry.name, entry.type))[0] for entry in entries.values()]


def numbered(entries: dict[str, Entry]) -> tuple[dict[str, torch.Tensor], dict[str | int, Numbers]]:
    """Each element a number of its own, as tensors of the stored types and flat; BF16 holds them up to 256."""
    tensors: dict[str, torch.Tensor] = {}
    flat: dict[str | int, Numbers] = {}
    first = 0
    for entry in entries.values():
        storage = torch.arange(first, first + storage_numel(entry))
        first += storage_numel(entry)
        tensors[entry.name] = stored_tensor(entry, storage.to(torch_dtype(entry.type.dtype)))
        flat[entry.name] = storage.numpy()
    assert first <= 256
    return tensors, flat


def whole_numbers(tensor: torch.Tensor) -> Numbers:
    found: Numbers = tensor.to(torch.int64).numpy()
    return found


def test_every_exported_op_has_a_row_and_a_refusal() -> None:
    exported = {getattr(ops, name) for name in ops.__all__}
    assert {type(row.op) for row in ROWS} == exported
    assert {type(op) for op, _, _ in REFUSED} == exported


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_types_and_elements(row: Row) -> None:
    entries, args = stored(*row.args)
    tensors, flat = numbered(entries)
    results = apply(row.op, *args)
    assert [str(value.type) for value in results] == list(row.results)
    lowering = Lowering(entries)
    for value in results:
        layout = lowering.lower(value)
        if isinstance(row.op, ComputeOp):  # its values: tests/compiler/test_computes.py
            made = evaluate(value, tensors)
            assert str(TensorType(tuple(made.shape), DType(value.type.dtype))) == str(value.type)
            assert layout == pieces.whole(
                pieces.Source(lowering.calculations[0].outputs[value.index]), value.type.shape
            )
            continue
        assert layout.shape == value.type.shape
        assert np.array_equal(elements(layout, flat), whole_numbers(evaluate(value, tensors)))


@pytest.mark.parametrize(("op", "args", "message"), REFUSED)
def test_refusals_say_what_and_with_which_numbers(op: Op, args: str, message: str) -> None:
    _, values = stored(*args.split())
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        apply(op, *values)


def undone(results: tuple[Value, ...]) -> tuple[Value, ...]:
    """The arguments of the node of `results`, made again by the inverse of its op."""
    node = results[0].node
    return apply(node.op.reverse(*(arg.type for arg in node.args)), *results)


def is_undoable(node: Node) -> bool:
    """Whether the inverse gives all back: a slice of a part gives up the rest, an empty list has no type."""
    lossy = isinstance(node.op, Slice | UnpadVocab) and node.types[0] != node.args[0].type
    return not lossy and bool(node.types)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_inverse_undoes_the_op(row: Row) -> None:
    entries, args = stored(*row.args)
    tensors, flat = numbered(entries)
    results = apply(row.op, *args)
    if isinstance(row.op, ComputeOp):
        with pytest.raises(ShapeError, match="makes new values"):
            undone(results)
        return
    if not is_undoable(results[0].node):
        with pytest.raises(ShapeError, match=r"gives \d+ of \d+ positions up: it has no inverse$"):
            undone(results)
        return
    lowering = Lowering(entries)
    for back, arg in zip(undone(results), args, strict=True):
        assert back.type == arg.type
        assert torch.equal(evaluate(back, tensors), evaluate(arg, tensors))
        assert np.array_equal(elements(lowering.lower(back), flat), elements(lowering.lower(arg), flat))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs((DType.F32, DType.F64)))
def test_the_inverse_undoes_any_op_anywhere_in_a_chain(graph: Graph) -> None:
    tensors = {
        name: stored_tensor(entry, torch.arange(storage_numel(entry)).to(torch_dtype(entry.type.dtype)))
        for name, entry in graph.entries.items()
    }
    numbers: dict[str | int, Numbers] = {name: np.arange(storage_numel(entry)) for name, entry in graph.entries.items()}
    lowering = Lowering(graph.entries)
    for value in graph.values:
        if isinstance(value.node.op, Stored) or not is_undoable(value.node):
            continue
        results = tuple(Value(value.node, index) for index in range(len(value.node.types)))
        for back, arg in zip(undone(results), value.node.args, strict=True):
            assert back.type == arg.type
            assert torch.equal(evaluate(back, tensors), evaluate(arg, tensors))
            assert np.array_equal(elements(lowering.lower(back), numbers), elements(lowering.lower(arg), numbers))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ops_are_frozen_values(row: Row) -> None:
    assert isinstance(row.op, Op)
    assert row.op in {row.op}
    for part in fields(row.op):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(row.op, part.name, None)


# What an op takes from its surroundings.


def binding(*targets: str | None, names: tuple[str, ...] = ("w",), config: dict[str, object] | None = None) -> Binding:
    types = tuple(None if text is None else tensor_type(text) for text in targets)
    return Binding(names, len(types), types, Config(tuple((config or {}).items())))


def bound(op: Op, context: Binding, *args: str) -> Op:
    return op.bind(context, *map(tensor_type, args))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_chunk_makes_one_part_for_each_target(count: int) -> None:
    assert bound(Chunk(1), binding(*[None] * count), "F32[2,6]") == Chunk(1, count)
    assert bound(Chunk(1, 2), binding(*[None] * count), "F32[2,6]") == Chunk(1, 2)


@pytest.mark.parametrize(("dim", "sizes"), [(0, (4, 2, 2)), (-1, (1, 5)), (1, (0, 3))])
def test_split_takes_the_sizes_of_the_declared_targets(dim: int, sizes: tuple[int, ...]) -> None:
    shapes = [f"F32[{size},7]" if dim == 0 else f"F32[7,{size}]" for size in sizes]
    assert bound(Split(dim), binding(*shapes), "F32[8,8]") == Split(dim, sizes)


def test_split_without_sizes_and_without_targets_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"^Split\(dim=0, sizes=None\): sizes are not given, and no signature"):
        bound(Split(0), binding("F32[4,2]", None), "F32[8,2]")


@pytest.mark.parametrize(("stored_shape", "wanted"), [("2,3,5", "2,5,3"), ("2,5,3", "2,5,3"), ("7,1,4", "7,4,1")])
def test_transpose_if_needed_ends_in_the_declared_shape(stored_shape: str, wanted: str) -> None:  # cases B24
    op = bound(Transpose(1, 2, check_dims=True), binding(f"F32[{wanted}]"), f"F32[{stored_shape}]")
    entries, (arg,) = stored(f"F32[{stored_shape}]")
    (value,) = apply(op, arg)
    assert str(value.type) == f"F32[{wanted}]"
    tensors, flat = numbered(entries)
    source = tensors["t0"]
    expected = source if stored_shape == wanted else source.transpose(1, 2)
    assert torch.equal(evaluate(value, tensors), expected)
    assert np.array_equal(elements(Lowering(entries).lower(value), flat), whole_numbers(expected))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_transpose_if_needed_of_a_square_is_refused(size: int) -> None:  # cases B24
    text = f"F32[2,{size},{size}]"
    with pytest.raises(ShapeError, match=r"both orders have this shape; say which it is with check_dims=False$"):
        bound(Transpose(1, 2, check_dims=True), binding(text), text)
    assert bound(Transpose(1, 2), binding(text), text) == Transpose(1, 2)  # declared, so no guess


def test_transpose_if_needed_without_a_signature_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"no signature declares the shape to compare with$"):
        bound(Transpose(check_dims=True), binding(None), "F32[2,3]")


@pytest.mark.parametrize(
    ("op", "config", "size"),
    [
        (PermuteForRope(), {"head_dim": 6, "hidden_size": 64, "num_attention_heads": 4}, 6),
        (PermuteForRope(), {"hidden_size": 64, "num_attention_heads": 4}, 16),
        (PermuteForRope(subconfig_key="vision"), {"head_dim": 6, "vision": {"head_dim": 8}}, 8),
        (
            PermuteForRope(subconfig_key="vision"),
            {"head_dim": 6, "vision": {"hidden_size": 12, "num_attention_heads": 3}},
            4,
        ),
        (PermuteForRope(head_dim=2), {"head_dim": 6}, 2),
    ],
)
def test_the_size_of_a_head_comes_from_the_config(op: PermuteForRope, config: dict[str, object], size: int) -> None:
    found = bound(op, binding("F32[96]", config=config), "F32[96]")
    assert isinstance(found, PermuteForRope)
    assert found.head_dim == size


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_size": 64},
        {"num_attention_heads": 4},
        {"hidden_size": 65, "num_attention_heads": 4},
        {"hidden_size": 64, "num_attention_heads": 0},
        {"head_dim": "64"},
        {"head_dim": True},
        {"text_config": {"head_dim": 64}},
    ],
)
def test_an_unknown_size_of_a_head_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ShapeError, match=r"the config has neither head_dim nor hidden_size .* pass head_dim$"):
        bound(PermuteForRope(), binding("F32[64]", config=config), "F32[64]")


@pytest.mark.parametrize(
    ("name", "permuted"),
    [
        ("attn.q_proj.weight", True),
        ("q_proj", True),
        ("attn.q_proj_extra.weight", False),
        ("attn.my_q_proj.weight", False),
        ("attn.v_proj.weight", False),
        ("attn.k_proj.bias", True),
    ],
)
def test_only_named_layers_are_permuted_by_whole_component(name: str, permuted: bool) -> None:
    op = PermuteForRope(permute_layer_names=("q_proj", "k_proj"), head_dim=4)
    found = bound(op, binding("F32[8]", names=(name,)), "F32[8]")
    assert found == (op if permuted else Reshape((8,)))


@pytest.mark.parametrize(
    ("config", "targets", "rows"),
    [
        ({"unpadded_vocab_size": 3}, ("F32[4,2]",), 3),
        ({"unpadded_vocab_size": 5, "text_config": {"unpadded_vocab_size": 2}}, (None,), 2),
        ({"text_config": {"vocab_size": 8}}, ("F32[4,2]",), 4),
        ({"unpadded_vocab_size": "3"}, (None,), None),
    ],
)
def test_the_number_of_words_comes_from_the_config_or_the_target(
    config: dict[str, object], targets: tuple[str | None, ...], rows: int | None
) -> None:
    assert bound(UnpadVocab(), binding(*targets, config=config), "F32[6,2]") == UnpadVocab(rows)


@pytest.mark.parametrize(
    ("targets", "runs"),
    [((None, None), (3, 2)), (("F32[1,8,3]", "F32[4,8,3]"), (1, 4)), (("F32[1,8,3]", None), (3, 2)), ((None,), (5,))],
)
def test_runs_are_those_of_the_declared_targets_else_equal(
    targets: tuple[str | None, ...], runs: tuple[int, ...]
) -> None:
    found = bound(FuseRuns(), binding(*targets, names=("gate.*", "up.*")), *["F32[4,3]"] * 10)
    assert found == FuseRuns(0, 1, 2, runs)


def test_parts_of_fused_lists_are_equal_unless_told() -> None:
    assert bound(SplitRuns(), binding(None, None), "F32[2,6,3]") == SplitRuns(0, 1, (3, 3))
    with pytest.raises(ShapeError, match="dim 1 does not divide by 4"):
        bound(SplitRuns(), binding(*[None] * 4), "F32[2,6,3]")


# Cases B48, and the published layouts that the ops are named after.


def made(op: Op, *args: str) -> list[list[int]]:
    entries, values = stored(*args)
    tensors, flat = numbered(entries)
    lowering = Lowering(entries)
    results = apply(op, *values)
    found = [elements(lowering.lower(value), flat).flatten().tolist() for value in results]
    assert found == [whole_numbers(evaluate(value, tensors)).flatten().tolist() for value in results]
    return found


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("columns", [None, 1, 3])
def test_rope_pairs_become_halves_in_each_head(heads: int, size: int, columns: int | None) -> None:
    shape = f"F32[{heads * size}]" if columns is None else f"F32[{heads * size},{columns}]"
    rows = [head * size + at for head in range(heads) for at in (*range(0, size, 2), *range(1, size, 2))]
    width = columns or 1
    wanted = [row * width + column for row in rows for column in range(width)]
    assert made(PermuteForRope(head_dim=size), shape) == [wanted]


def test_keys_with_fewer_heads_than_queries_are_permuted_by_their_own_heads() -> None:
    op = bound(PermuteForRope(), binding("F32[8,1]", config={"hidden_size": 16, "num_attention_heads": 4}), "F32[8,1]")
    assert made(op, "F32[8,1]") == [[0, 2, 1, 3, 4, 6, 5, 7]]
    assert made(op, "F32[16,1]") == [[0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]]


def test_unequal_parts_are_split_by_size() -> None:
    assert made(Split(0, (4, 2, 2)), "F32[8,2]") == [list(range(8)), list(range(8, 12)), list(range(12, 16))]


def test_interleaved_pairs_come_apart() -> None:
    assert made(Interleave(0), "F32[6]") == [[0, 2, 4, 1, 3, 5]]
    assert made(Interleave(0, inverse=True), "F32[6]") == [[0, 3, 1, 4, 2, 5]]
    assert made(Interleave(1), "F32[2,4]") == [[0, 2, 1, 3, 4, 6, 5, 7]]


def test_one_list_of_experts_becomes_one_tensor_a_modality() -> None:
    """Gate and up of three experts, of which the first two are for text: what one is beside the other, by hand."""
    gate, up = ([[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]])
    found = made(FuseRuns(0, 1, 2, (2, 1)), *["F32[1,2]"] * 6)
    assert found == [[*gate[0], *up[0], *gate[1], *up[1]], [*gate[2], *up[2]]]


def test_queries_of_a_layer_lie_in_the_order_query_key_value_mlp() -> None:
    """Rows of two layers: query and mlp are 0 to 3, key and value 4 to 7."""
    assert made(MergeMessageQueries(), "F32[4,1]", "F32[4,1]") == [[0, 4, 5, 1, 2, 6, 7, 3]]


@given(st.data())
def test_any_lists_are_fused_and_split_again(data: st.DataObject) -> None:
    runs = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    widths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    stack, join = data.draw(st.permutations([0, 1, 2]))[:2]
    other = data.draw(st.integers(1, 2))
    at = join - (join > stack)
    kinds = [f"F64[{width},{other}]" if at == 0 else f"F64[{other},{width}]" for width in widths]
    entries, args = stored(*(kind for kind in kinds for _ in range(sum(runs))))
    tensors, flat = numbered(entries)
    results = apply(FuseRuns(stack - 3, join, len(widths), runs), *args)
    lowering = Lowering(entries)
    for back, arg in zip(undone(results), args, strict=True):
        assert back.type == arg.type
        assert torch.equal(evaluate(back, tensors), evaluate(arg, tensors))
        assert np.array_equal(elements(lowering.lower(back), flat), elements(lowering.lower(arg), flat))


# The reference itself.


@dataclass(frozen=True, slots=True)
class Reversed(Transpose):
    """A user's op: both dims backwards (there is no piece for it; it is computed on whole tensors only)."""

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return args


@dataclass(frozen=True, slots=True)
class Unruled:
    """A user's op that nobody has given a rule."""

    spread = "each"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return args


def test_a_users_op_needs_a_rule_and_uses_it() -> None:
    entries, (arg,) = stored("F32[2,3]")
    tensors, _ = numbered(entries)
    (unruled,) = apply(Unruled(), arg)  # type: ignore[arg-type]
    with pytest.raises(ReferenceFault, match=r"Unruled has no rule .* with .*register_reference\(Unruled, rule\)$"):
        evaluate(unruled, tensors)
    register_reference(Reversed, lambda op, tensor: tensor.flip(0, 1))
    assert evaluate(apply(Reversed(), arg)[0], tensors).flatten().tolist() == [5, 4, 3, 2, 1, 0]


def test_the_reference_does_not_trust_the_type_rule() -> None:
    entries, (arg,) = stored("F32[2,3]")
    node = Node(Transpose(), (arg,), (tensor_type("F32[2,3]"),))
    with pytest.raises(ReferenceFault, match=r"made torch.float32\[3, 2\], its type rule says F32\[2,3\]$"):
        evaluate(Value(node), numbered(entries)[0])


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_a_stored_tensor_of_another_type_is_refused(tensor: torch.Tensor) -> None:
    _, (arg,) = stored("F32[2,3]")
    with pytest.raises(ReferenceFault, match=r"^t0 is torch.float\d\d\[\d, \d\], the graph says F32\[2,3\]$"):
        evaluate(arg, {"t0": tensor})


@pytest.mark.parametrize("dtype", list(DType))
def test_the_reference_moves_elements_of_every_dtype(dtype: DType) -> None:
    kind = TensorType((4, 8), dtype)
    shape, held = torch_layout(kind)
    halves = [torch.arange(start, start + kind.nbytes, dtype=torch.uint8) for start in (0, 100)]
    if dtype is DType.BOOL:
        halves = [half % 2 for half in halves]
    tensors = {name: half.view(held).reshape(shape) for name, half in zip("ab", halves, strict=True)}
    (joined,) = apply(Concatenate(0), *(apply(Stored(name, kind))[0] for name in "ab"))
    (rows,) = apply(Slice(0, 2, 6), joined)
    found = evaluate(rows, tensors)
    assert found.dtype == held
    row = kind.nbytes // 4
    wanted = torch.cat(halves)[2 * row : 6 * row]
    assert torch.equal(found.contiguous().flatten().view(torch.uint8), wanted)


@pytest.mark.parametrize(("dtype", "columns"), [(DType.F4, [1, 3]), (DType.F6_E2M3, [2, 0])])
def test_packed_elements_move_one_by_one(dtype: DType, columns: list[int]) -> None:
    """Codes written out by hand: element 0 is in the lowest bits (torch's float4_e2m1fn_x2 holds pairs so)."""
    codes = [[1, 2, 3, 4], [5, 6, 7, 8]]
    kind = TensorType((2, 4), dtype)
    bits = sum(code << (dtype.bits * at) for at, code in enumerate(codes[0] + codes[1]))
    shape, held = torch_layout(kind)
    tensor = torch.tensor(list(bits.to_bytes(kind.nbytes, "little")), dtype=torch.uint8).view(held).reshape(shape)
    (value,) = apply(Stored("q", kind))
    parts = [apply(Slice(1, at, at + 1), value)[0] for at in columns]
    (joined,) = apply(Concatenate(1), *parts, *parts)
    found = evaluate(joined, {"q": tensor}).contiguous().flatten().view(torch.uint8).tolist()
    wanted = [row[at] for row in codes for at in columns * 2]
    packed = sum(code << (dtype.bits * at) for at, code in enumerate(wanted))
    assert found == list(packed.to_bytes(len(found), "little"))


def test_a_shared_node_is_computed_once() -> None:
    calls: list[int] = []

    def rule(op: Reversed, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor.flip(0, 1)

    register_reference(Reversed, rule)
    entries, (arg,) = stored("F32[2,2]")
    (value,) = apply(Reversed(), arg)
    for _ in range(12):
        (value,) = apply(Slice(0, 0, 2), *apply(Concatenate(0), value, value))
    evaluate(value, numbered(entries)[0])
    assert len(calls) == 1
