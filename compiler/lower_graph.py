"""Fifth pass: each target's value as pieces of stored tensors, each rank's part as strided copies.

Layout ops are followed through symbolically, so most targets need no memory but their own. Where pieces become too
many (`Fragmented`), the arguments of that op are materialised as temporaries, and the op is lowered on those: always
right, and only the rows that a rank needs are made. The arguments of compute ops are temporaries always, and their
results are new ones; a result that is a rank's whole tensor is made in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadplan.compiler import pieces
from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import ComputeOp, Node, Stored, Value
from loadplan.compiler.pieces import Factor, Fragmented, Layout, Piece, Source
from loadplan.compiler.problem import CompileError, Problem
from loadplan.runtime.dtype import DType
from loadplan.runtime.kernels import find_kernel, parse_options
from loadplan.runtime.plan import Compute, Copy, CopyColumns, Loop, PlanTensor, Section
from loadplan.runtime.tensor_type import TensorType, row_major


@dataclass(frozen=True, slots=True)
class Temporary:
    """A value that is written out before the values that read it."""

    layout: Layout  # without pieces if a calculation makes it
    dtype: DType
    made_by: int | None = None  # number of the calculation

    @property
    def type(self) -> TensorType:
        """Shape and dtype."""
        return TensorType(self.layout.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Calculation:
    """A compute op on whole temporaries; those of its results follow each other, behind those of its arguments."""

    op: ComputeOp
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def pull(self, low: int, high: int, temporaries: Sequence[Temporary]) -> tuple[tuple[int, int], ...]:
        """Per argument, the rows that rows `low` to `high` of the results need."""
        types = [temporaries[number].type for number in self.inputs]
        return find_kernel(self.op.kernel).pull(low, high, types, parse_options(self.op.options))


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
        self.calculations: list[Calculation] = []

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
        if isinstance(node.op, ComputeOp):
            return self._calculate(node.op, args, node)
        try:
            return node.op.lower(*args)
        except Fragmented:
            dense = [
                self._of(self._materialize(layout, arg.type.dtype)) if layout.pieces else layout
                for layout, arg in zip(args, node.args, strict=True)
            ]
            return node.op.lower(*dense)

    def _calculate(self, op: ComputeOp, args: Sequence[Layout], node: Node) -> tuple[Layout, ...]:
        inputs = tuple(self._materialize(layout, arg.type.dtype) for layout, arg in zip(args, node.args, strict=True))
        first = len(self.temporaries)
        self.temporaries += [
            Temporary(Layout(kind.shape, ()), kind.dtype, len(self.calculations)) for kind in node.types
        ]
        outputs = tuple(range(first, len(self.temporaries)))
        self.calculations.append(Calculation(op, inputs, outputs))
        return tuple(map(self._of, outputs))

    def _materialize(self, layout: Layout, dtype: DType) -> int:
        """The number of a new temporary that holds `layout`: for one reader, so that its rows are those it needs."""
        self.temporaries.append(Temporary(layout, dtype))
        return len(self.temporaries) - 1

    def _of(self, number: int) -> Layout:
        return pieces.whole(Source(number), self.temporaries[number].layout.shape)


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
    lowering: Lowering,
    entries: Mapping[str, Entry],
    files: Mapping[str, int],
    chains: Chains,
) -> Section:
    """The section of `rank`: only the temporaries, and of those only the rows, that its tensors need.

    Raises:
        CompileError: a copy of packed elements would begin or end inside a byte.
    """
    temporaries = lowering.temporaries
    buffers = [transfers(narrowed(layout, tensor, rank)) for tensor, layout in layouts]
    rows, inner = _needed_rows(buffers, lowering)
    kept = {number: _rows_type(temporaries[number], rows[number]) for number in sorted(rows)}
    in_place = _in_place(buffers, [tensor.local_type(rank) for tensor, _ in layouts], inner, rows, lowering)
    for buffer in in_place.values():
        buffers[buffer] = []
    order = [number for number in kept if number not in in_place]
    slots = in_place | {number: len(buffers) + slot for slot, number in enumerate(order)}

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

    numbered = [*enumerate(buffers), *((slots[number], inner.get(number, [])) for number in order)]
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
    computes = tuple(
        Compute(
            made.op.kernel,
            tuple(slots[number] for number in made.inputs),
            tuple(slots[number] for number in made.outputs),
            made.op.options,
        )
        for made in lowering.calculations
        if made.outputs[0] in rows
    )
    return Section(tuple(kept[number] for number in order), CopyColumns.of(copies), computes)


def _needed_rows(
    buffers: Iterable[Sequence[Transfer]], lowering: Lowering
) -> tuple[dict[int, tuple[int, int]], dict[int, list[Transfer]]]:
    """The rows (low, high) that are needed of each temporary, and what copies those that no calculation makes."""
    temporaries = lowering.temporaries
    rows: dict[int, tuple[int, int]] = {}
    inner: dict[int, list[Transfer]] = {}
    _widen(rows, temporaries, (copy for buffer in buffers for copy in buffer))
    for number in reversed(range(len(temporaries))):  # a temporary reads only earlier ones
        if number not in rows:
            continue
        calculation = temporaries[number].made_by
        if calculation is None:
            inner[number] = transfers(_rows(temporaries[number].layout, *rows[number]))
            _widen(rows, temporaries, inner[number])
            continue
        made = lowering.calculations[calculation]
        together = [rows[output] for output in made.outputs if output in rows]
        low, high = min(low for low, _ in together), max(high for _, high in together)
        rows |= dict.fromkeys(made.outputs, (low, high))
        for argument, (first, last) in zip(made.inputs, made.pull(low, high, temporaries), strict=True):
            before = rows.get(argument, (first, last))
            rows[argument] = min(first, before[0]), max(last, before[1])
    return rows, inner


def _in_place(
    buffers: Sequence[Sequence[Transfer]],
    wanted: Sequence[TensorType],
    inner: Mapping[int, Sequence[Transfer]],
    rows: Mapping[int, tuple[int, int]],
    lowering: Lowering,
) -> dict[int, int]:
    """Results of calculations that one target is, and nothing else reads: temporary -> number of the target's buffer."""
    readers = Counter(copy.source.key for found in (*buffers, *inner.values()) for copy in found)
    readers.update(number for made in lowering.calculations if made.outputs[0] in rows for number in made.inputs)
    places: dict[int, int] = {}
    for buffer, (found, kind) in enumerate(zip(buffers, wanted, strict=True)):
        key = found[0].source.key if len(found) == 1 else ""
        if not isinstance(key, int) or lowering.temporaries[key].made_by is None or readers[key] != 1:
            continue
        first = rows[key][0] * _row_numel(lowering.temporaries[key].layout)
        whole = Transfer(Source(key), first, 0, kind.numel, ())
        if found[0] == whole and kind == _rows_type(lowering.temporaries[key], rows[key]):
            places[key] = buffer
    return places


def _rows_type(temporary: Temporary, rows: tuple[int, int]) -> TensorType:
    """The type of what is kept of a temporary."""
    shape = temporary.layout.shape
    return TensorType((rows[1] - rows[0], *shape[1:]) if shape else shape, temporary.dtype)


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
