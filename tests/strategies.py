"""Hypothesis strategies: op graphs over stored tensors, and cuts of a dim over ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import prod

import torch
from hypothesis import strategies as st

from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Op, Stored, Value, apply
from loadplan.compiler.ops import (
    Cast,
    Chunk,
    Concatenate,
    Conv3dToLinear,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    Permute,
    PermuteForRope,
    Reshape,
    Slice,
    Split,
    SplitModulelist,
    Transpose,
)
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import (
    Compute,
    Copy,
    CopyColumns,
    FusedModule,
    Head,
    Intervals,
    Loop,
    ModelRecord,
    PlanFile,
    PlanTensor,
    Report,
    Section,
)
from loadplan.runtime.tensor_type import TensorType, row_major
from loadplan.runtime.torch_types import torch_dtype

FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
FILE = "weights"


@dataclass(frozen=True)
class Graph:
    """Stored tensors in one file, and values made of them, in the order in which they were made."""

    entries: dict[str, Entry]
    values: tuple[Value, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return max(entry.offset + storage_numel(entry) * entry.type.dtype.itemsize for entry in self.entries.values())


def storage_numel(entry: Entry) -> int:
    """Elements from the first of `entry` to its last, as its strides reach."""
    shape = entry.type.shape
    if 0 in shape:
        return 0
    strides = row_major(shape) if entry.strides is None else entry.strides
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def stored_tensor(entry: Entry, storage: torch.Tensor) -> torch.Tensor:
    """The tensor of `entry`, as a view of its storage."""
    return storage.as_strided(entry.type.shape, entry.strides or row_major(entry.type.shape))


def unlike_values(index: int, numel: int, dtype: DType) -> torch.Tensor:
    """Values of storage number `index` (below 4) that differ from those of other numbers; floats round when cast."""
    if dtype.is_float:
        steps = torch.arange(1, numel + 1, dtype=torch.float64) * 1.1
        return (steps * (1, 256, -1, -256)[index]).to(torch_dtype(dtype))
    return (torch.arange(numel) + 64 * index).to(torch_dtype(dtype))


_EXTENTS = st.sampled_from((2, 3, 4, 5, 6, 2, 3, 4, 1, 6, 3, 2, 4, 5, 7, 1, 0))
_MAX_NUMEL = 120


@st.composite
def shapes(draw: st.DrawFn, max_ndim: int = 4) -> tuple[int, ...]:
    """Small shapes, some with sizes 0 and 1."""
    shape: tuple[int, ...] = ()
    for _ in range(draw(st.integers(0, max_ndim))):
        size = draw(_EXTENTS)
        if prod(shape) * size <= _MAX_NUMEL:
            shape = (*shape, size)
    return shape


def factorings(numel: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `numel` elements."""
    if numel == 0:
        return st.sampled_from(((0,), (0, 3), (2, 0), (4, 0, 2)))

    @st.composite
    def factored(draw: st.DrawFn) -> tuple[int, ...]:
        rest, shape = numel, list[int]()
        while rest > 1 and len(shape) < 5:
            size = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
            shape.append(size)
            rest //= size
        return (*shape, rest) if rest > 1 else tuple(shape)

    return factored()


@st.composite
def entries(draw: st.DrawFn, name: str, offset: int, dtype: DType) -> Entry:
    """A stored tensor: dense, or with strides as torch writes them (permuted, with gaps, broadcast)."""
    shape = draw(shapes())
    kind = draw(st.sampled_from(("dense", "dense", "permuted", "gaps")))
    strides: tuple[int, ...] | None = None
    if kind == "permuted" and shape:
        order = draw(st.permutations(range(len(shape))))
        dense = row_major(tuple(shape[dim] for dim in order))
        strides = tuple(dense[order.index(dim)] for dim in range(len(shape)))
    elif kind == "gaps":
        strides = tuple(draw(st.sampled_from((0, 1, 2, 3, 7))) for _ in shape)
    return Entry(name, TensorType(shape, dtype), FILE, offset + draw(st.integers(0, 3)), strides)


@st.composite
def graphs(
    draw: st.DrawFn, dtypes: Sequence[DType], max_steps: int = 7, max_join: int = 3, fine: bool = False
) -> Graph:
    """Random op chains; every step may read any value so far, the latest for preference.

    `fine` ones have only ops that take tensors apart into many pieces.
    """
    stored: dict[str, Entry] = {}
    values: list[Value] = []
    offset = 0
    dtype = draw(st.sampled_from(dtypes))
    for number in range(draw(st.integers(1, 3))):
        entry = draw(entries(f"t{number}", offset, dtype))
        stored[entry.name] = entry
        offset = entry.offset + storage_numel(entry) * entry.type.dtype.itemsize
        values.append(apply(Stored(entry.name, entry.type))[0])
    casts = [dtype for dtype in dtypes if dtype.is_float]
    for _ in range(draw(st.integers(max_steps // 2 if fine else 1, max_steps))):
        value = values[-1] if draw(st.integers(0, 3)) else draw(st.sampled_from(values))
        op, args = draw(steps(value, values, casts, max_join, fine))
        values.append(draw(st.sampled_from(apply(op, *args) or (value,))))
    return Graph(stored, tuple(values))


@st.composite
def steps(
    draw: st.DrawFn, value: Value, values: Sequence[Value], casts: Sequence[DType], max_join: int, fine: bool
) -> tuple[Op, tuple[Value, ...]]:
    """An op that fits `value`, and its arguments."""
    names = _fitting(value.type, casts)
    op = draw(st.sampled_from([name for name in names if name in _FINE] if fine else names))
    if op in ("concatenate", "merge"):
        return draw(joins(value, values, op, max_join))
    return draw(unary(op, value.type, casts)), (value,)


_FINE = ("concatenate", "merge", "reshape", "transpose", "interleave", "slice", "cast")


def _fitting(kind: TensorType, casts: Sequence[DType]) -> list[str]:
    """Names of ops that fit a tensor of type `kind`; those that cut pieces finest are named twice."""
    ndim = len(kind.shape)
    names = ["reshape", "reshape", "merge"]
    if ndim:
        names += ["permute", "transpose", "slice", "slice", "split", "chunk", "concatenate", "concatenate", "unmerge"]
    if any(size % 2 == 0 for size in kind.shape):
        names += ["interleave", "interleave"]
    if ndim in (1, 2) and kind.shape[0] % 2 == 0:
        names.append("rope")
    if ndim == 2 and kind.shape[1]:
        names.append("to_conv")
    if ndim == 5:
        names.append("from_conv")
    if kind.dtype.is_float and casts:
        names.append("cast")
    return names


@st.composite
def joins(
    draw: st.DrawFn, value: Value, values: Sequence[Value], name: str, max_join: int
) -> tuple[Op, tuple[Value, ...]]:
    """A join of `value` with others that fit it (itself among them), `max_join` in all."""
    shape, ndim = value.type.shape, len(value.type.shape)
    most = max_join if value.type.numel <= _MAX_NUMEL else 1
    if name == "merge":
        alike = [other for other in values if other.type == value.type]
        args = draw(st.lists(st.sampled_from(alike), min_size=1, max_size=most))
        return MergeModulelist(draw(st.integers(-ndim - 1, ndim))), tuple(args)
    dim = draw(st.integers(-ndim, ndim - 1))

    def rest(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[: dim % ndim], *sizes[dim % ndim + 1 :])

    alike = [
        other
        for other in values
        if other.type.dtype == value.type.dtype
        and len(other.type.shape) == ndim
        and rest(other.type.shape) == rest(shape)
        and other.type.numel <= _MAX_NUMEL
    ]
    others = draw(st.lists(st.sampled_from(alike), max_size=most - 1)) if alike else []
    return Concatenate(dim), (*others[:1], value, *others[1:])


@st.composite
def unary(draw: st.DrawFn, name: str, kind: TensorType, casts: Sequence[DType]) -> Op:
    """An op of one argument of type `kind`."""
    shape, ndim = kind.shape, len(kind.shape)
    dim = draw(st.integers(-ndim, ndim - 1)) if ndim else 0
    size = shape[dim] if ndim else 1
    match name:
        case "reshape":
            return Reshape(draw(factorings(kind.numel)))
        case "permute":
            return Permute(draw(st.sampled_from(list(permutations(range(ndim))))))
        case "transpose":
            return Transpose(dim, draw(st.integers(-ndim, ndim - 1)))
        case "slice":
            low = draw(st.integers(0, max(size - 1, 0)))
            return Slice(dim, low, draw(st.integers(min(low + 1, size) if draw(st.integers(0, 9)) else low, size)))
        case "split":
            cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
            return Split(dim, tuple(b - a for a, b in zip((0, *cuts), (*cuts, size), strict=True)))
        case "chunk":
            return Chunk(dim, draw(st.sampled_from([parts for parts in range(1, 7) if size % parts == 0])))
        case "unmerge":
            return SplitModulelist(dim)
        case "interleave":
            even = [at for at in range(ndim) if shape[at] % 2 == 0]
            return Interleave(draw(st.sampled_from(even)), draw(st.booleans()))
        case "rope":
            whole = [size for size in range(2, max(shape[0], 2) + 1, 2) if shape[0] % size == 0]
            return PermuteForRope(head_dim=draw(st.sampled_from(whole)), inverse=draw(st.booleans()))
        case "to_conv":
            inner = draw(factorings(shape[1]).filter(lambda sizes: len(sizes) <= 4))
            channels, *kernel = (*inner, 1, 1, 1, 1)[:4]
            return LinearToConv3d(channels, (kernel[0], kernel[1], kernel[2]))
        case "from_conv":
            return Conv3dToLinear(shape[1], (shape[2], shape[3], shape[4]))
        case "cast":
            return Cast(draw(st.sampled_from(casts)))
    raise AssertionError(name)


@st.composite
def cuts(draw: st.DrawFn, size: int, ranks: int) -> tuple[Intervals, ...]:
    """Intervals per rank that tile `size` positions: in any number and order, some empty, some ranks with none."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    spans = list(pairwise(bounds))
    spans += [(at, at) for at in draw(st.lists(st.integers(0, size), max_size=1))]
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for span in draw(st.permutations(spans)):
        held[draw(st.integers(0, ranks - 1))].append(span)
    return tuple(map(tuple, held))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, tuple[tuple[int, int], ...]]]]:
    """A number of elements and areas `(start, run, loops)` that write each of them once: a box, cut up.

    Loops are `(extent, step)`, largest step first, as many as the box has dims; extents of 1 are left out.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    boxes = [[(0, extent) for extent in shape]]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low, high = box[dim]
        cut = draw(st.integers(low, high))
        parts = [[*box[:dim], span, *box[dim + 1 :]] for span in ((low, cut), (cut, high))]
        boxes += [part for part in parts if all(low < high for low, high in part)]
    steps = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    areas = []
    for box in draw(st.permutations(boxes)):
        start = sum(low * step for (low, _), step in zip(box, steps, strict=True))
        loops = [(high - low, step) for (low, high), step in zip(box, steps, strict=True)]
        run = loops.pop()[0] if draw(st.booleans()) else 1
        areas.append((start, run, tuple(loop for loop in loops if loop[0] > 1)))
    return shape[0] * steps[0], areas


_SIZES = st.integers(0, 2**63 - 1)
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_WORDS = st.lists(_NAMES, max_size=3).map(tuple)
_PAIRS = st.lists(st.tuples(_NAMES, _NAMES), max_size=3).map(tuple)
_INT64S = st.integers(-(2**63), 2**63 - 1)


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    """Any type of whole bytes that a file can hold."""
    dtype = draw(st.sampled_from(DType))
    shape = draw(st.lists(st.integers(0, 8) | st.just(2**20), max_size=3).map(tuple))
    kind = TensorType(shape if dtype.bits % 8 == 0 else (*shape, 4), dtype)
    return kind if kind.nbytes < 2**63 else TensorType((), dtype if dtype.bits % 8 == 0 else DType.U8)


@st.composite
def heads(draw: st.DrawFn) -> Head:
    """Any head that the format can hold; names, ties and ranks need not fit together."""
    guards = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=2).map(tuple)
    plain = _NAMES.filter(lambda name: name not in ("", ".", "..") and not set(name) & set("/\\\0"))
    files = st.builds(PlanFile, plain, st.integers(100, 2**63 - 1), _NAMES, guards, _NAMES, _NAMES)
    spans = st.lists(st.tuples(_SIZES, _SIZES), max_size=2).map(tuple)
    kinds = draw(st.lists(tensor_types(), max_size=3))
    tensors = tuple(
        PlanTensor(
            draw(_NAMES),
            kind,
            draw(st.integers(-1, len(kind.shape) - 1)),
            draw(st.lists(spans, max_size=2).map(tuple)),
        )
        for kind in kinds
    )
    reports = st.builds(
        Report,
        *[_SIZES] * 4,
        *[_WORDS] * 3,
        st.lists(st.tuples(_NAMES, st.integers(0, 9)), max_size=2).map(tuple),
        *[_WORDS] * 2,
    )
    return Head(
        files=draw(st.lists(files, max_size=2).map(tuple)),
        tensors=tensors,
        aliases=draw(_PAIRS),
        equal_ties=draw(st.lists(_WORDS, max_size=2).map(tuple)),
        chains=draw(st.lists(st.lists(st.sampled_from(DType), max_size=3).map(tuple), max_size=2).map(tuple)),
        world_size=draw(st.integers(1, 3)),
        model=draw(
            st.none() | st.builds(ModelRecord, _NAMES, _NAMES, _NAMES, st.binary(max_size=4), st.binary(max_size=4))
        ),
        fusions=draw(st.lists(st.builds(FusedModule, _NAMES, _NAMES, _NAMES), max_size=2).map(tuple)),
        provenance=draw(_PAIRS),
        report=draw(reports),
    )


@st.composite
def sections(draw: st.DrawFn) -> Section:
    """Any section that the format can hold; its copies need not make sense."""
    loops = st.lists(st.builds(Loop, _INT64S, _INT64S, _INT64S), max_size=3).map(tuple)
    copies = st.builds(Copy, _INT64S, _INT64S, _INT64S, _INT64S, _INT64S, _INT64S, loops)
    temporaries = draw(st.lists(tensor_types(), max_size=2).map(tuple))
    buffers = st.lists(_SIZES, max_size=3).map(tuple)
    computes = st.lists(st.builds(Compute, _NAMES, buffers, buffers, _NAMES), max_size=2).map(tuple)
    return Section(temporaries, CopyColumns.of(draw(st.lists(copies, max_size=4))), draw(computes))


_TEXTS = st.text(max_size=6) | st.sampled_from(["a", "m.safetensors", "../m", "\ud800", "/", "", "weight_map"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def json_texts(draw: st.DrawFn, key: str | None = None) -> bytes:
    """What Python writes for a value, right JSON or not, with a few bytes changed now and then.

    With `key`, the value is an object that has it, most often with an object of texts.
    """
    value = draw(_JSON | st.dictionaries(_TEXTS, _JSON, max_size=4))
    if key is not None:
        value = {key: draw(st.dictionaries(_TEXTS, _TEXTS, max_size=4) | _JSON), "metadata": value}
    text = bytearray(json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text)
