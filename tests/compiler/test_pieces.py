"""Pieces and their lowering, against torch on whole tensors.

Compared: the source element of every element of every layout, for random chains of piece functions and of ops
(`reference.evaluate`); and, byte for byte, what the copies of whole sections write, carried out by the few lines of
`by_hand.run_section`, which shares no code with the runtime. Every section must also be proved by `check_section`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations, product
from math import prod

import numpy as np
import pytest
import torch
from by_hand import Numbers, elements, raw, run_section
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import (
    FILE,
    FLOATS,
    Graph,
    cuts,
    factorings,
    graphs,
    shapes,
    storage_numel,
    stored_tensor,
    unlike_values,
)

from loadplan.compiler import pieces
from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Stored, Value, apply
from loadplan.compiler.lower_graph import Chains, Lowering, lower_rank
from loadplan.compiler.ops import Cast, Concatenate, Interleave, Reshape, Slice, Transpose
from loadplan.compiler.pieces import Fragmented, Layout, Source
from loadplan.compiler.problem import CompileError
from loadplan.compiler.reference import evaluate
from loadplan.runtime.check_plan import check_head, check_section
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Head, PlanFile, PlanTensor
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype

slow_draws = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_graph(graph: Graph, tensors: Sequence[PlanTensor], values: Sequence[Value], ranks: int) -> int:
    """Lower, prove and run `values` for every rank, against `reference`; returns the number of temporaries."""
    file = bytearray(b"\x5a" * graph.nbytes)
    stored: dict[str, torch.Tensor] = {}
    for index, entry in enumerate(graph.entries.values()):
        storage = unlike_values(index, storage_numel(entry), entry.type.dtype)
        file[entry.offset : entry.offset + storage.nbytes] = raw(storage)
        stored[entry.name] = stored_tensor(entry, storage)
    lowering, chains = Lowering(graph.entries), Chains()
    layouts = [(tensor, lowering.lower(value)) for tensor, value in zip(tensors, values, strict=True)]
    sections = [lower_rank(rank, layouts, lowering, graph.entries, {FILE: 0}, chains) for rank in range(ranks)]
    files = (PlanFile(FILE, len(file), "safetensors", (), ""),)
    head = Head(files, tuple(tensors), (), (), tuple(chains.found), ranks)
    assert list(check_head(head)) == []
    for rank, section in enumerate(sections):
        assert list(check_section(head, section, rank)) == []
        found = run_section(head, section, rank, bytes(file))
        for tensor, value, made in zip(tensors, values, found, strict=True):
            assert made == raw(local_part(evaluate(value, stored), tensor, rank))
    return sum(len(section.temporaries) for section in sections)


def local_part(whole: torch.Tensor, tensor: PlanTensor, rank: int) -> torch.Tensor:
    """What `rank` holds of `whole`, cut by torch."""
    if tensor.shard_dim < 0:
        return whole
    parts = [whole.narrow(tensor.shard_dim, low, high - low) for low, high in tensor.intervals[rank]]
    return torch.cat(parts, tensor.shard_dim) if parts else whole.narrow(tensor.shard_dim, 0, 0)


Step = tuple[str, tuple[int, ...]]


@st.composite
def piece_chains(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Step]]:
    """Shape and strides of a source, and piece functions with their arguments that fit one after the other."""
    first = shape = draw(shapes())
    strides = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    chain: list[Step] = []
    for _ in range(draw(st.integers(1, 8))):
        names = ["reshape", "stack"] + ["permute", "narrow", "narrow", "concatenate"] * bool(shape)
        name = draw(st.sampled_from(names))
        dim = draw(st.integers(0, max(len(shape) - (name != "stack"), 0)))
        if name == "reshape":
            shape = args = draw(factorings(prod(shape)))
        elif name == "permute":
            args = tuple(draw(st.permutations(range(len(shape)))))
            shape = tuple(shape[at] for at in args)
        elif name == "narrow":
            low, high = sorted((draw(st.integers(0, shape[dim])), draw(st.integers(0, shape[dim]))))
            args, shape = (dim, low, high), (*shape[:dim], high - low, *shape[dim + 1 :])
        else:  # joined with itself, and for the concatenation with what it was before
            count = draw(st.integers(1, 2))
            args = (dim, count)
            if name == "stack":
                shape = (*shape[:dim], count, *shape[dim:])
            else:
                shape = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
        chain.append((name, args))
    return first, strides, chain


def step_pieces(layout: Layout, name: str, args: tuple[int, ...]) -> Layout:
    match name:
        case "reshape":
            return pieces.reshape(layout, args)
        case "permute":
            return pieces.permute(layout, args)
        case "narrow":
            return pieces.narrow(layout, *args)
        case "stack":
            return pieces.stack([layout] * args[1], args[0])
        case _:
            return pieces.concatenate([layout] * args[1], args[0])


def step_torch(tensor: torch.Tensor, name: str, args: tuple[int, ...]) -> torch.Tensor:
    match name:
        case "reshape":
            return tensor.reshape(args)
        case "permute":
            return tensor.permute(args)
        case "narrow":
            dim, low, high = args
            return tensor.narrow(dim, low, high - low)
        case "stack":
            return torch.stack([tensor] * args[1], args[0])
        case _:
            return torch.cat([tensor] * args[1], args[0])


@settings(max_examples=1500, deadline=None, suppress_health_check=slow_draws)
@given(piece_chains())
def test_piece_functions_place_every_element_as_torch_does(
    chain: tuple[tuple[int, ...], tuple[int, ...], list[Step]],
) -> None:
    shape, strides, steps = chain
    storage = torch.arange(1 + sum((max(size, 1) - 1) * step for size, step in zip(shape, strides, strict=True)))
    layout, tensor = pieces.whole(Source("t"), shape, strides), storage.as_strided(shape, strides)
    for name, args in steps:
        layout, tensor = step_pieces(layout, name, args), step_torch(tensor, name, args)
        assert layout.shape == tuple(tensor.shape)
        assert np.array_equal(elements(layout, {"t": storage.numpy()}), tensor.numpy()), (name, args)


@settings(max_examples=900, deadline=None, suppress_health_check=slow_draws)
@given(graphs((DType.F32, DType.F64)))
def test_ops_place_every_element_as_torch_does(graph: Graph) -> None:
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str | int, Numbers] = {}
    for index, entry in enumerate(graph.entries.values()):
        storage = torch.arange(storage_numel(entry)) + 10_000 * index  # exact in both dtypes
        numbers[entry.name] = storage.numpy()
        stored[entry.name] = stored_tensor(entry, storage.to(torch_dtype(entry.type.dtype)))
    lowering = Lowering(graph.entries)
    for value in graph.values:
        layout = lowering.lower(value)
        assert layout.shape == value.type.shape
        assert {(piece.source.casts or (stored_dtype(graph, piece),))[-1] for piece in layout.pieces} <= {
            value.type.dtype
        }
        assert np.array_equal(elements(layout, numbers), evaluate(value, stored).to(torch.int64).numpy())
    assert lowering.temporaries == []


def stored_dtype(graph: Graph, piece: pieces.Piece) -> DType:
    return graph.entries[str(piece.source.key)].type.dtype


@st.composite
def sharded_graphs(
    draw: st.DrawFn, max_steps: int = 7, max_join: int = 3, fine: bool = False
) -> tuple[Graph, list[PlanTensor], list[Value], int]:
    """A graph, some of its values as targets, and how ranks cut them."""
    integers = draw(st.sampled_from((DType.U8, DType.I32, DType.I64)))
    graph = draw(graphs(draw(st.sampled_from((FLOATS, (integers,)))), max_steps, max_join, fine))
    ranks = draw(st.integers(1, 3))
    picked = [graph.values[-1], *draw(st.lists(st.sampled_from(graph.values), max_size=2))]
    tensors: list[PlanTensor] = []
    for number, value in enumerate(picked):
        dim = draw(st.integers(-1, len(value.type.shape) - 1))
        held = draw(cuts(value.type.shape[dim], ranks)) if dim >= 0 else ()
        tensors.append(PlanTensor(f"w{number}", value.type, dim, held))
    return graph, tensors, picked, ranks


@settings(max_examples=500, deadline=None, suppress_health_check=slow_draws)
@given(sharded_graphs())
def test_sections_write_what_torch_makes(case: tuple[Graph, list[PlanTensor], list[Value], int]) -> None:
    assert check_graph(*case) == 0


@settings(max_examples=800, deadline=None, suppress_health_check=slow_draws)
@given(sharded_graphs(max_steps=10, max_join=2, fine=True))
def test_sections_with_barriers_write_what_torch_makes(
    case: tuple[Graph, list[PlanTensor], list[Value], int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECES", 2)  # a join of two stored tensors still fits
        check_graph(*case)


def interleaved(size: int, times: int) -> tuple[Graph, Value]:
    """Rows of two tensors, put side by side and shuffled so that each turn doubles their pieces."""
    kind = TensorType((size, 3), DType.BF16)
    entries = {f"t{n}": Entry(f"t{n}", kind, FILE, n * kind.nbytes) for n in range(2)}
    (value,) = apply(Concatenate(0), *(apply(Stored(name, kind))[0] for name in entries))
    for turn in range(times):
        (value,) = apply(Slice(0, 1, value.type.shape[0] - 1), value)
        (value,) = apply(Interleave(turn % 2), value) if value.type.shape[turn % 2] % 2 == 0 else (value,)
        (value,) = apply(Transpose(0, 1), *apply(Reshape((-1, 2)), value))
        (value,) = apply(Reshape((value.type.shape[1], 2)), value)
    return Graph(entries, (value,)), value


@pytest.mark.parametrize("limit", [3, 5, 9])
def test_barriers_are_used_and_cut_to_the_rows_that_a_rank_reads(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, value = interleaved(16, 3)
    rows = value.type.shape[0]
    held = (((0, 2),), ((2, rows),))
    monkeypatch.setattr(pieces, "MAX_PIECES", limit)
    assert check_graph(graph, [PlanTensor("w", value.type, 0, held)], [value], 2) > 0
    lowering = Lowering(graph.entries)
    layouts = [(PlanTensor("w", value.type, 0, held), lowering.lower(value))]
    small, large = (
        sum(kind.nbytes for kind in lower_rank(rank, layouts, lowering, graph.entries, {FILE: 0}, Chains()).temporaries)
        for rank in range(2)
    )
    assert small < large <= sum(prod(t.layout.shape) * t.dtype.itemsize for t in lowering.temporaries)


@pytest.mark.parametrize("cast", [False, True])
def test_neighbours_of_different_sources_are_not_one_copy(cast: bool) -> None:
    """Elements 0 and 1 of one tensor, then 2 and 3 of another; or of the same one, but rounded on the way."""
    kind = TensorType((4,), DType.F32)
    graph_entries = {f"t{n}": Entry(f"t{n}", kind, FILE, n * kind.nbytes) for n in range(2)}
    first, second = (apply(Stored(name, kind))[0] for name in graph_entries)
    if cast:
        (second,) = apply(Cast(DType.F32), *apply(Cast(DType.F16), first))
    (value,) = apply(Concatenate(0), *apply(Slice(0, 0, 2), first), *apply(Slice(0, 2, 4), second))
    check_graph(Graph(graph_entries, (value,)), [PlanTensor("w", kind)], [value], 1)


def test_neighbours_of_one_source_are_one_copy() -> None:
    kind = TensorType((6, 2), DType.F32)
    entries = {"t": Entry("t", kind, FILE, 16)}
    (whole,) = apply(Stored("t", kind))
    parts = [apply(Slice(0, low, high), whole)[0] for low, high in ((0, 1), (1, 4), (4, 6))]
    layouts = [(PlanTensor("w", kind), Lowering(entries).lower(apply(Concatenate(0), *parts)[0]))]
    (copy,) = lower_rank(0, layouts, Lowering(entries), entries, {FILE: 0}, Chains()).copies
    assert (copy.src, copy.dst, copy.run, copy.loops) == (16, 0, 12, ())


def test_a_temporary_that_no_target_of_the_rank_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, value = interleaved(8, 2)
    plain = apply(Stored("t0", graph.entries["t0"].type))[0]
    monkeypatch.setattr(pieces, "MAX_PIECES", 3)
    lowering = Lowering(graph.entries)
    layouts = [
        (PlanTensor("a", plain.type), lowering.lower(plain)),
        (PlanTensor("b", value.type, 0, (((0, value.type.shape[0]),), ())), lowering.lower(value)),
    ]
    first, second = (lower_rank(rank, layouts, lowering, graph.entries, {FILE: 0}, Chains()) for rank in range(2))
    assert first.temporaries and second.temporaries == ()


@pytest.mark.parametrize("shape", [(6,), (2, 3), (4, 6), (3, 2, 4), (2, 3, 2, 2)])
def test_every_cut_of_every_reshaped_permutation(shape: tuple[int, ...]) -> None:
    """All of them, not a sample: permuted, folded to each shape of up to three dims, then each interval of each dim."""
    numel = prod(shape)
    storage = np.arange(numel)
    folds = [
        (a, b, numel // a // b)
        for a, b in product(range(1, numel + 1), repeat=2)
        if numel % a == 0 and numel // a % b == 0
    ]
    for order, fold in product(permutations(range(len(shape))), folds):
        layout = pieces.reshape(pieces.permute(pieces.whole(Source("t"), shape), order), fold)
        tensor = storage.reshape(shape).transpose(order).reshape(fold)
        assert np.array_equal(elements(layout, {"t": storage}), tensor)
        for dim, size in enumerate(fold):
            for low, high in product(range(size + 1), repeat=2):
                if low <= high:
                    found = elements(pieces.narrow(layout, dim, low, high), {"t": storage})
                    assert np.array_equal(found, tensor.take(range(low, high), dim))


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (3, 4), (4, 6), (2, 3, 4)])
def test_every_fold_of_every_cut_of_a_flattened_permutation(shape: tuple[int, ...]) -> None:
    """Cuts that do not line up with the digits of a piece, then folds that do not line up with the cut."""
    storage = np.arange(prod(shape))
    for order in permutations(range(len(shape))):
        flat = pieces.reshape(pieces.permute(pieces.whole(Source("t"), shape), order), (prod(shape),))
        tensor = storage.reshape(shape).transpose(order).reshape(-1)
        for low, high in combinations(range(prod(shape) + 1), 2):
            cut = pieces.narrow(flat, 0, low, high)
            for rows in range(1, high - low + 1):
                if (high - low) % rows == 0:
                    fold = rows, (high - low) // rows
                    found = elements(pieces.reshape(cut, fold), {"t": storage})
                    assert np.array_equal(found, tensor[low:high].reshape(fold))


def test_a_whole_tensor_is_one_piece_however_it_is_viewed() -> None:
    layout = pieces.whole(Source("t"), (4, 6, 2))
    layout = pieces.reshape(pieces.permute(pieces.reshape(layout, (4, 2, 3, 2)), (2, 0, 3, 1)), (12, 4))
    assert len(layout.pieces) == 1


def test_concatenated_columns_stay_one_piece_a_part_through_merged_dims() -> None:
    gate, up = (pieces.whole(Source(name), (8, 4, 6)) for name in ("gate", "up"))
    merged = pieces.reshape(pieces.concatenate([gate, up], 1), (64, 6))
    assert len(merged.pieces) == 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_casts_of_one_element_chain_in_order(count: int) -> None:
    layout = pieces.whole(Source("t"), (2,))
    chain = (DType.F16, DType.F32, DType.BF16, DType.F64, DType.F16)[:count]
    for dtype in chain:
        layout = pieces.recast(layout, dtype)
    assert {piece.source for piece in layout.pieces} == {Source("t", chain)}


def test_more_pieces_than_the_limit_are_refused_and_as_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [pieces.whole(Source(number), (2, 2)) for number in range(5)]
    monkeypatch.setattr(pieces, "MAX_PIECES", 5)
    assert len(pieces.stack(parts, 0).pieces) == 5
    assert len(pieces.concatenate(parts, 1).pieces) == 5
    monkeypatch.setattr(pieces, "MAX_PIECES", 4)
    with pytest.raises(Fragmented):
        pieces.stack(parts, 0)
    with pytest.raises(Fragmented):
        pieces.concatenate(parts, 1)


def test_taking_a_part_is_possible_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = pieces.reshape(pieces.permute(pieces.whole(Source("t"), (5, 7)), (1, 0)), (35,))
    monkeypatch.setattr(pieces, "MAX_PIECES", 1)
    part = pieces.take(shuffled, 0, [(33, 35), (2, 31)])
    wanted = torch.arange(35).reshape(5, 7).t().reshape(35)
    found = elements(part, {"t": np.arange(35)})
    assert np.array_equal(found, torch.cat([wanted[33:], wanted[2:31]]).numpy())


PACKED = [
    (DType.F4, (8,), Slice(0, 1, 5)),
    (DType.F4, (4, 5), Slice(1, 1, 3)),
    (DType.F4, (3, 3), Slice(0, 1, 3)),
    (DType.F4, (2, 3), Slice(0, 0, 1)),
    (DType.F4, (4, 2), Transpose(0, 1)),
    (DType.F6_E2M3, (4, 8), Slice(1, 2, 6)),
]


@pytest.mark.parametrize(("dtype", "shape", "op"), PACKED)
def test_a_cut_through_a_byte_of_packed_elements_is_refused(
    dtype: DType, shape: tuple[int, ...], op: Slice | Transpose
) -> None:
    entries = {"q": Entry("q", TensorType(shape, dtype), FILE, 0)}
    (value,) = apply(op, *apply(Stored("q", entries["q"].type)))
    layouts = [(PlanTensor("w", value.type), Lowering(entries).lower(value))]
    with pytest.raises(CompileError, match=f"^.*\\n  dtype: w: {dtype} elements are packed into bytes.* of q "):
        lower_rank(0, layouts, Lowering(entries), entries, {FILE: 0}, Chains())


@pytest.mark.parametrize("dtype", [DType.F4, DType.F6_E3M2])
def test_whole_bytes_of_packed_elements_move(dtype: DType) -> None:
    kind = TensorType((3, 8), dtype)
    entries = {name: Entry(name, kind, FILE, 7 + index * kind.nbytes) for index, name in enumerate("ab")}
    (joined,) = apply(Concatenate(1), *(apply(Stored(name, kind))[0] for name in entries))
    (value,) = apply(Slice(1, 4, 12), joined)
    chains = Chains()
    layouts = [(PlanTensor("w", value.type), Lowering(entries).lower(value))]
    section = lower_rank(0, layouts, Lowering(entries), entries, {FILE: 0}, chains)
    row, half = 8 * dtype.bits // 8, 4 * dtype.bits // 8
    assert [(c.src, c.dst, c.run, [tuple(loop) for loop in c.loops]) for c in section.copies] == [
        (7 + half, 0, 4, [(3, row, row)]),
        (7 + kind.nbytes, half, 4, [(3, row, row)]),
    ]
