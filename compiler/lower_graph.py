"""Fifth pass: each target's value as pieces of stored tensors, each rank's part as strided copies.

Layout ops are followed through symbolically, so most targets need no memory but their own. Where pieces become too
many (`Fragmented`), the arguments of that op are materialised as temporaries, and the op is lowered on those: always
right, and only the rows that a rank needs are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadplan.compiler import pieces
from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Node, Stored, Value
from loadplan.compiler.pieces import Factor, Fragmented, Layout, Piece, Source
from loadplan.compiler.problem import CompileError, Problem
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Copy, CopyColumns, Loop, PlanTensor, Section
from loadplan.runtime.tensor_type import TensorType, row_major


@dataclass(frozen=True, slots=True)
class Temporary:
    """A value that is written out before the values that read it."""

    layout: Layout
    dtype: DType


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy in elements, before it is given buffers and bytes."""

    source: Source
    src: int
    dst: int
    run: int
    loops: tuple[Factor, ...]

    @property
    def last_src(self) -> int:
        """The last element of the source that is read."""
        return self.src + self.run - 1 + sum((loop.extent - 1) * loop.src for loop in self.loops)


class Lowering:
    """Lowers values to layouts, each node once, and collects the temporaries that they need."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._layouts: dict[Node, tuple[Layout, ...]] = {}
        self.temporaries: list[Temporary] = []

    def lower(self, value: Value) -> Layout:
        """The layout of `value`."""
        layouts = self._layouts.get(value.node)
        if layouts is None:
            layouts = self._layouts[value.node] = self._lower(value.node)
        return layouts[value.index]

    def _lower(self, node: Node) -> tuple[Layout, ...]:
        if isinstance(node.op, Stored):
            entry = self._entries[node.op.name]
            return (pieces.whole(Source(entry.name), entry.type.shape, entry.strides),)
        args = [self.lower(arg) for arg in node.args]
        try:
            return node.op.lower(*args)
        except Fragmented:
            dense = [self._materialize(layout, arg.type.dtype) for layout, arg in zip(args, node.args, strict=True)]
            return node.op.lower(*dense)

    def _materialize(self, layout: Layout, dtype: DType) -> Layout:
        if not layout.pieces:
            return layout
        self.temporaries.append(Temporary(layout, dtype))
        return pieces.whole(Source(len(self.temporaries) - 1), layout.shape)


def narrowed(layout: Layout, tensor: PlanTensor, rank: int) -> Layout:
    """What `rank` holds of `layout`."""
    if tensor.shard_dim < 0:
        return layout
    return pieces.take(layout, tensor.shard_dim, tensor.intervals[rank])


def transfers(layout: Layout) -> list[Transfer]:
    """The copies that write `layout` densely, fewest loops first joined, in order of the result."""
    steps = row_major(layout.shape)
    made = sorted((_transfer(piece, steps) for piece in layout.pieces), key=lambda copy: copy.dst)
    joined: list[Transfer] = []
    for copy in made:
        last = joined[-1] if joined else None
        if (
            last is not None
            and not last.loops
            and not copy.loops
            and last.source == copy.source
            and last.src + last.run == copy.src
            and last.dst + last.run == copy.dst
        ):
            joined[-1] = Transfer(last.source, last.src, last.dst, last.run + copy.run, ())
        else:
            joined.append(copy)
    return joined


def _transfer(piece: Piece, steps: Sequence[int]) -> Transfer:
    factors = [
        Factor(f.extent, f.src, f.dst * step)
        for span, step in zip(piece.spans, steps, strict=True)
        for f in span.factors
    ]
    loops = pieces.join_factors(sorted(factors, key=lambda factor: -factor.dst))
    dst = sum(span.start * step for span, step in zip(piece.spans, steps, strict=True))
    if loops and loops[-1].src == loops[-1].dst == 1:
        return Transfer(piece.source, piece.offset, dst, loops[-1].extent, loops[:-1])
    return Transfer(piece.source, piece.offset, dst, 1, loops)


class Chains:
    """Numbers dtype chains in the order in which they are met."""

    def __init__(self) -> None:
        self.found: dict[tuple[DType, ...], int] = {}

    def number(self, chain: tuple[DType, ...]) -> int:
        """The number of `chain`."""
        return self.found.setdefault(chain, len(self.found))


def lower_rank(
    rank: int,
    layouts: Sequence[tuple[PlanTensor, Layout]],
    temporaries: Sequence[Temporary],
    entries: Mapping[str, Entry],
    files: Mapping[str, int],
    chains: Chains,
) -> Section:
    """The section of `rank`: only the temporaries, and of those only the rows, that its tensors need.

    Raises:
        CompileError: a copy of packed elements would begin or end inside a byte.
    """
    buffers = [transfers(narrowed(layout, tensor, rank)) for tensor, layout in layouts]
    rows: dict[int, tuple[int, int]] = {}  # temporary -> rows (low, high) that are read
    inner: dict[int, list[Transfer]] = {}
    _widen(rows, temporaries, (copy for buffer in buffers for copy in buffer))
    for number in reversed(range(len(temporaries))):  # a temporary reads only earlier ones
        if number in rows:
            inner[number] = transfers(_rows(temporaries[number].layout, *rows[number]))
            _widen(rows, temporaries, inner[number])
    order = sorted(rows)
    slots = {number: len(buffers) + slot for slot, number in enumerate(order)}

    def resolve(copy: Transfer, buffer: int) -> Copy:
        key, casts = copy.source
        if isinstance(key, int):
            stored, source, first, offset = temporaries[key].dtype, -1 - slots[key], rows[key][0], 0
            first *= _row_numel(temporaries[key].layout)
        else:
            entry = entries[key]
            stored, source, first, offset = entry.type.dtype, files[entry.file], 0, entry.offset
        final = casts[-1] if casts else stored
        places = [copy.src - first, copy.run, *(f.src for f in copy.loops)]
        if any(place * stored.bits % 8 for place in (*places, copy.dst, *(f.dst for f in copy.loops))):
            name = layouts[buffer][0].name if buffer < len(layouts) else f"temporary {buffer - len(layouts)}"
            message = f"{name}: {stored} elements are packed into bytes, and this cuts through a byte of {key}"
            raise CompileError([Problem("dtype", message, (name, str(key)), rank=rank)])
        return Copy(
            source,
            buffer,
            offset + places[0] * stored.bits // 8,
            copy.dst * final.bits // 8,
            copy.run,
            chains.number((stored, *casts)),
            tuple(Loop(f.extent, f.src * stored.bits // 8, f.dst * final.bits // 8) for f in copy.loops),
        )

    numbered = [*enumerate(buffers), *((slots[number], inner[number]) for number in order)]
    copies = [resolve(copy, buffer) for buffer, found in numbered for copy in found]
    copies.sort(
        key=lambda copy: (
            copy.source < 0,
            copy.source if copy.source >= 0 else -copy.source,
            copy.src,
            copy.buffer,
            copy.dst,
        )
    )
    kept = tuple(TensorType(_rows(temporaries[n].layout, *rows[n]).shape, temporaries[n].dtype) for n in order)
    return Section(kept, CopyColumns.of(copies))


def _row_numel(layout: Layout) -> int:
    return row_major(layout.shape)[0] if layout.shape else 1


def _rows(layout: Layout, low: int, high: int) -> Layout:
    return pieces.take(layout, 0, [(low, high)]) if layout.shape else layout


def _widen(rows: dict[int, tuple[int, int]], temporaries: Sequence[Temporary], copies: Iterable[Transfer]) -> None:
    """Take the rows of temporaries that `copies` read into `rows`."""
    for copy in copies:
        key = copy.source.key
        if not isinstance(key, int):
            continue
        step = _row_numel(temporaries[key].layout)
        low, high = copy.src // step, copy.last_src // step + 1
        before = rows.get(key, (low, high))
        rows[key] = (min(low, before[0]), max(high, before[1]))
