"""The bytes of plan files: literal ones, there and back again, and what hostile writers may send.

The frame table is read here with `struct`, independently of `plan_format`; the literal msgpack and the digest pin the
format, which other versions of loadplan read. Compressed bytes are not pinned: another zstd may write others.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from strategies import heads, sections

from loadplan.runtime.dtype import DType
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import (
    Compute,
    Constant,
    Copy,
    CopyColumns,
    FusedModule,
    Head,
    Loop,
    ModelRecord,
    PlanFile,
    PlanTensor,
    Report,
    Section,
)
from loadplan.runtime.plan_format import FORMAT, Frames, PlanError, encode
from loadplan.runtime.tensor_type import TensorType

HEAD = Head(
    files=(PlanFile("m.safetensors", 200, "safetensors", ((0, 100),), "ab" * 32),),
    tensors=(PlanTensor("w", TensorType((2, 4), DType.BF16), 1, (((0, 2),), ((2, 4),))),),
    aliases=(("v", "w"),),
    equal_ties=(),
    chains=((DType.F32, DType.BF16),),
    world_size=2,
    constants=(Constant("c", TensorType((1,), DType.I64), struct.pack("<q", 7)),),
    model=ModelRecord("transformers", "TinyModel", "bfloat16", b'{"a":1}'),
    fusions=(FusedModule("layers.0.attn", "qkv", '{"bias":true}'),),
    provenance=(("recipe", "cd" * 32),),
    report=Report(sources=1, source_nbytes=32, targets=1, target_nbytes=16, rules=(("rule", 1),), casts=("w: F32",)),
)
SECTIONS = tuple(
    Section((), CopyColumns.of([Copy(0, 0, 100 + 8 * rank, 0, 2, 0, (Loop(2, 16, 4),))])) for rank in range(2)
)
DIGEST = "40892788736a5657254148033f489a9590c47cfecc53e4452704176f0badd6ac"


def frames_of(data: bytes) -> list[bytes]:
    """The decoded frames of a plan file, by the grammar at the top of `plan_format`."""
    magic, version, count = struct.unpack_from("<8sII", data)
    assert (magic, version) == (b"LOADPLAN", FORMAT)
    at = 16 + 48 * count
    frames = []
    for entry in range(count):
        stored, nbytes, digest = struct.unpack_from("<QQ32s", data, 16 + 48 * entry)
        frame = zstandard.ZstdDecompressor().decompress(data[at : at + stored])
        assert (len(frame), hashlib.sha256(frame).digest()) == (nbytes, digest)
        frames.append(frame)
        at += stored
    assert at == len(data)
    return frames


def file_of(frames: list[bytes], *, level: int = 3, version: int = FORMAT) -> bytes:
    """A plan file of these frames, with the right lengths and digests."""
    stored = [zstandard.ZstdCompressor(level=level).compress(frame) for frame in frames]
    table = [
        struct.pack("<QQ32s", len(small), len(frame), hashlib.sha256(frame).digest())
        for small, frame in zip(stored, frames, strict=True)
    ]
    return b"".join([struct.pack("<8sII", b"LOADPLAN", version, len(frames)), *table, *stored])


def map_header(count: int) -> bytes:
    header: bytes = msgpack.Packer().pack_map_header(count)
    return header


def int64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def test_literal_bytes() -> None:
    data, digest = encode(HEAD, SECTIONS)
    head, first, second = frames_of(data)
    assert msgpack.unpackb(head) == {
        "files": [["m.safetensors", 200, "safetensors", [[0, 100]], "ab" * 32, ""]],
        "types": [["BF16", [2, 4]]],
        "names": ["w"],
        "type": int64s(0),
        "shard_dim": int64s(1),
        "intervals": [[0, [[[0, 2]], [[2, 4]]]]],
        "aliases": [["v", "w"]],
        "equal_ties": [],
        "chains": [["F32", "BF16"]],
        "world_size": 2,
        "constants": [["c", "I64", [1], int64s(7)]],
        "model": ["transformers", "TinyModel", "bfloat16", b'{"a":1}', b""],
        "fusions": [["layers.0.attn", "qkv", '{"bias":true}']],
        "provenance": [["recipe", "cd" * 32]],
        "report": {
            "sources": 1,
            "source_nbytes": 32,
            "targets": 1,
            "target_nbytes": 16,
            "unused": [],
            "missing": [],
            "casts": ["w: F32"],
            "rules": [["rule", 1]],
            "kept": [],
            "notes": [],
        },
    }
    for src, section in ((100, first), (108, second)):
        assert msgpack.unpackb(section) == {
            "temporaries": [],
            "source": int64s(0),
            "buffer": int64s(0),
            "src": int64s(src),
            "dst": int64s(0),
            "run": int64s(2),
            "chain": int64s(0),
            "first_loop": int64s(0, 1),
            "extent": int64s(2),
            "src_step": int64s(16),
            "dst_step": int64s(4),
            "computes": [],
        }
    assert first.hex() == (
        "8cab74656d706f72617269657390a6736f75726365c4080000000000000000a6627566666572c4080000000000000000a373"
        "7263c4086400000000000000a3647374c4080000000000000000a372756ec4080200000000000000a5636861696ec4080000"
        "000000000000aa66697273745f6c6f6f70c41000000000000000000100000000000000a6657874656e74c408020000000000"
        "0000a87372635f73746570c4081000000000000000a86473745f73746570c4080400000000000000a8636f6d707574657390"
    )
    whole = hashlib.sha256(
        b"LOADPLAN" + struct.pack("<I", 2) + b"".join(hashlib.sha256(f).digest() for f in (head, first, second))
    )
    assert digest == whole.hexdigest() == DIGEST


def test_literal_computes() -> None:
    section = Section((), CopyColumns.of([]), (Compute("fold", (1, 2), (0,), '{"eps":"0.1"}'), Compute("k", (), ())))
    _, frame = frames_of(encode(replace(HEAD, world_size=1), (section,))[0])
    assert msgpack.unpackb(frame)["computes"] == [["fold", [1, 2], [0], '{"eps":"0.1"}'], ["k", [], [], "{}"]]


def test_literal_file_opens() -> None:
    plan = Plan(file_of(frames_of(encode(HEAD, SECTIONS)[0])))
    assert plan.head == HEAD
    assert tuple(plan.section(rank) for rank in range(2)) == SECTIONS
    assert plan.digest == DIGEST


def test_the_digest_is_of_the_content() -> None:
    """However it was compressed."""
    frames = frames_of(encode(HEAD, SECTIONS)[0])
    files = {file_of(frames, level=level) for level in (-5, 1, 19)}
    assert len(files) > 1
    assert {Plan(data).digest for data in files} == {DIGEST}


@pytest.mark.parametrize("name", [field.name for field in fields(Head) if field.name != "world_size"])
def test_the_digest_covers_the_head(name: str) -> None:
    value = {"report": Report(), "model": None}.get(name, ())
    changed = replace(HEAD, **{name: value if getattr(HEAD, name) != value else (("x", "y"),)})  # type: ignore[arg-type]
    assert encode(changed, SECTIONS)[1] != DIGEST


@pytest.mark.parametrize("name", CopyColumns.COLUMNS)
def test_the_digest_covers_each_column(name: str) -> None:
    column = getattr(SECTIONS[1].copies, name)[:]
    column[0] += 1
    other = replace(SECTIONS[1], copies=replace(SECTIONS[1].copies, **{name: column}))
    assert encode(HEAD, (SECTIONS[0], other))[1] != DIGEST


@given(head=heads(), data=st.data())
def test_round_trip(head: Head, data: st.DataObject) -> None:
    parts = tuple(data.draw(sections()) for _ in range(head.world_size))
    encoded, digest = encode(head, parts)
    found = Frames(encoded, "plan")
    assert found.head() == head
    assert tuple(found.section(rank) for rank in range(head.world_size)) == parts
    assert found.digest == digest == encode(found.head(), parts)[1]
    assert len(frames_of(encoded)) == head.world_size + 1


def test_saved_and_opened(tmp_path: Path) -> None:
    plan = Plan.of(HEAD, SECTIONS)
    plan.save(tmp_path / "deep" / "m.loadplan")
    opened = Plan.open(tmp_path / "deep" / "m.loadplan")
    assert (opened.digest, opened.to_bytes()) == (plan.digest, plan.to_bytes())
    with pytest.raises(PlanError, match=r"m\.loadplan: has ranks 0 to 1, not 2"):
        opened.section(2)
    with pytest.raises(PlanError, match="not -1"):
        opened.section(-1)


DATA = encode(HEAD, SECTIONS)[0]


def open_all(data: bytes) -> list[Section]:
    """Open every part; PlanError is the only error that may come."""
    plan = Plan(data, "hostile.loadplan")
    return [plan.section(rank) for rank in range(plan.world_size)]


def refused(data: bytes) -> str:
    with pytest.raises(PlanError) as caught:
        open_all(data)
    message = str(caught.value)
    assert message.startswith("hostile.loadplan: ")
    assert len(message) < 2000
    return message


def test_every_truncation() -> None:
    for length in range(len(DATA)):
        refused(DATA[:length])
    assert "its frames end at" in refused(DATA + b"\0")


def test_every_byte() -> None:
    """Each byte inverted: refused, or (bits that zstd leaves free) the same plan."""
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= 0xFF
        try:
            assert tuple(open_all(bytes(damaged))) == SECTIONS
        except PlanError:
            continue
        assert Plan(bytes(damaged)).digest == DIGEST


@given(edits=st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage(edits: list[tuple[int, int]]) -> None:
    damaged = bytearray(DATA)
    for place, byte in edits:
        damaged[place] = byte
    try:
        found = open_all(bytes(damaged))
    except PlanError:
        return
    assert tuple(found) == SECTIONS


@given(data=st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: DATA[:40] + tail))
def test_any_bytes(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize("version", [0, 1, 3, 99, 2**32 - 1])
def test_other_formats(version: int) -> None:
    assert FORMAT == 2
    message = refused(file_of(frames_of(DATA), version=version))
    assert f"has plan format {version}, this loadplan reads 2: compile it again" in message


def test_other_files() -> None:
    for data in (b"", b"LOADPLAN", b"PK\x03\x04" * 20, b"{}" * 20):
        assert "is not a plan file" in refused(data)


@pytest.mark.parametrize("count", [0, 1, 65_538, 2**32 - 1])
def test_frame_counts(count: int) -> None:
    assert "ends inside its frame table" in refused(struct.pack("<8sII", b"LOADPLAN", FORMAT, count) + bytes(96))


def test_wrong_number_of_sections() -> None:
    head, first, second = frames_of(DATA)
    assert "has 2 frames, which does not fit the 2 ranks of its head" in refused(file_of([head, first]))
    assert "has 5 frames, which does not fit the 2 ranks of its head" in refused(file_of([head, first, *[second] * 3]))


class TestBombs:
    """Frames that would take more memory than they say, or than a plan may."""

    @staticmethod
    def _with_first_frame(stored: bytes, nbytes: int, digest: bytes = bytes(32)) -> bytes:
        rest = DATA[16 + 48 : 16 + 48 * 3]
        sizes = [struct.unpack_from("<Q", DATA, 16 + 48 * entry)[0] for entry in range(3)]
        frames = DATA[16 + 48 * 3 + sizes[0] :]
        return DATA[:16] + struct.pack("<QQ32s", len(stored), nbytes, digest) + rest + stored + frames

    def test_table(self) -> None:
        assert "at most 1073741824 are allowed" in refused(self._with_first_frame(b"", (1 << 30) + 1))
        assert "at most 1073741824 are allowed" in refused(self._with_first_frame(b"", 2**64 - 1))

    def test_frame_larger_than_the_table_says(self) -> None:
        """zstandard takes the frame's own word for it, not `max_output_size`."""
        bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
        assert len(bomb) < 10_000
        assert "declares 50000000 bytes, the frame table 100" in refused(self._with_first_frame(bomb, 100))

    @pytest.mark.parametrize("size", [2**40, 2**62])
    def test_frame_that_lies(self, size: int) -> None:
        """A frame header of 14 bytes that declares `size`: allocated, it would end the process."""
        frame = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0000]) + struct.pack("<Q", size) + b"\x01\x00\x00"
        assert zstandard.frame_content_size(frame) == size
        assert f"declares {size} bytes" in refused(self._with_first_frame(frame, 100))

    def test_frame_without_a_size(self) -> None:
        stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        frame = stream.compress(bytes(1_000_000)) + stream.flush()
        assert zstandard.frame_content_size(frame) == -1
        for nbytes in (0, 100, 1_000_000):
            assert "declares -1 bytes" in refused(self._with_first_frame(frame, nbytes))

    def test_no_frame(self) -> None:
        for stored in (b"", b"\x28", b"nonsense"):
            assert "its head does not decompress" in refused(self._with_first_frame(stored, 100))

    def test_deep(self) -> None:
        """Nested past every limit of recursion: of msgpack, and of whoever prints it."""
        head, first, second = frames_of(DATA)
        for depth in (500, 900, 1020, 5000, 1_000_000):
            nested = b"\x91" * depth + b"\xc0"
            assert "malformed" in refused(file_of([nested, first, second]))
            assert "malformed" in refused(file_of([head.replace(msgpack.packb([["v", "w"]]), nested), first, second]))

    def test_small_objects(self) -> None:
        """A gigabyte of nothing compresses to kilobytes, and decodes to a hundred."""
        head, first, second = frames_of(DATA)
        fields = msgpack.unpackb(head)
        for name, value in (
            ("names", b"\xdd" + struct.pack(">I", 4_000_000) + b"\xa0" * 4_000_000),
            (
                "aliases",
                b"\xdd" + struct.pack(">I", 65) + (b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20)) * 65,
            ),
            ("constants", (b"\x91" * 20 + b"\xdd" + struct.pack(">I", 1 << 22) + b"\x90" * (1 << 22)) * 17),
        ):
            bomb = map_header(len(fields)) + b"".join(
                msgpack.packb(key) + (value if key == name else msgpack.packb(fields[key])) for key in fields
            )
            data = file_of([bomb, first, second])
            assert len(data) < 50_000
            assert "malformed" in refused(data)

    def test_large_byte_strings_are_none(self) -> None:
        """Values of buffers may be large, and compress well."""
        constant = Constant("mask", TensorType((72 << 20,), DType.U8), bytes(72 << 20))
        data, _ = encode(replace(HEAD, constants=(constant,)), SECTIONS)
        assert len(data) < 50_000
        assert Plan(data).head.constants == (constant,)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of 4 G"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of 4 G"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="4 GiB of text"),
        pytest.param(b"\xc9\xff\xff\xff\xff\x05", id="4 GiB of an extension"),
        pytest.param(b"\xd4\x05a", id="an extension"),
        pytest.param(b"\xd6\xff\0\0\0\1", id="a timestamp"),
        pytest.param(b"\xc7\x0c\xff" + bytes(12), id="a long timestamp"),
        pytest.param(b"\xa2\xff\xfe", id="no UTF-8"),
        pytest.param(b"\xa3\xed\xa0\x80", id="a surrogate"),
        pytest.param(b"\xa2\xc0\x80", id="an overlong NUL"),
        pytest.param(b"\xc1", id="a byte that is never used"),
        pytest.param(b"\xcb\x7f\xf8\0\0\0\0\0\0", id="NaN"),
        pytest.param(b"\xcb\x40\0\0\0\0\0\0\0", id="2.0"),
        pytest.param(b"\xca\x7f\x80\0\0", id="infinity"),
        pytest.param(b"\xc3", id="true"),
        pytest.param(b"\xff", id="-1"),
        pytest.param(b"\xd3\x80" + bytes(7), id="-2**63"),
        pytest.param(b"\xcf" + b"\xff" * 8, id="2**64 - 1"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", id="a field twice"),
        pytest.param(b"\x81\x01\x02", id="a number as a key"),
        pytest.param(b"\x81\xc4\x01a\x02", id="bytes as a key"),
        pytest.param(b"\xda\x20\x01" + b"a" * 8193, id="a long text"),
        pytest.param(b"\xc0\xc0", id="two values"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_odd_values_anywhere(value: bytes) -> None:
    """In place of every field of every frame, and of every whole frame."""
    frames = frames_of(DATA)
    for number, frame in enumerate(frames):
        fields = msgpack.unpackb(frame)
        for name in (*fields, None):
            odd = value
            if name is not None:
                odd = map_header(len(fields)) + b"".join(
                    msgpack.packb(key) + (value if key == name else msgpack.packb(fields[key])) for key in fields
                )
            message = refused(file_of([*frames[:number], odd, *frames[number + 1 :]]))
            assert "malformed" in message or "does not fit" in message


def test_fields_that_are_not_known() -> None:
    """What they say is not dropped in silence."""
    assert "head has a field 'more', which this format has not" in refused(changed_head({"more": 1}))
    report = msgpack.unpackb(frames_of(DATA)[0])["report"]
    assert "report has a field 'more'" in refused(changed_head({"report": {**report, "more": 1}}))
    head, first, second = frames_of(DATA)
    assert "frame 2 has a field 'x'" in refused(
        file_of([head, first, msgpack.packb({**msgpack.unpackb(second), "x": 1})])
    )


def test_fields_that_are_there_twice() -> None:
    head, first, second = frames_of(DATA)
    twice = map_header(len(msgpack.unpackb(head)) + 1) + head[1:] + msgpack.packb("world_size") + msgpack.packb(2)
    assert "a field is there twice" in refused(file_of([twice, first, second]))


class TestZstd:
    """Frames that other readers of zstd would take."""

    @staticmethod
    def _with_head(stored: bytes) -> bytes:
        frames = frames_of(DATA)
        nbytes, digest = len(frames[0]), hashlib.sha256(frames[0]).digest()
        compressed = [zstandard.ZstdCompressor().compress(frame) for frame in frames[1:]]
        table = [struct.pack("<QQ32s", len(stored), nbytes, digest)] + [
            struct.pack("<QQ32s", len(small), len(frame), hashlib.sha256(frame).digest())
            for small, frame in zip(compressed, frames[1:], strict=True)
        ]
        return b"".join([struct.pack("<8sII", b"LOADPLAN", FORMAT, 3), *table, stored, *compressed])

    def test_as_it_should_be(self) -> None:
        stored = zstandard.ZstdCompressor(write_checksum=True).compress(frames_of(DATA)[0])
        assert Plan(self._with_head(stored)).digest == DIGEST

    @pytest.mark.parametrize("where", ["before", "behind", "twice", "junk", "empty frame"])
    def test_more_than_one_frame(self, where: str) -> None:
        stored = zstandard.ZstdCompressor().compress(frames_of(DATA)[0])
        skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"more"
        hostile = {
            "before": skippable + stored,
            "behind": stored + skippable,
            "twice": stored + stored,
            "junk": stored + b"junk",
            "empty frame": stored + zstandard.ZstdCompressor().compress(b""),
        }
        assert "its head d" in refused(self._with_head(hostile[where]))

    def test_a_dictionary(self) -> None:
        head = frames_of(DATA)[0]
        dictionary = zstandard.ZstdCompressionDict(head * 3, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        stored = zstandard.ZstdCompressor(dict_data=dictionary).compress(head)
        assert len(stored) < 100
        assert "its head d" in refused(self._with_head(stored))

    def test_in_parts(self) -> None:
        """Half in this frame, half in the next one."""
        head = frames_of(DATA)[0]
        halves = [zstandard.ZstdCompressor().compress(part) for part in (head[:50], head[50:])]
        assert "its head declares 50 bytes" in refused(self._with_head(b"".join(halves)))

    def test_every_bit(self) -> None:
        """Refused, or the same plan."""
        for place in range(len(DATA) * 8):
            damaged = bytearray(DATA)
            damaged[place // 8] ^= 1 << place % 8
            try:
                found = tuple(open_all(bytes(damaged)))
            except PlanError:
                continue
            assert (found, Plan(bytes(damaged)).digest, Plan(bytes(damaged)).head) == (SECTIONS, DIGEST, HEAD)


def changed_head(change: Mapping[str, object]) -> bytes:
    head, first, second = frames_of(DATA)
    return file_of([msgpack.packb({**msgpack.unpackb(head), **change}), first, second])


HOSTILE_NAMES = [
    "",
    "..",
    "/etc/passwd",
    "../m.safetensors",
    "sub/../../m",
    "sub//m",
    "./m",
    "sub/",
    "sub\\m",
    "m\0",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_file_names_stay_inside(name: str) -> None:
    message = refused(changed_head({"files": [[name, 200, "safetensors", [[0, 100]], "ab" * 32, ""]]}))
    assert "leads out of the checkpoint folder" in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world_size": True}, "True stands where a size belongs"),
        ({"world_size": -1}, "-1 stands where a size belongs"),
        ({"world_size": 2.0}, "2.0 stands where a size belongs"),
        ({"world_size": None}, "None stands where a size belongs"),
        ({"aliases": [["v"]]}, "a row has 1 values, 2 belong there"),
        ({"aliases": [["v", 3]]}, "3 stands where a text belongs"),
        ({"aliases": {"v": "w"}}, "aliases holds"),
        ({"aliases": [["v", "x"]]}, "not a proved plan: alias"),
        ({"chains": [["F128"]]}, "'F128' is not a valid DType"),
        ({"chains": [[]]}, "not a proved plan: dtype chain"),
        ({"types": [["BF16", [2, 2**63]]]}, "stands where a size belongs"),
        ({"types": [["BF16", [2**62, 2**62]]]}, "more than a file can hold"),
        ({"types": [["F4", [3]]]}, "not a whole number of bytes"),
        ({"types": [["BF16", [2]]]}, "has no dim 1"),
        ({"types": []}, "there are 0 types"),
        ({"type": int64s(-1)}, "there are 1 types"),
        ({"type": int64s(0, 0)}, "different lengths"),
        ({"type": "w"}, "is not made of 64-bit integers"),
        ({"names": []}, "different lengths"),
        ({"names": [b"w"]}, "stands where a text belongs"),
        ({"shard_dim": int64s(-2)}, "has no dim -2"),
        ({"shard_dim": int64s(2)}, "has no dim 2"),
        ({"intervals": [[1, []]]}, "intervals for tensor 1"),
        ({"intervals": [[0, [[[0, 2]]]], [0, [[[0, 2]]]]]}, "intervals for tensor 0"),
        ({"intervals": [[0, [[[0, 4]], [[0, 4]]]]]}, "ranks leave a gap or overlap at 0"),
        ({"files": [["m", 200, "safetensors", [[150, 100]], "", ""]]}, "a guard reaches past them"),
        ({"files": [["m", 200, "safetensors", [[0]], "", ""]]}, "a row has 1 values, 2 belong there"),
        (
            {"files": [["m", 200, "safetensors", [[0, 100], [50, 100]], "", ""]]},
            "guards of file 'm' are not in order, or overlap",
        ),
        ({"files": [["m", 200, "safetensors", [[100, 9], [0, 9]], "", ""]]}, "guards of file 'm' are not in order"),
        ({"files": 3}, "files holds 3 where a list belongs"),
        ({"report": []}, "report is not a mapping"),
        ({"report": {}}, "sources is missing"),
        ({"provenance": [["a", "b", "c"]]}, "a row has 3 values"),
        ({"model": ["transformers", "X"]}, "a row has 2 values, 5 belong there"),
        ({"model": ["transformers", "X", "bfloat16", "{}", b""]}, "'{}' stands where bytes belong"),
        ({"model": None}, "model holds None where a list belongs"),
        ({"fusions": [["a", "qkv"]]}, "a row has 2 values, 3 belong there"),
        ({"fusions": [["b", "f", "{}"], ["a", "f", "{}"]]}, "paths of fused modules are not in order"),
        ({"provenance": "x" * 100_000}, "provenance holds 'xxx"),
    ],
)
def test_malformed_heads(change: Mapping[str, object], says: str) -> None:
    assert says in refused(changed_head(change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run": b"\0" * 7}, "column run is not made of 64-bit integers"),
        ({"run": [2]}, "column run is not made of 64-bit integers"),
        ({"run": b""}, "the columns of copies have different lengths"),
        ({"extent": b""}, "the columns of loops have different lengths"),
        ({"first_loop": int64s(0)}, "the columns of loops have different lengths"),
        ({"first_loop": int64s(1, 1)}, "the loops of the copies do not follow each other"),
        ({"first_loop": int64s(0, 0)}, "the loops of the copies do not follow each other"),
        ({"first_loop": int64s(0, 2)}, "the loops of the copies do not follow each other"),
        ({"temporaries": [["F32"]]}, "a row has 1 values, 2 belong there"),
        ({"src": int64s(2**62)}, "not a proved plan: rank 1: copy 0: reads up to byte"),
        ({"src": int64s(-1)}, "not a proved plan: rank 1: copy 0: has a negative offset"),
    ],
)
def test_malformed_sections(change: Mapping[str, object], says: str) -> None:
    head, first, second = frames_of(DATA)
    assert says in refused(file_of([head, first, msgpack.packb({**msgpack.unpackb(second), **change})]))


@cache
def _paths() -> list[tuple[int, tuple[object, ...]]]:
    """The way to every value inside the three frames."""
    found: list[tuple[int, tuple[object, ...]]] = []
    for number, frame in enumerate(frames_of(DATA)):
        todo: list[tuple[tuple[object, ...], object]] = [((), msgpack.unpackb(frame))]
        while todo:
            path, value = todo.pop()
            found.append((number, path))
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            todo += [((*path, key), item) for key, item in items]
    return found


def _put(value: object, path: tuple[object, ...], new: object) -> object:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    copy[path[0]] = _put(copy[path[0]], path[1:], new)
    return copy


_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=24)
)
VALUES = (
    st.sampled_from([0, 1, 2, 4, 100, 200, 2**62, "w", "F32", int64s(0), int64s(0, 1), [], {}, [[0, 4]]])
    | _PLAIN
    | st.recursive(
        _PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6
    )
)


@given(places=st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=2))
def test_any_value(places: list[tuple[int, object]]) -> None:
    """Right lengths and digests around wrong values: PlanError, or a plan that is proved."""
    frames = frames_of(DATA)
    for place, value in places:
        number, path = _paths()[place % len(_paths())]
        try:
            frames[number] = msgpack.packb(_put(msgpack.unpackb(frames[number]), path, value))
        except (KeyError, IndexError, TypeError, ValueError):
            return  # the first change took the second one's place away
    try:
        found = open_all(file_of(frames))
    except PlanError:
        return
    assert len(found) == 2
