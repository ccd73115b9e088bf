"""How dims are cut over ranks: tables of styles, and for every cut that is made, that ranks tile the dim.

Written out by hand after cases B41, B43, B44 and B45; uneven parts
are compared with `torch.chunk`.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadplan.compiler.patterns import PatternError
from loadplan.compiler.shard import REPLICATED, Shard, ShardError, heads, parse_style
from loadplan.runtime.plan import Intervals

CUTS: list[tuple[str | Shard, tuple[int, ...], int, tuple[int, tuple[Intervals, ...]] | None]] = [
    # column-parallel: rows of a matrix, and biases; of stacked experts, rows of each
    ("colwise", (6, 4), 2, (0, (((0, 3),), ((3, 6),)))),
    ("colwise", (6,), 2, (0, (((0, 3),), ((3, 6),)))),
    ("colwise", (5, 6, 4), 3, (1, (((0, 2),), ((2, 4),), ((4, 6),)))),
    ("colwise", (), 2, None),
    # row-parallel: columns; one-dimensional parameters stay whole, whatever they are called
    ("rowwise", (4, 6), 2, (1, (((0, 3),), ((3, 6),)))),
    ("rowwise", (4,), 2, None),
    ("rowwise", (7,), 2, None),
    ("rowwise", (), 3, None),
    ("rowwise", (2, 3, 4), 4, (2, (((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)))),
    # gate and up in one matrix: a part of each
    ("packed_colwise", (8, 3), 2, (0, (((0, 2), (4, 6)), ((2, 4), (6, 8))))),
    ("packed_colwise", (3, 8, 2), 2, (1, (((0, 2), (4, 6)), ((2, 4), (6, 8))))),
    ("packed_rowwise", (3, 8), 4, (1, (((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8))))),
    ("packed_rowwise", (8,), 2, None),
    # vocabularies need not divide: as torch.chunk cuts, the last ranks may hold less, or nothing
    ("embedding_rowwise", (5, 2), 2, (0, (((0, 3),), ((3, 5),)))),
    ("embedding_rowwise", (5, 2), 4, (0, (((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)))),
    ("embedding_rowwise", (1, 2), 3, (0, (((0, 1),), ((1, 1),), ((1, 1),)))),
    ("embedding_rowwise", (0, 2), 2, (0, (((0, 0),), ((0, 0),)))),
    ("embedding_rowwise", (6,), 2, None),
    ("replicated", (8, 8), 4, None),
    # whole attention heads
    (heads(4), (8, 16), 2, (0, (((0, 4),), ((4, 8),)))),
    (heads(4), (16,), 2, (0, (((0, 8),), ((8, 16),)))),
    (Shard(-2, unit=3, uneven=True), (9, 2), 2, (0, (((0, 6),), ((6, 9),)))),
    # groups that do not divide, but may be uneven: each group by itself
    (Shard(-2, groups=2, uneven=True), (6, 2), 2, (0, (((0, 2), (3, 5)), ((2, 3), (5, 6))))),
    (
        Shard(-2, groups=2, uneven=True),
        (6, 2),
        4,
        (0, (((0, 1), (3, 4)), ((1, 2), (4, 5)), ((2, 3), (5, 6)), ((3, 3), (6, 6)))),
    ),
    (Shard(-3), (4, 3, 2), 2, (0, (((0, 2),), ((2, 4),)))),
    # one rank holds all, whatever would not divide
    ("colwise", (7, 3), 1, None),
    ("packed_colwise", (5, 3), 1, None),
]

REFUSED: list[tuple[str | Shard, tuple[int, ...], int, str]] = [
    ("colwise", (5, 4), 2, "5 positions on dim 0 of [5, 4] do not divide by 2 ranks"),
    ("colwise", (3,), 2, "3 positions on dim 0 of [3] do not divide by 2 ranks"),
    ("rowwise", (4, 6), 4, "6 positions on dim 1 of [4, 6] do not divide by 4 ranks"),
    ("packed_colwise", (6, 2), 4, "3 positions on dim 0 of [6, 2] do not divide by 4 ranks"),
    ("packed_colwise", (5, 2), 2, "dim 0 of [5, 2] is not made of 2 equal parts"),
    (Shard(-2, groups=2, uneven=True, one_dim=True), (5,), 2, "dim 0 of [5] is not made of 2 equal parts"),
    ("packed_rowwise", (2, 5), 2, "dim 1 of [2, 5] is not made of 2 equal parts"),
    (heads(4), (8, 16), 4, "2 units of 4 (heads) on dim 0 of [8, 16] do not divide by 4 ranks"),
    (heads(4), (8,), 4, "2 units of 4 (heads) on dim 0 of [8] do not divide by 4 ranks"),
    (heads(4), (12, 16), 2, "3 units of 4 (heads) on dim 0 of [12, 16] do not divide by 2 ranks"),
    (heads(4), (10, 16), 2, "10 positions on dim 0 of [10, 16] are not whole units of 4"),
    (heads(4), (2,), 2, "2 positions on dim 0 of [2] are not whole units of 4"),
    (Shard(-3), (4, 6), 2, "[4, 6] has no dim -3"),
]


@pytest.mark.parametrize(("style", "shape", "ranks", "wanted"), CUTS)
def test_cuts(
    style: str | Shard, shape: tuple[int, ...], ranks: int, wanted: tuple[int, tuple[Intervals, ...]] | None
) -> None:
    assert parse_style(style).cut(shape, ranks) == wanted


@pytest.mark.parametrize(("style", "shape", "ranks", "message"), REFUSED)
def test_what_does_not_divide_is_refused_with_the_numbers(
    style: str | Shard, shape: tuple[int, ...], ranks: int, message: str
) -> None:
    with pytest.raises(ShardError, match=f"^{re.escape(message)}$"):
        parse_style(style).cut(shape, ranks)


@given(
    st.builds(
        Shard,
        st.sampled_from((None, -1, -2, -3)),
        one_dim=st.booleans(),
        groups=st.integers(1, 3),
        unit=st.integers(1, 4),
        uneven=st.booleans(),
    ),
    st.lists(st.integers(0, 24), max_size=3).map(tuple),
    st.integers(1, 6),
)
def test_ranks_tile_the_dim_or_the_cut_is_refused(shard: Shard, shape: tuple[int, ...], ranks: int) -> None:
    try:
        cut = shard.cut(shape, ranks)
    except ShardError:
        return
    if cut is None:
        whole = shard.dim is None or ranks == 1 or not shape or (len(shape) == 1 and not shard.one_dim)
        assert whole
        return
    dim, held = cut
    part = shape[dim] // shard.groups
    assert len(held) == ranks
    owned = [[at for low, high in intervals for at in range(low, high)] for intervals in held]
    assert sorted(at for places in owned for at in places) == list(range(shape[dim]))
    for intervals, places in zip(held, owned, strict=True):
        assert places == sorted(places)
        assert all(0 <= low <= high for low, high in intervals)
        assert all((at % part) % shard.unit == 0 for low, high in intervals for at in (low, high) if part)
        per_group = [sum(at // part == group for at in places) for group in range(shard.groups)] if part else [0]
        assert len(set(per_group)) == 1  # a local tensor has the same parts
    sizes = [len(places) for places in owned]
    assert sizes == sorted(sizes, reverse=True)
    if not shard.uneven:
        assert len(set(sizes)) == 1


@pytest.mark.parametrize("size", [1, 5, 6, 7, 12])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uneven_parts_are_those_of_torch_chunk(size: int, ranks: int) -> None:  # cases B44
    embedding = parse_style("embedding_rowwise")
    found = embedding.cut((size, 8), ranks)
    assert found is not None
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    sizes = [sum(high - low for low, high in intervals) for intervals in found[1]]
    assert sizes == chunks + [0] * (ranks - len(chunks))


@pytest.mark.parametrize(
    ("dim", "groups", "unit"), [(0, 1, 1), (1, 1, 1), (-1, 0, 1), (-1, -2, 1), (-2, 1, 0), (None, 0, 1), (-1, 1, -4)]
)
def test_a_shard_that_means_nothing_is_refused_when_it_is_made(dim: int | None, groups: int, unit: int) -> None:
    with pytest.raises(PatternError, match=r"dim is counted from the back \(-1 the last\), groups and unit are counts"):
        Shard(dim, groups=groups, unit=unit)


def test_styles_by_name_and_by_value() -> None:
    assert parse_style("replicated") is REPLICATED
    assert parse_style(heads(64)) == Shard(-2, one_dim=True, unit=64)
    known = "colwise, rowwise, packed_colwise, packed_rowwise, embedding_rowwise, replicated"
    with pytest.raises(
        PatternError, match=f"^'colwize' is not a tensor-parallel style; known are {known}, or pass a Shard$"
    ):
        parse_style("colwize")
