"""What is to be moved for a section, sorted by the way it can go. Looks at the plan alone.

    stretch    one stretch of a file that lies in one stretch of a buffer: can be mapped, or read straight into place
    strided    a copy that steps or casts: element by element
    later      a copy that reads a temporary, so that it waits for those that write it

A strided copy whose runs are long is as many stretches: reading each is cheaper than walking through a mapped file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Copy, CopyColumns, Loop

_MIN_RUN_NBYTES = 8 << 10  # two pages: below, a system call for each run costs more than the copy
_MAX_TURNS = 1 << 16  # stretches that one copy may become


class Stretch(NamedTuple):
    """`nbytes` bytes from byte `src` of a file, for byte `dst` of a buffer."""

    file: int
    src: int
    nbytes: int
    buffer: int
    dst: int


@dataclass(slots=True)
class Schedule:
    """The copies of some buffers, sorted."""

    whole: dict[int, Stretch] = field(default_factory=dict)  # buffers that are one stretch
    parts: dict[int, list[Stretch]] = field(default_factory=dict)  # of buffers that are several, or also get others
    strided: list[Copy] = field(default_factory=list)
    later: list[Copy] = field(default_factory=list)

    @property
    def mixed(self) -> set[int]:
        """The buffers that are not made of stretches alone."""
        return {copy.buffer for copies in (self.strided, self.later) for copy in copies}

    @property
    def files(self) -> list[int]:
        """The numbers of the files that are read."""
        found = {stretch.file for stretch in self.whole.values()}
        found.update(stretch.file for parts in self.parts.values() for stretch in parts)
        found.update(copy.source for copy in self.strided)
        return sorted(found)

    def drop(self, buffers: Collection[int]) -> None:
        """Leave out what writes these buffers."""
        for number in buffers:
            self.whole.pop(number, None)
            self.parts.pop(number, None)
        self.strided = [copy for copy in self.strided if copy.buffer not in buffers]
        self.later = [copy for copy in self.later if copy.buffer not in buffers]


def schedule(
    copies: CopyColumns, chains: Sequence[tuple[DType, ...]], buffers: Collection[int] | None, *, expand: bool = True
) -> Schedule:
    """The copies that write `buffers`, all if None; nothing becomes a stretch unless `expand`."""
    found = Schedule()
    bits = [chain[0].bits if len(chain) == 1 else 0 for chain in chains]
    single, parts = found.whole, found.parts
    firsts = copies.first_loop
    for row, (source, buffer, src, dst, run, chain) in enumerate(
        zip(copies.source, copies.buffer, copies.src, copies.dst, copies.run, copies.chain, strict=True)
    ):
        if buffers is not None and buffer not in buffers:
            continue
        if source < 0:
            found.later.append(copies[row])
        elif not (expand and bits[chain]):
            found.strided.append(copies[row])
        elif firsts[row] != firsts[row + 1]:
            copy = copies[row]
            stretches = _stretches(copy, bits[chain])
            if stretches is None:
                found.strided.append(copy)
            else:
                parts.setdefault(buffer, []).extend(stretches)
        elif buffer in parts:
            parts[buffer].append(Stretch(source, src, run * bits[chain] // 8, buffer, dst))
        elif buffer in single:
            parts[buffer] = [single.pop(buffer), Stretch(source, src, run * bits[chain] // 8, buffer, dst)]
        else:
            single[buffer] = Stretch(source, src, run * bits[chain] // 8, buffer, dst)
    for buffer in single.keys() & (parts.keys() | found.mixed):
        parts.setdefault(buffer, []).append(single.pop(buffer))
    return found


def _stretches(copy: Copy, bits: int) -> list[Stretch] | None:
    """The runs of a copy that does not cast, one by one; None where they are many or short."""
    nbytes = copy.run * bits // 8
    if nbytes < _MIN_RUN_NBYTES or prod(loop.extent for loop in copy.loops) > _MAX_TURNS:
        return None
    places = [(copy.src, copy.dst)]
    for loop in copy.loops:
        places = [(s + turn * loop.src, d + turn * loop.dst) for s, d in places for turn in range(loop.extent)]
    return [Stretch(copy.source, src, nbytes, copy.buffer, dst) for src, dst in places]


def span(copy: Copy, stored: DType) -> int:
    """Bytes of the source from the first element that the copy reads to the last."""
    return copy.run * stored.bits // 8 + sum((loop.extent - 1) * loop.src for loop in copy.loops)


def tiles(copy: Copy, chain: tuple[DType, ...], nbytes: int) -> Iterator[Copy]:
    """`copy` in parts that read at most `nbytes` from a span of at most as many, where single elements allow it.

    The loop with the longest way through the source is cut first, so that spans get short.
    """
    stored, final = chain[0], chain[-1]
    if span(copy, stored) <= nbytes and copy.numel * stored.bits // 8 <= nbytes:
        yield copy
        return
    if not copy.loops:
        step = max(nbytes * 8 // stored.bits // 8 * 8, 8)  # whole bytes, also of packed elements
        for first in range(0, copy.run, step):
            src, dst = copy.src + first * stored.bits // 8, copy.dst + first * final.bits // 8
            yield copy._replace(src=src, dst=dst, run=min(step, copy.run - first))
        return
    longest = max(range(len(copy.loops)), key=lambda number: copy.loops[number].src * copy.loops[number].extent)
    loop = copy.loops[longest]
    inner = copy._replace(loops=(*copy.loops[:longest], *copy.loops[longest + 1 :]))
    room = nbytes - span(inner, stored)
    turns = min(room // loop.src + 1 if loop.src else loop.extent, nbytes * 8 // max(inner.numel * stored.bits, 1))
    turns = min(max(turns, 1), loop.extent)
    for first in range(0, loop.extent, turns):
        count = min(turns, loop.extent - first)
        part = inner._replace(src=copy.src + first * loop.src, dst=copy.dst + first * loop.dst)
        if count > 1:
            loops = (*copy.loops[:longest], Loop(count, loop.src, loop.dst), *copy.loops[longest + 1 :])
            yield part._replace(loops=loops)
        else:
            yield from tiles(part, chain, nbytes)
