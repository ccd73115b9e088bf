"""The piece algebra: every layout of elements as a few strided boxes, so that op chains become plain copies.

A `Layout` says where each element of a tensor comes from. Its grammar:

    layout ::= shape piece*
    piece  ::= source offset span{ndim}        -- `offset`: element of the source where the piece begins
    span   ::= start factor*                   -- where along one dim of the result the piece lies
    factor ::= (extent, src, dst)              -- a loop: `extent` steps of `src` elements in the source,
                                                  `dst` positions along this dim of the result

Element (i0, i1, ...) of the loops of a piece lies at `offset + sum(i * src)` in the source and, per dim, at
`start + sum(i * dst)` in the result. Factors of a span are in falling order of `dst`, and each steps over all that the
ones after it cover (a mixed radix number), so that distinct digits never meet. A span need not be dense: merging two
dims scales the factors of the outer one and cuts nothing.

Concatenation shifts starts; stacking adds a dim; permuting swaps spans; narrowing clips a mixed radix number to head,
body and tail; reshaping merges and splits spans. Only a split that falls between the digits of a factor multiplies
pieces; past `MAX_PIECES` it raises `Fragmented`, and the caller materialises the argument and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import NamedTuple

from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import row_major

MAX_PIECES = 65_536  # per layout: one for each expert of the largest published models, with room


class Fragmented(Exception):
    """A layout would need more than `MAX_PIECES` pieces; never leaves the compiler."""


class Source(NamedTuple):
    """Where elements come from: a checkpoint entry by name, or a temporary by number, then cast in turn."""

    key: str | int
    casts: tuple[DType, ...] = ()


class Factor(NamedTuple):
    """One loop of a span: `extent` steps; strides in elements of the source and positions of the dim."""

    extent: int
    src: int
    dst: int


class Span(NamedTuple):
    """The positions that a piece takes along one dim of the result."""

    start: int
    factors: tuple[Factor, ...] = ()

    @property
    def reach(self) -> int:
        """Distance from the first to the last position."""
        return sum((f.extent - 1) * f.dst for f in self.factors)


class Piece(NamedTuple):
    """A part of a layout that one nest of loops copies."""

    source: Source
    offset: int
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(f.extent for span in self.spans for f in span.factors)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor of `shape` put together from pieces; together they cover each element exactly once."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(source: Source, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Layout:
    """The layout of a stored tensor: one piece; `strides` in elements, dense row-major when None."""
    if 0 in shape:
        return Layout(shape, ())
    steps = row_major(shape) if strides is None else strides
    spans = tuple(Span(0, (Factor(n, step, 1),) if n > 1 else ()) for n, step in zip(shape, steps, strict=True))
    return Layout(shape, (Piece(source, 0, spans),))


def permute(layout: Layout, order: Sequence[int]) -> Layout:
    """Dim `i` of the result is dim `order[i]` of the argument."""
    pieces = tuple(p._replace(spans=tuple(p.spans[dim] for dim in order)) for p in layout.pieces)
    return Layout(tuple(layout.shape[dim] for dim in order), pieces)


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    """The arguments joined along `dim`, in order."""
    shape = list(layouts[0].shape)
    shape[dim] = 0
    pieces: list[Piece] = []
    for layout in layouts:
        shift = shape[dim]
        for piece in layout.pieces:
            start, factors = piece.spans[dim]
            pieces.append(piece._replace(spans=_put(piece.spans, dim, Span(start + shift, factors))))
        shape[dim] += layout.shape[dim]
    return Layout(tuple(shape), _limited(pieces))


def stack(layouts: Sequence[Layout], dim: int) -> Layout:
    """The arguments, all of one shape, along a new dim `dim`."""
    shape = layouts[0].shape
    pieces = [
        piece._replace(spans=(*piece.spans[:dim], Span(index), *piece.spans[dim:]))
        for index, layout in enumerate(layouts)
        for piece in layout.pieces
    ]
    return Layout((*shape[:dim], len(layouts), *shape[dim:]), _limited(pieces))


def narrow(layout: Layout, dim: int, low: int, high: int) -> Layout:
    """The positions `low` to `high` (excluded) along `dim`."""
    part = take(layout, dim, [(low, high)])
    return Layout(part.shape, _limited(part.pieces))


def take(layout: Layout, dim: int, intervals: Sequence[tuple[int, int]]) -> Layout:
    """The positions of `intervals` (low, high excluded) along `dim`, joined in their order.

    Never `Fragmented`, so that any part of a layout can be taken: a cut adds pieces where it falls, it multiplies none.
    """
    size = 0
    pieces: list[Piece] = []
    for low, high in intervals:
        for piece in layout.pieces:
            for moved, (start, factors) in _clip(piece.spans[dim], low, high):
                spans = _put(piece.spans, dim, Span(start - low + size, factors))
                pieces.append(Piece(piece.source, piece.offset + moved, spans))
        size += high - low
    return Layout((*layout.shape[:dim], size, *layout.shape[dim + 1 :]), tuple(pieces))


def reshape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The same elements in row-major order under another shape of equal volume."""
    if 0 in shape:
        return Layout(shape, ())
    groups = tuple(_matching_groups(layout.shape, shape))
    pieces = (refolded for piece in layout.pieces for refolded in _refold(piece, layout.shape, groups))
    return Layout(shape, _limited(pieces))


def recast(layout: Layout, dtype: DType) -> Layout:
    """Every element cast to `dtype` on its way; casts of one element chain, since each may round."""
    pieces = tuple(p._replace(source=Source(p.source.key, (*p.source.casts, dtype))) for p in layout.pieces)
    return Layout(layout.shape, pieces)


def _limited(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    found = tuple(islice(pieces, MAX_PIECES + 1))
    if len(found) > MAX_PIECES:
        raise Fragmented
    return found


def _put(spans: tuple[Span, ...], dim: int, span: Span) -> tuple[Span, ...]:
    return (*spans[:dim], span, *spans[dim + 1 :])


def _without_ones(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    return tuple(f for f in factors if f.extent > 1)


def join_factors(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """The same loops, with each two joined that step through source and result as one would."""
    joined: list[Factor] = []
    for inner in factors:
        if inner.extent == 1:
            continue
        if joined:
            outer = joined[-1]
            if outer.src == inner.extent * inner.src and outer.dst == inner.extent * inner.dst:
                joined[-1] = Factor(outer.extent * inner.extent, inner.src, inner.dst)
                continue
        joined.append(inner)
    return tuple(joined)


def _clip(span: Span, low: int, high: int) -> Iterator[tuple[int, Span]]:
    """The parts of `span` at positions `low` to `high` (excluded), each with its distance in the source."""
    start, factors = span
    last = start + span.reach
    if last < low or start >= high:
        return
    if low <= start and last < high:
        yield 0, span
        return
    (extent, src, dst), inner = factors[0], factors[1:]
    reach = Span(0, inner).reach
    first = min(extent, max(0, -((start - low) // dst)))  # first digit that begins at or after `low`
    stop = max(-1, min(extent - 1, (high - 1 - reach - start) // dst)) + 1  # one past the last that ends before `high`
    if first > 0:
        yield from _clip_digit(span, first - 1, low, high)
    if stop > first:
        yield first * src, Span(start + first * dst, _without_ones((Factor(stop - first, src, dst), *inner)))
    if stop < extent and stop != first - 1:
        yield from _clip_digit(span, stop, low, high)


def _clip_digit(span: Span, digit: int, low: int, high: int) -> Iterator[tuple[int, Span]]:
    (_, src, dst), inner = span.factors[0], span.factors[1:]
    for moved, part in _clip(Span(span.start + digit * dst, inner), low, high):
        yield digit * src + moved, part


def _matching_groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Runs of dims of equal volume: how many dims of `old`, and which dims of `new` they become."""
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (before := prod(old[first_i:i])) != (after := prod(new[first_j:j])):
            i, j = (i + 1, j) if before < after else (i, j + 1)
        yield i - first_i, new[first_j:j]


def _refold(piece: Piece, shape: tuple[int, ...], groups: tuple[tuple[int, tuple[int, ...]], ...]) -> Iterator[Piece]:
    """`piece` of a tensor of `shape`, with each group of dims merged and split into the group's new dims."""
    parts: list[tuple[int, tuple[Span, ...]]] = [(piece.offset, ())]
    first = 0
    for count, sizes in groups:
        merged = _merge(piece.spans[first : first + count], shape[first : first + count])
        first += count
        split = list(islice(_split(merged, sizes), MAX_PIECES + 1))
        if len(parts) * len(split) > MAX_PIECES:
            raise Fragmented
        parts = [(offset + moved, spans + new) for offset, spans in parts for moved, new in split]
    for offset, spans in parts:
        yield Piece(piece.source, offset, spans)


def _merge(spans: tuple[Span, ...], sizes: tuple[int, ...]) -> Span:
    """One span along the row-major product of several dims."""
    start, factors = 0, list[Factor]()
    for span, weight in zip(spans, row_major(sizes), strict=True):
        start += span.start * weight
        factors.extend(Factor(f.extent, f.src, f.dst * weight) for f in span.factors)
    return Span(start, join_factors(factors))


def _split(span: Span, sizes: tuple[int, ...]) -> Iterator[tuple[int, tuple[Span, ...]]]:
    """`span` along one dim as spans along dims of `sizes`, whose product that dim is."""
    if len(sizes) < 2:
        yield 0, (span,) * len(sizes)
        return
    for moved, outer, inner in _split_once(span, prod(sizes[1:])):
        for further, spans in _split(inner, sizes[1:]):
            yield moved + further, (outer, *spans)


def _split_once(span: Span, size: int) -> Iterator[tuple[int, Span, Span]]:
    """`span` as (position // size, position % size), cut where a factor steps over a multiple of `size`."""
    start, factors = span
    outer = tuple(Factor(f.extent, f.src, f.dst // size) for f in factors if f.dst % size == 0)
    fine = tuple(f for f in factors if f.dst % size != 0)
    base = start % size
    reach = Span(0, fine).reach
    if base + reach < size:
        yield 0, Span(start // size, outer), Span(base, fine)
        return
    for digit, replaced in _cut(fine[0], base, reach, size):
        _, src, dst = fine[0]
        others = tuple(g for f in factors for g in (replaced if f is fine[0] else (f,)))
        for moved, high, low in _split_once(Span(start + digit * dst, _without_ones(others)), size):
            yield digit * src + moved, high, low


def _cut(factor: Factor, base: int, reach: int, size: int) -> Iterator[tuple[int, tuple[Factor, ...]]]:
    """Runs of digits of `factor` that can be split at `size`: first digit, and the factors that count the run.

    `base` is the first position modulo `size`, `reach` that of all factors below `size`.
    """
    extent, src, dst = factor
    below = reach - (extent - 1) * dst
    if size % dst != 0 or base % dst + below >= dst:  # digits do not line up with `size`: one by one
        for digit in range(extent):
            yield digit, ()
        return
    per_row = size // dst
    head = min(extent, -(base // dst) % per_row)
    rows, tail = divmod(extent - head, per_row)
    if head:
        yield 0, (Factor(head, src, dst),)
    if rows:
        yield head, (Factor(rows, src * per_row, size), Factor(per_row, src, dst))
    if tail:
        yield extent - tail, (Factor(tail, src, dst),)
