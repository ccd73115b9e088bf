"""How a result is cut over ranks when the arguments of its op are: what a rank makes of its own parts.

Each rank applies the op to what it holds. Its result must be a part of the whole result along one dim, which is found
by comparing layouts, and the parts of all ranks must tile it. Intervals come out in the order in which the rank holds
them: joined query, key and value rows of a rank are its queries, its keys, its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from loadplan.compiler import pieces
from loadplan.compiler.ir import ComputeOp, Op, ShapeError
from loadplan.compiler.lower_graph import transfers
from loadplan.compiler.pieces import Fragmented, Layout, Source
from loadplan.compiler.shard import ShardError
from loadplan.runtime.plan import Intervals
from loadplan.runtime.tensor_type import TensorType

Cut = tuple[int, tuple[Intervals, ...]] | None
"""The dim that is cut and the intervals of each rank; None when every rank holds all."""


def cut_through(op: Op, types: tuple[TensorType, ...], cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """The cuts of the results of `op`, which is bound, on arguments of `types` with `cuts`.

    Raises:
        ShardError: what the ranks make of their parts are no parts of the results.
    """
    return _cut_through(op, types, cuts)  # type: ignore[arg-type]  # ops are frozen values


@lru_cache(maxsize=4096)  # layers of a model are alike
def _cut_through(op: Op, types: tuple[TensorType, ...], cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    results = op.infer(*types)
    ranks = {len(cut[1]) for cut in cuts if cut is not None}
    if not ranks:
        return (None,) * len(results)
    assert len(ranks) == 1, "one parallel plan"
    if isinstance(op, ComputeOp):
        return _through_kernel(op, types, cuts, results)
    made = [_local(op, types, cuts, rank) for rank in range(ranks.pop())]
    wholes = op.lower(*(pieces.whole(Source(str(n)), kind.shape) for n, kind in enumerate(types)))
    return tuple(_cut(op, whole, [layouts[index] for layouts in made]) for index, whole in enumerate(wholes))


def _through_kernel(
    op: ComputeOp, types: tuple[TensorType, ...], cuts: tuple[Cut, ...], results: tuple[TensorType, ...]
) -> tuple[Cut, ...]:
    """Rows of the results are made of the same rows of the arguments, so all must be cut alike, along the first dim."""
    found = {cut for cut, kind in zip(cuts, types, strict=True) if kind.shape}
    cut = found.pop()
    if (
        found
        or cut is None
        or cut[0] != 0
        or any(c is not None for c, k in zip(cuts, types, strict=True) if not k.shape)
    ):
        raise ShardError(f"{op} works on rows, so its arguments must all be cut alike along dim 0: {_said(cuts)}")
    return (cut,) * len(results)


def _local(op: Op, types: tuple[TensorType, ...], cuts: tuple[Cut, ...], rank: int) -> tuple[Layout, ...]:
    """What `rank` makes of its parts, in terms of the whole arguments."""
    parts = [
        pieces.whole(Source(str(number)), kind.shape)
        if cut is None
        else pieces.take(pieces.whole(Source(str(number)), kind.shape), cut[0], tuple(_joined(cut[1][rank])))
        for number, (kind, cut) in enumerate(zip(types, cuts, strict=True))
    ]
    try:
        op.infer(*(TensorType(part.shape, kind.dtype) for part, kind in zip(parts, types, strict=True)))
        return op.lower(*parts)
    except (ShapeError, Fragmented) as error:
        raise ShardError(f"{op} cannot be applied to what rank {rank} holds ({_said(cuts)}): {error}") from error


def _joined(spans: Intervals) -> Iterator[tuple[int, int]]:
    """`spans` with neighbours as one: then equal parts have equal pieces."""
    low, high = 0, 0
    for span in spans:
        if span[0] == high and high > low:
            high = span[1]
            continue
        if high > low:
            yield low, high
        low, high = span
    if high > low:
        yield low, high


def _cut(op: Op, whole: Layout, parts: list[Layout]) -> Cut:
    dims = {dim for part in parts for dim, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b}
    if len(dims) != 1 or 0 in whole.shape:
        raise ShardError(f"{op}: what ranks make of their parts is no cut of {list(whole.shape)} along one dim")
    dim = dims.pop()
    places = {element: place for place, element in enumerate(_line(whole, dim))}
    intervals: list[Intervals] = []
    for rank, part in enumerate(parts):
        held = [places.get(element, -1) for element in _line(part, dim)]
        spans = tuple(_joined(tuple((place, place + 1) for place in held)))
        if -1 in held or transfers(pieces.take(whole, dim, spans)) != transfers(part):
            raise ShardError(
                f"{op}: what rank {rank} makes of its parts is no cut of {list(whole.shape)} along one dim"
            )
        intervals.append(spans)
    volume = sum(high - low for spans in intervals for low, high in spans)
    if volume != whole.shape[dim]:
        raise ShardError(
            f"{op}: the ranks together hold {volume} positions along dim {dim}, there are {whole.shape[dim]}; "
            "cut all parts, or none"
        )
    return dim, tuple(intervals)


def _line(layout: Layout, dim: int) -> list[tuple[Source, int]]:
    """Source and element of each position along `dim`, at the start of all other dims."""
    for other in range(len(layout.shape)):
        if other != dim:
            layout = pieces.take(layout, other, [(0, 1)])
    found: dict[int, tuple[Source, int]] = {}
    for piece in layout.pieces:
        start, factors = piece.spans[dim]
        places = [(start, piece.offset)]
        for extent, src, dst in factors:
            places = [(place + step * dst, element + step * src) for place, element in places for step in range(extent)]
        found.update((place, (piece.source, element)) for place, element in places)
    return [found[place] for place in range(layout.shape[dim])]


def _said(cuts: tuple[Cut, ...]) -> str:
    return ", ".join("whole" if cut is None else f"cut along dim {cut[0]}" for cut in cuts)
