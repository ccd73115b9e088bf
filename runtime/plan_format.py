"""The bytes of a plan file.

    file  ::= "LOADPLAN" format:u32 frames:u32 entry{frames} frame{frames}       -- little-endian
    entry ::= stored:u64 raw:u64 sha256[32]                                      -- nbytes as stored, as decoded; of what
    frame ::= zstd(msgpack(head | section | origin))         -- the head first, then one a rank, then the origin if any

Columns of integers are byte strings of little-endian int64. A frame decodes by itself, so a rank pays for its own only.
The digest of a plan covers the frames as decoded: another version of zstd may compress otherwise, and the plan is the
same. A plan comes from an untrusted place: every length is bounded before it is used, every value checked as it is
read, and `check_plan` proves the copies; nothing in a plan is ever executed or imported.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import pairwise
from reprlib import Repr
from typing import NoReturn, TypeVar

import msgpack  # type: ignore[import-untyped]
import zstandard

from loadplan.cache.error import LoadplanError
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import (
    ByteArea,
    Compute,
    Constant,
    CopyColumns,
    FusedModule,
    Head,
    Intervals,
    ModelRecord,
    Origin,
    PlanFile,
    PlanSource,
    PlanTensor,
    Report,
    Section,
    Trace,
)
from loadplan.runtime.tensor_type import TensorType

FORMAT = 2  # raise it with any change to the bytes or their meaning; plans of other formats are compiled again
MAGIC = b"LOADPLAN"
_START = struct.Struct("<8sII")
_ENTRY = struct.Struct("<QQ32s")
_MAX_FRAMES = 65_537  # 65,536 ranks
_MAX_FRAME_NBYTES = 1 << 30  # a section of 10 million copies
_MAX_ROWS = 1 << 22  # of one list; copies are columns and not concerned
_MAX_FIELDS = 64
_MAX_TEXT_NBYTES = 1 << 20
_MAX_OBJECT_NBYTES = 64 << 20  # of a frame, byte strings apart: decoded, each of these may become an object of 60 bytes
_MAX_LOOKS = 1 << 20
_OBJECT_RATIO = 256  # or so many for each byte of the frame as stored
_LEVEL = 9  # measured on a Mixtral-8x22B plan: smaller than 3 by a tenth, and still milliseconds
_INT64 = 2**63
_T = TypeVar("_T")
_SHOW = Repr()  # cuts what it shows, in length and depth
_SHOW.maxstring = 200


class PlanError(LoadplanError, ValueError):
    """A plan file is damaged, of another format, or asks for what no plan may."""


def encode(head: Head, sections: tuple[Section, ...], origin: Origin | None = None) -> tuple[bytes, str]:
    """The bytes of a plan file, and the digest of the plan."""
    raw = [_pack(_head_fields(head)), *(_pack(_section_fields(section)) for section in sections)]
    if origin is not None:
        raw.append(_pack(_origin_fields(origin)))
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
    stored = [compressor.compress(frame) for frame in raw]
    digests = [hashlib.sha256(frame).digest() for frame in raw]
    table = [
        _ENTRY.pack(len(small), len(frame), digest) for small, frame, digest in zip(stored, raw, digests, strict=True)
    ]
    return b"".join([_START.pack(MAGIC, FORMAT, len(raw)), *table, *stored]), _plan_digest(digests)


class Frames:
    """The frames of one plan file, each decoded when asked for."""

    def __init__(self, data: bytes, name: str) -> None:
        """Check the frame table of `data`; `name` is for messages. Raises `PlanError`."""
        self._data, self._name = data, name
        if len(data) < _START.size or data[: len(MAGIC)] != MAGIC:
            self._refuse("is not a plan file: it does not begin with LOADPLAN")
        _, version, count = _START.unpack_from(data)
        if version != FORMAT:
            self._refuse(f"has plan format {version}, this loadplan reads {FORMAT}: compile it again")
        if not 2 <= count <= _MAX_FRAMES or len(data) < _START.size + count * _ENTRY.size:
            self._refuse(f"ends inside its frame table of {count} frames")
        self._table = [_ENTRY.unpack_from(data, _START.size + at * _ENTRY.size) for at in range(count)]
        self._starts = [_START.size + count * _ENTRY.size]
        for stored, raw, _ in self._table:
            if raw > _MAX_FRAME_NBYTES or stored > len(data):
                self._refuse(f"has a frame of {raw} bytes, at most {_MAX_FRAME_NBYTES} are allowed")
            self._starts.append(self._starts[-1] + stored)
        if self._starts[-1] != len(data):
            self._refuse(f"has {len(data)} bytes, its frames end at {self._starts[-1]}: it is cut off or damaged")
        self.digest = _plan_digest([digest for _, _, digest in self._table])

    def head(self) -> Head:
        """The decoded head. Raises `PlanError`."""
        head = self._decode(0, _read_head)
        if len(self._table) - 1 - head.world_size not in (0, 1):
            self._refuse(f"has {len(self._table)} frames, which does not fit the {head.world_size} ranks of its head")
        return head

    def section(self, rank: int) -> Section:
        """The decoded section of `rank`, not yet proved. Raises `PlanError`."""
        return self._decode(rank + 1, _read_section)

    def origin(self, world_size: int) -> Origin | None:
        """The decoded origin of a plan for `world_size` ranks; None if the plan has none. Raises `PlanError`."""
        return self._decode(world_size + 1, _read_origin) if len(self._table) == world_size + 2 else None

    def _decode(self, index: int, read: Callable[[_Fields], _T]) -> _T:
        stored, size, digest = self._table[index]
        start = self._starts[index]
        what = "its head" if index == 0 else f"frame {index}"
        frame = self._data[start : start + stored]
        try:
            # zstandard allocates what the frame itself declares, whatever max_output_size says
            declared = zstandard.frame_content_size(frame)
            if declared != size:
                self._refuse(f"{what} declares {declared} bytes, the frame table {size}")
            raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            self._refuse(f"{what} does not decompress to {size} bytes: {error}")
        if len(raw) != size or hashlib.sha256(raw).digest() != digest:
            self._refuse(f"{what} is damaged: its digest differs")
        try:
            if len(raw) > _MAX_OBJECT_NBYTES:
                _refuse_many_objects(raw, max(_MAX_OBJECT_NBYTES, _OBJECT_RATIO * stored))
            found = _Fields(_unpack(raw), what)
            value = read(found)
            found.refuse_rest()
            return value
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            self._refuse(f"{what} is malformed: {error}")

    def _refuse(self, why: str) -> NoReturn:
        raise PlanError(f"{self._name}: {why}")


def _unpack(raw: bytes) -> object:
    """The decoded msgpack; nothing in it but maps, lists, texts, byte strings and plain values."""
    return msgpack.unpackb(
        raw,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=_unique,
        max_array_len=_MAX_ROWS,
        max_map_len=_MAX_FIELDS,
        max_str_len=_MAX_TEXT_NBYTES,
        max_ext_len=0,
    )


def _unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _refuse_many_objects(raw: bytes, most: int) -> None:
    """Refuse a frame that would fill the memory with small objects; looks at lengths only. Raises ValueError.

    Byte strings do not count. They are looked for where they may be (fields, items of fields, and items of those), in
    lists of `_MAX_LOOKS` items together; what is in longer ones counts whole.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(raw))
    unpacker.feed(raw)
    total, left = 0, _MAX_LOOKS

    def add(depth: int) -> None:
        nonlocal total, left
        start = unpacker.tell()
        count = _list_length(raw, start)
        if depth and count is not None and count <= left:
            left -= count
            for _ in range(unpacker.read_array_header()):
                add(depth - 1)
            return
        unpacker.skip()
        is_bytes = raw[start : start + 1] in (b"\xc4", b"\xc5", b"\xc6")
        total += 8 if is_bytes else unpacker.tell() - start  # a byte string is one object
        if total > most:
            raise ValueError(f"more than {most} bytes of it are small values")

    for _ in range(unpacker.read_map_header()):
        unpacker.skip()
        add(2)


def _list_length(raw: bytes, start: int) -> int | None:
    """How many items the list that begins at `start` says it has; None if none begins there (msgpack's spec.md)."""
    kind = raw[start] if start < len(raw) else 0
    if 0x90 <= kind < 0xA0:
        return kind - 0x90
    nbytes = {0xDC: 2, 0xDD: 4}.get(kind)
    return None if nbytes is None else int.from_bytes(raw[start + 1 : start + 1 + nbytes], "big")


def _plan_digest(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join([MAGIC, struct.pack("<I", FORMAT), *digests])).hexdigest()


def _pack(value: Mapping[str, object]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _type_fields(kind: TensorType) -> list[object]:
    return [str(kind.dtype), list(kind.shape)]


def _head_fields(head: Head) -> dict[str, object]:
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(tensor.type for tensor in head.tensors))}
    return {
        "files": [
            [f.name, f.size, f.format, [list(guard) for guard in f.guards], f.header_digest, f.content_digest]
            for f in head.files
        ],
        "types": [_type_fields(kind) for kind in kinds],
        "names": [t.name for t in head.tensors],
        "type": _column_bytes(array("q", (kinds[t.type] for t in head.tensors))),
        "shard_dim": _column_bytes(array("q", (t.shard_dim for t in head.tensors))),
        "intervals": [
            [number, [[list(span) for span in spans] for spans in t.intervals]]
            for number, t in enumerate(head.tensors)
            if t.intervals
        ],
        "aliases": [list(pair) for pair in head.aliases],
        "equal_ties": [list(names) for names in head.equal_ties],
        "chains": [[str(dtype) for dtype in chain] for chain in head.chains],
        "world_size": head.world_size,
        "constants": [[c.name, *_type_fields(c.type), c.data] for c in head.constants],
        "model": [] if head.model is None else [getattr(head.model, f.name) for f in fields(head.model)],
        "fusions": [[f.path, f.family, f.options] for f in head.fusions],
        "provenance": [list(pair) for pair in head.provenance],
        "report": {f.name: _plain(getattr(head.report, f.name)) for f in fields(head.report)},
    }


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _section_fields(section: Section) -> dict[str, object]:
    columns = {name: _column_bytes(getattr(section.copies, name)) for name in CopyColumns.COLUMNS}
    return {
        "temporaries": [_type_fields(kind) for kind in section.temporaries],
        **columns,
        "computes": [[c.kernel, list(c.inputs), list(c.outputs), c.options] for c in section.computes],
    }


def _origin_fields(origin: Origin) -> dict[str, object]:
    texts = dict.fromkeys(
        text for trace in origin.traces for text in (trace.program, *trace.rules)
    )  # few different ones
    number = {text: at for at, text in enumerate(texts)}
    return {
        "sources": [[s.name, *_type_fields(s.type), s.file, s.offset] for s in origin.sources],
        "headers": list(origin.headers),
        "others": [list(pair) for pair in origin.others],
        "texts": list(texts),
        "traces": [
            [number[t.program], [number[rule] for rule in t.rules], [_used_fields(*used) for used in t.sources]]
            for t in origin.traces
        ],
    }


def _used_fields(source: int, areas: tuple[ByteArea, ...]) -> list[object]:
    return [source, [[area.start, area.nbytes, [list(loop) for loop in area.loops]] for area in areas]]


def _column_bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array("q", column)
        column.byteswap()
    return column.tobytes()


class _Fields:
    """A decoded mapping, read field by field; a value of another kind is a TypeError that names it."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise TypeError(f"{where} is not a mapping")
        self._value, self._where = value, where
        self._rest = set(value)

    def get(self, name: str) -> object:
        """The field `name`."""
        if name not in self._value:
            raise ValueError(f"{name} is missing")
        self._rest.discard(name)
        return self._value[name]

    def refuse_rest(self) -> None:
        """Refuse fields that nobody asked for: what they would say is not known here."""
        if self._rest:
            raise ValueError(f"{self._where} has a field {_SHOW.repr(min(self._rest))}, which this format has not")

    def rows(self, name: str) -> list[list[object]]:
        """The field as a list of lists."""
        return [_list(row, name) for row in _list(self.get(name), name)]

    def column(self, name: str) -> array[int]:
        """The field as a column of integers."""
        data = self.get(name)
        if not isinstance(data, bytes) or len(data) % 8:
            raise ValueError(f"column {name} is not made of 64-bit integers")
        column = array("q")
        column.frombytes(data)
        if sys.byteorder == "big":
            column.byteswap()
        return column


def _read_head(data: _Fields) -> Head:
    files = tuple(_read_file(row) for row in data.rows("files"))
    tensors = _read_tensors(data)
    report = _Fields(data.get("report"), "report")
    head = Head(
        files=files,
        tensors=tensors,
        aliases=tuple((_text(row[0]), _text(row[1])) for row in data.rows("aliases") if _length(row, 2)),
        equal_ties=tuple(tuple(map(_text, row)) for row in data.rows("equal_ties")),
        chains=tuple(tuple(DType(_text(dtype)) for dtype in row) for row in data.rows("chains")),
        world_size=_count(data.get("world_size")),
        constants=tuple(
            Constant(_text(row[0]), _read_type(row[1:3]), _bytes(row[3]))
            for row in data.rows("constants")
            if _length(row, 4)
        ),
        model=_read_model(_list(data.get("model"), "model")),
        fusions=tuple(
            FusedModule(_text(row[0]), _text(row[1]), _text(row[2])) for row in data.rows("fusions") if _length(row, 3)
        ),
        provenance=tuple((_text(row[0]), _text(row[1])) for row in data.rows("provenance") if _length(row, 2)),
        report=Report(
            sources=_count(report.get("sources")),
            source_nbytes=_count(report.get("source_nbytes")),
            targets=_count(report.get("targets")),
            target_nbytes=_count(report.get("target_nbytes")),
            rules=tuple((_text(row[0]), _count(row[1])) for row in report.rows("rules") if _length(row, 2)),
            **{name: _texts(report.get(name)) for name in ("unused", "missing", "casts", "kept", "notes")},
        ),
    )
    report.refuse_rest()
    return head


def _read_model(row: list[object]) -> ModelRecord | None:
    if not row:
        return None
    _length(row, 5)
    return ModelRecord(_text(row[0]), _text(row[1]), _text(row[2]), _bytes(row[3]), _bytes(row[4]))


def _read_file(row: list[object]) -> PlanFile:
    _length(row, 6)
    name = _file_name(row[0])
    guards = tuple(
        (_count(pair[0]), _count(pair[1]))
        for pair in (_list(g, "guards") for g in _list(row[3], "guards"))
        if _length(pair, 2)
    )
    size = _count(row[1])
    if any(offset + nbytes > size for offset, nbytes in guards):
        raise ValueError(f"file {_SHOW.repr(name)} has {size} bytes, a guard reaches past them")
    return PlanFile(name, size, _text(row[2]), guards, _text(row[4]), _text(row[5]))


def _file_name(value: object) -> str:
    name = _text(value)
    if not name or name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"file name {_SHOW.repr(name)} leads out of the checkpoint folder")
    return name


def _read_tensors(data: _Fields) -> tuple[PlanTensor, ...]:
    """Names and columns; equal types are one object, which is proved once."""
    types = [_read_type(row) for row in data.rows("types")]
    names = _texts(data.get("names"))
    numbers, dims = data.column("type"), data.column("shard_dim")
    if not len(names) == len(numbers) == len(dims):
        raise ValueError("the columns of tensors have different lengths")
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(types):
        raise ValueError(f"there are {len(types)} types, a tensor has another")
    kinds = [types[number] for number in numbers]
    for name, kind, dim in zip(names, kinds, dims, strict=True):
        if dim != -1 and not 0 <= dim < len(kind.shape):
            raise ValueError(f"tensor {_SHOW.repr(name)} has no dim {dim}")
    intervals: list[tuple[Intervals, ...]] = [()] * len(names)
    for row in data.rows("intervals"):
        _length(row, 2)
        number = _count(row[0])
        if number >= len(names) or intervals[number]:
            raise ValueError(f"intervals for tensor {number}, which is not there or has some")
        intervals[number] = tuple(
            tuple(
                (_count(span[0]), _count(span[1]))
                for span in (_list(s, "interval") for s in _list(spans, "intervals"))
                if _length(span, 2)
            )
            for spans in _list(row[1], "intervals")
        )
    return tuple(map(PlanTensor, names, kinds, dims, intervals))


def _read_type(row: list[object]) -> TensorType:
    _length(row, 2)
    kind = TensorType(tuple(map(_count, _list(row[1], "shape"))), DType(_text(row[0])))
    if kind.numel * kind.dtype.bits % 8 or kind.nbytes >= _INT64:
        raise ValueError(f"{kind} is not a whole number of bytes, or more than a file can hold")
    return kind


def _read_section(data: _Fields) -> Section:
    columns = {name: data.column(name) for name in CopyColumns.COLUMNS}
    rows, loops = len(columns["source"]), len(columns["extent"])
    firsts = columns["first_loop"]
    if any(len(columns[name]) != rows for name in ("buffer", "src", "dst", "run", "chain")):
        raise ValueError("the columns of copies have different lengths")
    if len(columns["src_step"]) != loops or len(columns["dst_step"]) != loops or len(firsts) != rows + 1:
        raise ValueError("the columns of loops have different lengths")
    if firsts[0] != 0 or firsts[-1] != loops or any(a > b for a, b in pairwise(firsts)):
        raise ValueError("the loops of the copies do not follow each other")
    computes = tuple(
        Compute(_text(row[0]), _numbers(row[1]), _numbers(row[2]), _text(row[3]))
        for row in data.rows("computes")
        if _length(row, 4)
    )
    return Section(tuple(_read_type(row) for row in data.rows("temporaries")), CopyColumns(**columns), computes)


def _read_origin(data: _Fields) -> Origin:
    sources = tuple(
        PlanSource(_text(row[0]), _read_type(row[1:3]), _count(row[3]), _count(row[4]))
        for row in data.rows("sources")
        if _length(row, 5)
    )
    others = tuple((_file_name(row[0]), _bytes(row[1])) for row in data.rows("others") if _length(row, 2))
    headers = tuple(_bytes(header) for header in _list(data.get("headers"), "headers"))
    texts = _texts(data.get("texts"))
    traces = tuple(_read_trace(row, texts) for row in data.rows("traces") if _length(row, 3))
    return Origin(sources, headers, others, traces)


def _read_trace(row: list[object], texts: tuple[str, ...]) -> Trace:
    program, *rules = (_count(number) for number in (row[0], *_list(row[1], "rules")))
    if max(program, *rules, 0) >= len(texts):
        raise ValueError(f"there are {len(texts)} texts, a trace has another")
    used = (_list(source, "sources") for source in _list(row[2], "sources"))
    return Trace(
        tuple(texts[number] for number in rules),
        texts[program],
        tuple(
            (_count(source[0]), tuple(_read_area(_list(area, "areas")) for area in _list(source[1], "areas")))
            for source in used
            if _length(source, 2)
        ),
    )


def _read_area(row: list[object]) -> ByteArea:
    _length(row, 3)
    loops = (_list(loop, "loops") for loop in _list(row[2], "loops"))
    return ByteArea(
        _count(row[0]),
        _count(row[1]),
        tuple((_count(loop[0]), _count(loop[1])) for loop in loops if _length(loop, 2)),
    )


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"{_SHOW.repr(value)} stands where bytes belong")
    return value


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{where} holds {_SHOW.repr(value)} where a list belongs")
    return value


def _length(row: list[object], count: int) -> bool:
    if len(row) != count:
        raise ValueError(f"a row has {len(row)} values, {count} belong there")
    return True


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_SHOW.repr(value)} stands where a text belongs")
    return value


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_text, _list(value, "texts")))


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(map(_count, _list(value, "buffers")))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INT64:
        raise ValueError(f"{_SHOW.repr(value)} stands where a size belongs")
    return value
