"""Copies taken apart: the parts move what the whole copy moves, each once, within the budget."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadplan.runtime.dtype import DType
from loadplan.runtime.order import needed
from loadplan.runtime.plan import Copy, CopyColumns, Loop, Section
from loadplan.runtime.schedule import Stretch, schedule, span, tiles

CHAINS = ((DType.F32,), (DType.F32, DType.BF16), (DType.F4,))


def moves(copy: Copy) -> list[tuple[int, int]]:
    """Byte of the source and byte of the buffer of each element, by the definition in `loadplan.runtime.plan`."""
    stored, final = CHAINS[copy.chain][0], CHAINS[copy.chain][-1]
    found = []
    for turns in product(*(range(loop.extent) for loop in copy.loops)):
        src = copy.src + sum(turn * loop.src for turn, loop in zip(turns, copy.loops, strict=True))
        dst = copy.dst + sum(turn * loop.dst for turn, loop in zip(turns, copy.loops, strict=True))
        found += [(src * 8 + n * stored.bits, dst * 8 + n * final.bits) for n in range(copy.run)]
    return found


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    chain = draw(st.integers(0, 2))
    run = draw(st.integers(1, 9)) * (2 if chain == 2 else 1)
    extents = draw(st.lists(st.integers(2, 5), max_size=3))
    step = 1 if chain == 2 else 4
    loops = tuple(Loop(extent, draw(st.integers(0, 40)) * step, draw(st.integers(1, 40)) * step) for extent in extents)
    return Copy(
        0, draw(st.integers(0, 3)), draw(st.integers(0, 9)) * step, draw(st.integers(0, 9)) * 4, run, chain, loops
    )


@given(copy=copies(), nbytes=st.integers(1, 400))
def test_tiles_are_the_copy(copy: Copy, nbytes: int) -> None:
    chain = CHAINS[copy.chain]
    parts = list(tiles(copy, chain, nbytes))
    assert sorted(move for part in parts for move in moves(part)) == sorted(moves(copy))
    for part in parts:
        smallest = not part.loops and part.run <= 8
        assert smallest or span(part, chain[0]) <= nbytes
        assert smallest or part.numel * chain[0].bits // 8 <= nbytes


@given(found=st.lists(copies(), max_size=5), wanted=st.none() | st.sets(st.integers(0, 3)))
def test_every_copy_is_in_one_place(found: list[Copy], wanted: set[int] | None) -> None:
    sorted_out = schedule(CopyColumns.of(found), CHAINS, wanted)
    stretches = [*sorted_out.whole.values(), *(s for parts in sorted_out.parts.values() for s in parts)]
    assert all(buffer not in sorted_out.mixed for buffer in sorted_out.whole)
    assert all(s.buffer == buffer for buffer, parts in sorted_out.parts.items() for s in parts)
    strided = [move for copy in sorted_out.strided for move in moves(copy)]
    plain = [
        (copy.src, copy.dst, copy.run * CHAINS[copy.chain][0].bits // 8, copy.buffer)
        for copy in found
        if (wanted is None or copy.buffer in wanted) and not copy.loops and len(CHAINS[copy.chain]) == 1
    ]
    assert sorted((s.src, s.dst, s.nbytes, s.buffer) for s in stretches) == sorted(plain)
    rest = [c for c in found if (wanted is None or c.buffer in wanted) and (c.loops or len(CHAINS[c.chain]) > 1)]
    assert sorted(strided) == sorted(move for copy in rest for move in moves(copy))


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("kept", [{0, 1}, {0, 2}, {0, 3}, {0, 1, 2}, {0, 2, 3}, {0, 1, 2, 3}])
def test_a_buffer_of_all_kinds_of_copies(order: tuple[int, ...], kept: set[int]) -> None:
    """Whole, long runs, short runs, and out of a temporary, in any order: each is somewhere, once."""
    kinds = [
        Copy(0, 1, 0, 0, 4, 0, ()),
        Copy(0, 1, 100, 16, 4096, 0, (Loop(2, 40_000, 16_384),)),
        Copy(0, 1, 90_000, 40_000, 4, 0, (Loop(64, 32, 16),)),
        Copy(-3, 1, 0, 50_000, 4, 0, ()),
    ]
    found = schedule(CopyColumns.of([kinds[n] for n in order if n in kept]), CHAINS, None)
    assert not found.whole
    assert len(found.parts[1]) == 1 + 2 * (1 in kept)
    assert sum(s.nbytes for s in found.parts[1]) == 16 + 32_768 * (1 in kept)
    assert found.strided == [kinds[2]] * (2 in kept)
    assert found.later == [kinds[3]] * (3 in kept)


def test_long_runs_are_stretches() -> None:
    copy = Copy(0, 5, 100, 0, 4096, 0, (Loop(2, 100_000, 32_768), Loop(2, 40_000, 16_384)))
    found = schedule(CopyColumns.of([copy]), CHAINS, None)
    assert found.parts == {
        5: [
            Stretch(0, 100, 16_384, 5, 0),
            Stretch(0, 40_100, 16_384, 5, 16_384),
            Stretch(0, 100_100, 16_384, 5, 32_768),
            Stretch(0, 140_100, 16_384, 5, 49_152),
        ]
    }
    assert not found.strided
    assert schedule(CopyColumns.of([copy]), CHAINS, None, expand=False).strided == [copy]
    assert schedule(CopyColumns.of([copy._replace(run=64)]), CHAINS, None).strided == [copy._replace(run=64)]


@pytest.mark.parametrize("wanted", [{0}, {1}, {0, 1}, set()])
def test_what_temporaries_need(wanted: set[int]) -> None:
    """Buffer 0 reads temporary 2, which reads temporary 3 and a file."""
    rows = [
        Copy(0, 1, 0, 0, 1, 0, ()),
        Copy(0, 3, 4, 0, 2, 0, ()),
        Copy(-4, 2, 0, 0, 2, 0, ()),
        Copy(-3, 0, 0, 0, 2, 0, ()),
    ]
    columns = CopyColumns.of(rows)
    found = schedule(columns, CHAINS, needed(Section((), columns), wanted))
    assert set(found.whole) == {n for n, need in ((1, 1 in wanted), (3, 0 in wanted)) if need}
    assert found.later == (rows[2:] if 0 in wanted else [])
