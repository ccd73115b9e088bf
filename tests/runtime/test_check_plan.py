"""The proof of plans against a simulation that looks at every byte.

Whatever the simulation finds wrong, the proof must refuse. The proof may refuse more: what is right by chance only,
such as loops that go nowhere.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
from builders import BITS, raw, write_shards
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import tilings

from loadplan.compiler import pieces
from loadplan.compiler.ops import Chunk, Concatenate, FoldBatchNorm, MergeModulelist, Reshape, Transpose
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import WeightConverter
from loadplan.compiler.target import Target
from loadplan.runtime import check_plan
from loadplan.runtime.check_plan import Area as ProvedArea
from loadplan.runtime.check_plan import check_head, check_section, covers
from loadplan.runtime.dtype import DType
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Compute, Copy, CopyColumns, Head, Loop, PlanFile, PlanTensor, Report, Section
from loadplan.runtime.plan_format import PlanError
from loadplan.runtime.tensor_type import TensorType


class Unsound(Exception):
    """What the simulation finds."""


def simulate(head: Head, section: Section, rank: int) -> None:
    """Run the copies on byte maps.

    Raises:
        Unsound: an element is not written exactly once, something reaches outside, or bytes are read before they are
            written or through another dtype.
    """
    kinds = [*(tensor.local_type(rank) for tensor in head.tensors), *section.temporaries]
    sizes = [prod(kind.shape) * BITS[kind.dtype] // 8 for kind in kinds]
    times = [bytearray(size) for size in sizes]  # how often each byte was written
    computes = list(section.computes)
    for copy in section.copies:
        for compute in [c for c in computes if -1 - copy.source in c.outputs]:
            _simulate_compute(compute, kinds, times)
            computes.remove(compute)
        if not (0 <= copy.chain < len(head.chains) and 0 <= copy.buffer < len(kinds)):
            raise Unsound("chain or buffer")
        chain = head.chains[copy.chain]
        if chain[-1] != kinds[copy.buffer].dtype:
            raise Unsound("dtype of the buffer")
        if (
            copy.source >= len(head.files)
            or -1 - copy.source >= len(kinds)
            or 0 <= -1 - copy.source < len(head.tensors)
        ):
            raise Unsound("source")
        if copy.source < 0 and kinds[-1 - copy.source].dtype != chain[0]:
            raise Unsound("dtype of the temporary")
        if copy.run * prod(loop.extent for loop in copy.loops) > 1000:
            raise Unsound("more elements than any buffer here")
        before = None if copy.source >= 0 else bytes(times[-1 - copy.source])
        size = head.files[copy.source].size if copy.source >= 0 else sizes[-1 - copy.source]
        for read, written in _stretches(copy, BITS[chain[0]], BITS[chain[-1]], is_file=copy.source >= 0):
            if read.start < 0 or read.stop > size or written.start < 0 or written.stop > sizes[copy.buffer]:
                raise Unsound("reaches outside")
            if before is not None and set(before[read.start : read.stop]) != {1}:
                raise Unsound("reads what is not written yet")
            for place in written:
                if times[copy.buffer][place]:
                    raise Unsound("written twice")
                times[copy.buffer][place] = 1
    for compute in computes:
        _simulate_compute(compute, kinds, times)
    if any(0 in found for found in times):
        raise Unsound("never written")


def _simulate_compute(compute: Compute, kinds: list[TensorType], times: list[bytearray]) -> None:
    """The only kernel there is, on tensors of two dims."""
    if compute.kernel != "fold_batch_norm" or json.loads(compute.options) != {"eps": "0.5"}:
        raise Unsound("kernel or options")
    if any(number >= len(kinds) for number in (*compute.inputs, *compute.outputs)):
        raise Unsound("reaches outside")
    if any(set(times[number]) - {1} for number in compute.inputs):
        raise Unsound("reads what is not written yet")
    weight, *others = (kinds[number] for number in compute.inputs)
    floats = {DType.F16, DType.BF16, DType.F32, DType.F64}
    right = len(weight.shape) == 2 and weight.dtype in floats and len(others) in (4, 5)
    if not right or any(kind.shape != weight.shape[:1] or kind.dtype not in floats for kind in others):
        raise Unsound("types of the inputs")
    if [kinds[number] for number in compute.outputs] != [weight, TensorType(weight.shape[:1], weight.dtype)]:
        raise Unsound("types of the outputs")
    for number in compute.outputs:
        if any(times[number]):
            raise Unsound("written twice")
        times[number][:] = b"\1" * len(times[number])


def _stretches(copy: Copy, stored: int, final: int, *, is_file: bool) -> Iterator[tuple[range, range]]:
    """Bytes read and written, once per turn of the loops; all must be whole elements of whole bytes."""
    if copy.run * stored % 8 or copy.run * final % 8:
        raise Unsound("parts of bytes")
    for turn in product(*(range(loop.extent) for loop in copy.loops)):
        step = sum(at * loop.src for at, loop in zip(turn, copy.loops, strict=True))
        place = copy.dst + sum(at * loop.dst for at, loop in zip(turn, copy.loops, strict=True))
        if (step if is_file else copy.src + step) * 8 % stored or place * 8 % final:
            raise Unsound("parts of elements")
        if copy.run > 0:
            yield (
                range(copy.src + step, copy.src + step + copy.run * stored // 8),
                range(place, place + copy.run * final // 8),
            )


def is_sound(head: Head, section: Section, rank: int) -> bool:
    try:
        simulate(head, section, rank)
    except Unsound:
        return False
    return True


MODEL = {
    "a.safetensors": {"q": raw("F32", 4, 6), "k": raw("F32", 4, 6), "n": raw("BF16", 3), "p": raw("F4", 2, 4)},
    "b.safetensors": {f"e.{number}.w": raw("BF16", 2, 4) for number in range(3)} | {"t": raw("I8", 4, 5)},
}


def _plan(folder: Path, name: str) -> Plan:
    """Small plans that use all there is: ranks, casts, strided copies, temporaries, empty and packed tensors."""
    recipe = Recipe(
        [
            WeightConverter(["q", "k"], "qk", [Concatenate(0), Transpose(0, 1)]),
            WeightConverter("e.*.w", "e", [MergeModulelist(0)]),
            WeightConverter("t", ["t0", "t1"], [Transpose(0, 1), Reshape((2, 10)), Chunk(0)]),
        ]
    )
    location = write_shards(folder, MODEL)
    match name:
        case "plain":
            return compile_plan(location)
        case "converted":
            return compile_plan(location, recipe, target=Target(dtype="bfloat16"))
        case "computed":
            norm = {f"n.{number}": raw("F32", 4, seed=number) for number in range(4)}
            write_shards(folder, {"a.safetensors": {"c": raw("BF16", 4, 2), "d": raw("F32", 4, 2), **norm}})
            recipe = Recipe([WeightConverter(["c", *norm], ["w", "b"], [FoldBatchNorm(0.5)])])
            target = Target(dtype="bfloat16", tp_size=2, tp_plan={"w": "colwise"})
            return compile_plan(location, recipe, target=target)
        case "sharded":
            target = Target(tp_size=2, tp_plan={"q": "rowwise", "k": "colwise", "e.*.w": "rowwise", "n": "replicated"})
            return compile_plan(location, target=target)
        case _:
            target = Target(tp_size=2, tp_plan={"qk": "rowwise", "e": "colwise"})
            return compile_plan(location, recipe, target=target)


PLANS = ("plain", "converted", "sharded", "both", "computed", "materialized")


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    if request.param == "materialized":
        monkeypatch.setattr(pieces, "MAX_PIECES", 3)
    return _plan(tmp_path, request.param)


def test_compiled_plans_prove(plan: Plan) -> None:
    assert list(check_head(plan.head)) == []
    for rank in range(plan.world_size):
        section = plan.section(rank)
        assert list(check_section(plan.head, section, rank)) == []
        simulate(plan.head, section, rank)


def test_plans_use_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the mutations below have something to change."""
    sections = [_plan(tmp_path, name).section(0) for name in PLANS[:-1]]
    monkeypatch.setattr(pieces, "MAX_PIECES", 3)
    made = _plan(tmp_path, "materialized").section(1)
    assert made.temporaries and any(copy.source < 0 for copy in made.copies)
    copies = [copy for section in sections for copy in section.copies]
    assert max(len(copy.loops) for copy in copies) >= 2
    assert len({copy.chain for copy in copies}) > 3 and {0, 1} < {copy.source for copy in copies}
    assert any(section.computes for section in sections)


def _changed(section: Section, name: str, row: int, value: int) -> Section:
    column = array("q", getattr(section.copies, name))
    column[row] = value
    return replace(section, copies=replace(section.copies, **{name: column}))


def _mutations(section: Section) -> Iterator[Section]:
    """Each number of each column by others near and far, each copy left out, given twice, and moved to the front."""
    for name in CopyColumns.COLUMNS:
        column: array[int] = getattr(section.copies, name)
        for row, old in enumerate(column):
            near = {old + step for step in (-24, -16, -8, -4, -2, -1, 1, 2, 4, 8, 16, 24)}
            for value in sorted((near | {0, -old, 2 * old, old // 2, 2**62, -(2**63)} | set(column)) - {old}):
                yield _changed(section, name, row, value)
    copies = list(section.copies)
    for row, copy in enumerate(copies):
        rest = copies[:row] + copies[row + 1 :]
        for others in (rest, [*copies, copy], [copy, *rest], [*rest, copy]):
            yield replace(section, copies=CopyColumns.of(others))
        for at, loop in enumerate(copy.loops):
            twice = copy._replace(loops=(*copy.loops[:at], loop, *copy.loops[at:]))
            yield replace(section, copies=CopyColumns.of([*copies[:row], twice, *copies[row + 1 :]]))
    for at, kind in enumerate(section.temporaries):
        for other in (
            TensorType((*kind.shape, 2), kind.dtype),
            TensorType((1,), kind.dtype),
            TensorType((4,), DType.I8),
        ):
            yield replace(section, temporaries=(*section.temporaries[:at], other, *section.temporaries[at + 1 :]))
    for at, compute in enumerate(section.computes):
        without = (*section.computes[:at], *section.computes[at + 1 :])
        yield replace(section, computes=without)
        yield replace(section, computes=(*section.computes, compute))
        yield from (replace(section, computes=(*without, changed)) for changed in _changed_computes(compute))
    yield replace(section, temporaries=(*section.temporaries, TensorType((2,), DType.F32)))
    yield replace(section, temporaries=section.temporaries[:-1])


def _changed_computes(compute: Compute) -> Iterator[Compute]:
    yield replace(compute, kernel="other")
    yield replace(compute, options='{"eps":"7"}')
    for inputs in _changed_numbers(compute.inputs):
        yield replace(compute, inputs=inputs)
    for outputs in _changed_numbers(compute.outputs):
        yield replace(compute, outputs=outputs)


def _changed_numbers(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield numbers[:-1]
    yield (*numbers, numbers[0])
    for place, value in product(range(len(numbers)), (*range(12), 2**62)):
        yield (*numbers[:place], value, *numbers[place + 1 :])


def test_mutations_are_found(plan: Plan) -> None:
    """Of a section with one change, each that the simulation finds unsound is refused; through the file, as hostile
    writers would bring it."""
    refused = proved = 0
    for rank in range(plan.world_size):
        sections = [plan.section(other) for other in range(plan.world_size)]
        for mutant in _mutations(plan.section(rank)):
            sections[rank] = mutant
            try:
                found = Plan.of(plan.head, tuple(sections)).section(rank)
            except PlanError:
                refused += 1
                continue
            assert is_sound(plan.head, found, rank), list(found.copies)
            proved += 1
    assert refused > 500
    assert proved > 10  # another place in the file, for one, is no fault that a proof can see


def test_refusals_are_not_blanket(plan: Plan) -> None:
    """Of mutants that are sound, only those are refused that no compiler writes."""
    for rank in range(plan.world_size):
        for name in ("src", "dst", "source", "run"):
            column = getattr(plan.section(rank).copies, name)
            for row in range(len(column)):
                for step in (-8, -4, -1, 1, 4, 8):
                    mutant = _changed(plan.section(rank), name, row, column[row] + step)
                    if is_sound(plan.head, mutant, rank):
                        faults = list(check_section(plan.head, mutant, rank))
                        assert all(any(reason in fault for reason in ODD) for fault in faults), faults


def _small_head(*tensors: PlanTensor, size: int = 64, world_size: int = 1) -> Head:
    return Head(
        files=(PlanFile("m.safetensors", size, "safetensors", ((0, 8),), "0" * 64),),
        tensors=tensors,
        aliases=(),
        equal_ties=(),
        chains=((DType.F32,), (DType.F32, DType.BF16), (DType.F4,), (DType.U8,)),
        world_size=world_size,
        report=Report(),
    )


ODD = ("goes nowhere", "backwards", "before it is complete", "reads a file after")
"""What the proof says of copies that may be right by chance, and that no compiler writes."""

F32_4 = PlanTensor("w", TensorType((4,), DType.F32))


@pytest.mark.parametrize(
    ("copy", "says"),
    [
        (Copy(0, 0, 8, 0, 4, 0, ()), None),
        (Copy(0, 0, 7, 0, 4, 0, ()), None),  # a file may hold it misaligned
        (Copy(0, 0, 48, 0, 4, 0, ()), None),
        (Copy(0, 0, 8, 0, 1, 0, (Loop(4, 8, 4),)), None),
        (Copy(0, 0, 8, 0, 1, 0, (Loop(4, 0, 4),)), None),  # an expanded tensor
        (Copy(0, 0, 49, 0, 4, 0, ()), "reads up to byte 65 of 64"),
        (Copy(0, 0, 8, 0, 1, 0, (Loop(4, 20, 4),)), "reads up to byte 72 of 64"),
        (Copy(0, 0, 8, 4, 4, 0, ()), "writes up to byte 20 of 16"),
        (Copy(0, 0, 8, 0, 3, 0, ()), "3 elements are written, it has 4"),
        (Copy(0, 0, 8, 0, 2, 0, (Loop(2, 8, 4),)), "element 1 is written twice"),
        (Copy(1, 0, 8, 0, 4, 0, ()), "has no source 1"),
        (Copy(-1, 0, 8, 0, 4, 0, ()), "has no source -1"),  # a tensor is no temporary
        (Copy(-2, 0, 8, 0, 4, 0, ()), "has no source -2"),
        (Copy(0, 1, 8, 0, 4, 0, ()), "has no buffer 1"),
        (Copy(0, -1, 8, 0, 4, 0, ()), "has no buffer -1"),
        (Copy(0, 0, 8, 0, 4, 4, ()), "no dtype chain 4"),
        (Copy(0, 0, 8, 0, 4, -1, ()), "no dtype chain -1"),
        (Copy(0, 0, 8, 0, 4, 1, ()), "writes BF16 into a buffer of F32[4]"),
        (Copy(0, 0, -8, 0, 4, 0, ()), "negative offset"),
        (Copy(0, 0, 8, 0, 0, 0, ()), "nothing to copy"),
        (Copy(0, 0, 8, 0, 4, 0, (Loop(1, 4, 4),)), "goes nowhere"),
        (Copy(0, 0, 48, 12, 1, 0, (Loop(4, 4, -4),)), "backwards"),
        (Copy(0, 0, 48, 0, 1, 0, (Loop(4, -4, 4),)), "backwards"),
        (Copy(0, 0, 8, 0, 1, 0, (Loop(4, 6, 4),)), "does not step by whole elements of F32"),
        (Copy(0, 0, 8, 2, 1, 0, (Loop(2, 4, 4),)), "does not step by whole elements of F32"),
    ],
)
def test_one_copy(copy: Copy, says: str | None) -> None:
    section = Section((), CopyColumns.of([copy]))
    faults = list(check_section(_small_head(F32_4), section, 0))
    if says is None:
        simulate(_small_head(F32_4), section, 0)
        assert faults == []
    else:
        assert says in ODD or not is_sound(_small_head(F32_4), section, 0)
        assert len(faults) == 1 and says in faults[0]


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        ([(0, 1, 8, 0, 4, 0), (-2, 0, 0, 0, 4, 0)], None),
        ([(-2, 0, 0, 0, 4, 0), (0, 1, 8, 0, 4, 0)], "reads a file after temporaries"),
        ([(0, 1, 8, 0, 4, 0), (-2, 0, 0, 0, 2, 0), (-2, 0, 8, 8, 2, 0)], None),
        ([(0, 1, 8, 0, 2, 0), (-2, 0, 0, 0, 4, 0)], "2 elements are written, it has 4"),
        ([(0, 1, 8, 0, 2, 0), (-2, 0, 0, 0, 4, 0), (-2, 1, 0, 8, 2, 0)], "before it is complete"),
        ([(0, 1, 8, 0, 4, 0), (-2, 0, 2, 0, 3, 0), (-2, 0, 0, 12, 1, 0)], "does not step by whole elements"),
        ([(0, 1, 8, 0, 4, 0), (-2, 0, 4, 0, 4, 0)], "reads up to byte 20 of 16"),
        ([(0, 1, 8, 0, 4, 0), (-2, 0, 0, 0, 16, 3)], "writes U8 into a buffer of F32[4]"),
    ],
)
def test_temporaries(copies: list[tuple[int, int, int, int, int, int]], says: str | None) -> None:
    section = Section((TensorType((4,), DType.F32),), CopyColumns.of([Copy(*copy, ()) for copy in copies]))
    faults = list(check_section(_small_head(F32_4), section, 0))
    assert is_sound(_small_head(F32_4), section, 0) is (says is None)
    assert bool(faults) is (says is not None)
    if says is not None:
        assert says in faults[0]


def test_temporaries_keep_their_dtype() -> None:
    """Bytes are not read as floats."""
    copies = [Copy(0, 1, 8, 0, 16, 3, ()), Copy(-2, 0, 0, 0, 4, 0, ())]
    section = Section((TensorType((16,), DType.U8),), CopyColumns.of(copies))
    assert not is_sound(_small_head(F32_4), section, 0)
    assert list(check_section(_small_head(F32_4), section, 0)) == ["copy 1: reads F32 from a temporary of U8[16]"]


def test_packed_elements_move_as_bytes() -> None:
    head = _small_head(PlanTensor("w", TensorType((8,), DType.F4)))
    for run, loops, wanted in ((8, (), True), (4, (Loop(2, 3, 2),), True), (1, (Loop(8, 1, 1),), False)):
        section = Section((), CopyColumns.of([Copy(0, 0, 8, 0, run, 2, loops)]))
        assert is_sound(head, section, 0) is wanted
        assert bool(list(check_section(head, section, 0))) is not wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"aliases": (("v", "w"),)}, None),
        ({"aliases": (("v", "x"),)}, "does not name a tensor"),
        ({"aliases": (("w", "w"),)}, "hides one"),
        ({"aliases": (("v", "w"), ("v", "w"))}, "an alias is given twice"),
        ({"equal_ties": (("w",),)}, "does not name tensors"),
        ({"equal_ties": (("w", "x"),)}, "does not name tensors"),
        ({"tensors": (F32_4, F32_4)}, "not unique"),
        ({"tensors": (F32_4, F32_4._replace(name="a"))}, "not in order"),
        ({"chains": ((),)}, "casts what cannot be cast"),
        ({"chains": ((DType.I8, DType.F32),)}, "casts what cannot be cast"),
        ({"chains": ((DType.F32, DType.F8_E4M3),)}, "casts what cannot be cast"),
        ({"chains": ((DType.F32, DType.F16, DType.BF16),)}, None),
        ({"tensors": (F32_4._replace(intervals=(((0, 4),),)),)}, "intervals without a dim"),
        ({"tensors": (F32_4._replace(shard_dim=0),)}, "intervals for 0 of 1 ranks"),
    ],
)
def test_head(change: Mapping[str, object], says: str | None) -> None:
    faults = list(check_head(replace(_small_head(F32_4), **change)))  # type: ignore[arg-type]
    assert len(faults) == (says is not None)
    if says is not None:
        assert says in faults[0]


def test_two_files_of_one_name() -> None:
    head = _small_head(F32_4)
    assert list(check_head(replace(head, files=head.files * 2))) == ["a file is named twice"]


Spans = tuple[tuple[tuple[int, int], ...], ...]


@st.composite
def spans_of_ranks(draw: st.DrawFn) -> tuple[int, Spans]:
    """A size and intervals that tile it over the ranks, one bound moved now and then."""
    bounds = sorted(draw(st.lists(st.integers(0, 8), min_size=2, max_size=6)))
    spans = [[low - bounds[0], high - bounds[0]] for low, high in pairwise(bounds)]
    if draw(st.booleans()):
        span, end = draw(st.sampled_from(spans)), draw(st.integers(0, 1))
        span[end] = max(span[end] + draw(st.integers(-2, 2)), 0)
    held: list[list[tuple[int, int]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for low, high in draw(st.permutations(spans)):
        draw(st.sampled_from(held)).append((low, high))
    return bounds[-1] - bounds[0], tuple(map(tuple, held))


@given(
    case=spans_of_ranks()
    | st.tuples(
        st.integers(0, 6),
        st.lists(
            st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=2).map(tuple), min_size=1, max_size=3
        ).map(tuple),
    ),
    missing=st.sampled_from([0, 0, 0, 1]),
)
@example(case=(4, (((0, 1),), ((2, 4),))), missing=0)
@example(case=(4, (((0, 3),), ((2, 4),))), missing=0)
@example(case=(4, (((1, 2),), ((2, 4),))), missing=0)
def test_any_intervals(case: tuple[int, Spans], missing: int) -> None:
    """Both verdicts agree with a count of each position; an interval that is empty counts nowhere."""
    size, intervals = case
    world_size = len(intervals) + missing
    tensor = PlanTensor("w", TensorType((2, size), DType.F32), 1, intervals)
    spans = [span for spans in intervals for span in spans]
    held = Counter(place for low, high in spans for place in range(low, high))
    tiles = (
        len(intervals) == world_size
        and all(low <= high for low, high in spans)
        and held == Counter(dict.fromkeys(range(size), 1))
    )
    assert (not list(check_head(_small_head(tensor, world_size=world_size)))) is tiles


@pytest.mark.parametrize(
    "intervals",
    [
        (((0, 2),), ((2, 4),)),
        (((0, 1), (2, 3)), ((1, 2), (3, 4))),
        (((0, 4),), ()),
        (((0, 4),), ((4, 4),)),
        (((2, 4),), ((0, 2),)),
    ],
)
def test_ranks_that_tile(intervals: Spans) -> None:
    tensor = PlanTensor("w", TensorType((4,), DType.F32), 0, intervals)
    assert list(check_head(_small_head(tensor, world_size=2))) == []


Area = tuple[int, int, tuple[tuple[int, int], ...]]


def _covered(numel: int, areas: list[Area]) -> bool:
    """Whether each element is written once, counted one by one."""
    times: Counter[int] = Counter()
    for start, run, loops in areas:
        for turn in product(*(range(extent) for extent, _ in loops)):
            first = start + sum(at * step for at, (_, step) in zip(turn, loops, strict=True))
            times.update(range(first, first + run))
    return times == Counter(dict.fromkeys(range(numel), 1))


def _verdict(numel: int, areas: list[Area]) -> bool:
    ordered = [ProvedArea(start, run, tuple(sorted(loops, key=lambda loop: -loop[1]))) for start, run, loops in areas]
    return covers(numel, ordered) is None


@given(tiling=tilings())
def test_tilings_cover(tiling: tuple[int, list[Area]]) -> None:
    numel, areas = tiling
    assert _covered(numel, areas)
    assert _verdict(numel, areas)


@given(tiling=tilings(), data=st.data())
def test_changed_tilings(tiling: tuple[int, list[Area]], data: st.DataObject) -> None:
    """One number of one area changed: both verdicts agree."""
    numel, areas = tiling
    at = data.draw(st.integers(0, len(areas) - 1))
    start, run, loops = areas[at]
    kinds = ["start", "run", "numel", "drop", "twice", "swap", *(["loop", "step"] if loops else [])]
    what = data.draw(st.sampled_from(kinds))
    match what:
        case "start":
            areas[at] = (max(start + data.draw(st.integers(-3, 3)), 0), run, loops)
        case "run":
            areas[at] = (start, max(run + data.draw(st.integers(-2, 2)), 1), loops)
        case "numel":
            numel = max(numel + data.draw(st.integers(-2, 2)), 0)
        case "drop":
            areas.pop(at)
        case "twice":
            areas.append(areas[at])
        case "swap":
            other = data.draw(st.integers(0, len(areas) - 1))
            areas[at], areas[other] = (areas[other][0], *areas[at][1:]), (start, *areas[other][1:])
        case "step":  # the same change in all areas
            (_, old), new = data.draw(st.sampled_from(loops)), data.draw(st.integers(1, 12))
            areas = [
                (start, run, tuple((extent, new if step == old else step) for extent, step in loops))
                for start, run, loops in areas
            ]
        case _:
            turn = data.draw(st.integers(0, len(loops) - 1))
            extent, step = loops[turn]
            loop = (max(extent + data.draw(st.integers(-1, 1)), 2), max(step + data.draw(st.integers(-4, 4)), 1))
            areas[at] = (start, run, (*loops[:turn], loop, *loops[turn + 1 :]))
    assert _verdict(numel, areas) is _covered(numel, areas)


@given(
    numel=st.integers(0, 12),
    areas=st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(2, 4), st.integers(1, 8)), max_size=2).map(tuple),
        ),
        max_size=3,
    ),
)
def test_any_areas(numel: int, areas: list[Area]) -> None:
    assert _verdict(numel, areas) is _covered(numel, areas)


def test_loops_that_leave_a_gap() -> None:
    """Two steps of 5 are no four steps of 2."""
    areas: list[Area] = [(0, 1, ((2, 5), (2, 2))), (1, 1, ((2, 5), (2, 2)))]
    assert not _verdict(8, areas)


def _woven(count: int, start: int = 0) -> list[Area]:
    """Areas that write `4 * count` elements once each, and that no step of the proof takes apart."""
    loop = ((count, 4),)
    return [(start, 1, ((2 * count, 2),)), (start + 1, 1, loop), (start + 3, 1, loop)]


def test_too_many_runs() -> None:
    """Refused before they are counted out."""
    areas = _woven(5_000_000)
    assert "cannot be proved" in str(covers(20_000_000, [ProvedArea(*area) for area in areas]))
    assert _verdict(4_000, _woven(1_000))
    assert not _verdict(4_000, [*_woven(1_000)[:2], (1, 1, ((1_000, 4),))])


def test_large_areas_are_told_apart_and_folded() -> None:
    """In no time, however many elements there are: experts behind each other, halves of their rows side by side."""
    rows, half, count = 1 << 20, 1 << 10, 64
    size = rows * 2 * half
    areas: list[Area] = [
        (expert * size + side * half, half, ((rows, 2 * half),)) for expert in range(count) for side in range(2)
    ]
    assert _verdict(count * size, areas)
    for at in (0, 1, 77, len(areas) - 1):
        start, run, loops = areas[at]
        for wrong in ((start + 1, run, loops), (start, run, ((rows - 1, 2 * half),)), areas[at ^ 1]):
            assert not _verdict(count * size, [*areas[:at], wrong, *areas[at + 1 :]])
    assert _verdict(10_000_001, [(0, 1, ((5_000_000, 2),)), (1, 1, ((5_000_000, 2),)), (10_000_000, 1, ())])


def test_runs_are_counted_over_all_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file with many buffers, each just provable, would take hours."""
    monkeypatch.setattr(check_plan, "_MAX_RUNS", 100_000)
    monkeypatch.setattr(check_plan, "_RUNS_PER_COPY", 0)
    kind = TensorType((40_000,), DType.U8)
    tensors = [PlanTensor(f"w{number}", kind) for number in range(4)]
    copies = [
        Copy(0, number, 8, start, run, 3, tuple(Loop(extent, 1, step) for extent, step in loops))
        for number in range(4)
        for start, run, loops in _woven(10_000)
    ]
    section = Section((), CopyColumns.of(copies))
    faults = list(check_section(_small_head(*tensors, size=1 << 20), section, 0))
    assert [fault[:27] for fault in faults] == ["w2: its copies fall apart i", "w3: its copies fall apart i"]
    assert not list(check_section(_small_head(*tensors[:2], size=1 << 20), Section((), CopyColumns.of(copies[:6])), 0))


@pytest.mark.parametrize("count", [63, 10_000])
def test_loops_without_end(count: int) -> None:
    """Their turns multiply to numbers that take hours to compute, and that Python refuses to print."""
    head = _small_head(PlanTensor("w", TensorType((1 << 40,), DType.U8)))
    copy = Copy(0, 0, 8, 0, 1, 3, (Loop(2, 0, 1),) * count)
    faults = list(check_section(head, Section((), CopyColumns.of([copy])), 0))
    assert faults == [f"copy 0: has {count} loops, more than any buffer has room for"]


def test_products_past_64_bits() -> None:
    """Loops that are each inside the buffer, and together more than any."""
    head = _small_head(PlanTensor("w", TensorType((1 << 40,), DType.U8)))
    loops = (Loop(1 << 39, 0, 1),) + (Loop(1 << 30, 0, 1),) * 61
    (fault,) = check_section(head, Section((), CopyColumns.of([Copy(0, 0, 8, 0, 1, 3, loops)])), 0)
    assert f"w: {2 ** (39 + 30 * 61)} elements are written" in fault
    wrap = [Loop(2, 2**62, 2**62), Loop(2, 2**62, 2**62), Loop(2, 2**62, 2**62)]
    (fault,) = check_section(head, Section((), CopyColumns.of([Copy(0, 0, 8, 0, 1, 3, tuple(wrap))])), 0)
    assert f"reads up to byte {3 * 2**62 + 9} of 64" in fault
