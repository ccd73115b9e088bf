"""A row for each known way to damage or bend a safetensors file, and comparisons with the reference library.

Compared with `safetensors`: names, shapes, dtypes, bytes and metadata of whatever is accepted here. Not compared: the
reasons of a refusal. `STRICTER` lists the rows that are refused here on purpose although the library accepts them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.problem import CheckpointError
from loadplan.compiler.read_header import Header, frame_length, parse_header, read_header
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

FILE = "model-00001-of-00002.safetensors"
STRICTER = {"B5", "C1", "C3", "C3-escaped", "C5", "C9", "C13", "D12", "D12-end", "D12-middle", "E6"}


def frame(header: str | bytes, data: bytes = b"", *, off_by: int = 0) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) + off_by).to_bytes(8, "little") + text + data


def entry_text(spec: str) -> str:
    """`a:F32[2]@0..8` as JSON."""
    found = re.fullmatch(r"(.*):(\w+)\[([\d,]*)\]@(\d+)\.\.(\d+)", spec, re.DOTALL)
    assert found is not None, spec
    name, dtype, shape, begin, end = found.groups()
    return f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'


def build(*specs: str, data: int = 0) -> bytes:
    text = "{" + ",".join(map(entry_text, specs)) + "}"
    return frame(text + " " * (-len(text) % 8), bytes(index % 251 for index in range(data)))


def fields(text: str, data: int = 8) -> bytes:
    """A file of one tensor `a`, whose entry is this JSON."""
    return frame(f'{{"a":{text}}}', bytes(data))


def specs_of(header: Header) -> list[str]:
    starts = [(entry, entry.offset - header.nbytes) for entry in header.entries]
    return [f"{entry.name}:{entry.type}@{begin}..{begin + entry.type.nbytes}" for entry, begin in starts]


def parse(data: bytes) -> Header:
    nbytes = 8 + frame_length(data[:520], name=FILE, size=len(data))
    return parse_header(data[:nbytes], name=FILE, size=len(data))


@dataclass(frozen=True)
class Row:
    id: str
    data: bytes
    refused: str = ""  # regular expression for the message; empty when the file is accepted
    tensors: Sequence[str] = ()  # at fault
    entries: Sequence[str] = ()  # of an accepted file, in file order
    also: Sequence[str] = ()  # regular expressions for further problems


A = "a:F32[2]@0..8"
GOOD_A = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 4976698672\n"
ODD_NAME = "\0/../x\n\x1b[31mred"

ROWS = [
    Row("A1", b"", r"is empty \(0 bytes\): download it again"),
    Row("A2", b"\x10\0\0\0\0\0\0", "is truncated: has 7 bytes, not even the 8 of a header length"),
    Row("A3", bytes(8), "header length of 0, as a file of zeros"),
    Row("A3-long", bytes(4096), "header length of 0, as a file of zeros"),
    Row("A4", frame("{}", off_by=998), "truncated inside its header: has 10 bytes of at least 1008: download"),
    Row("A4-like-html", frame("{}", off_by=58), "truncated inside its header: has 10 bytes of at least 68: download"),
    Row("A4-like-pickle", frame("{}", off_by=638), "truncated inside its header: has 10 bytes of at least 648"),
    Row("A5", b"\xff" * 8 + b"{}", "header length of 18446744073709551615, over the limit of 100000000 bytes"),
    Row("A6", (10**8).to_bytes(8, "little") + b"{}", "truncated inside its header: has 10 bytes of at least 100000008"),
    Row("A7", (10**8 + 1).to_bytes(8, "little") + b"{}", "header length of 100000001, over the limit of 100000000"),
    Row("A10", LFS, f"git-lfs pointer of {len(LFS)} bytes, not the 4976698672 bytes it stands for: run `git lfs pull`"),
    Row("A11", b"PK\x03\x04\0\0\x08\x08\0\0" + bytes(90), "is a zip archive, as torch.save writes"),
    Row("A11-pickle", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is a pickle"),
    Row("A12", b"<!DOCTYPE html><html>Log in</html>", "is an HTML or XML page"),
    Row("A12-blank", b"\n\n<html>Log in, please</html>", "is an HTML or XML page"),
    Row("A12-json", b'{"error":"Repository not found"}', "is text that begins with b'{\"error\"'"),
    Row("A12-text", b"Entry not found\n", "is text that begins with b'Entry no'"),
    Row("A13", frame(f"{{{entry_text(A)}}}", bytes(8), off_by=-1), r"not JSON: .* at byte \d+"),
    Row("A14", (2).to_bytes(8, "big") + b"{}", r"\d+ \(big-endian it would be 2\), over the limit"),
    Row("A15", build("a:F32[4]@0..16"), "is truncated: has 64 of 80 bytes, 16 are missing: download it again"),
    Row("A16", build(A, data=9), "has 1 bytes after its last tensor: has 73 bytes, its header accounts for 72"),
    Row("A18", frame("{" + entry_text(A) + " " * (640 - 52) + "}", bytes(8)), entries=[A]),
    Row("B1", frame(b'{"\xff\xfe":{' + GOOD_A.encode() + b"}}", bytes(8)), "not UTF-8 at byte 10"),
    Row("B2", frame(f"{{{entry_text(A)},}}", bytes(8)), r"not JSON: .* at byte \d+"),
    Row("B3", frame("{} x"), "has 'x' after its header's closing brace"),
    Row("B4", frame("{}\0\0\0\0"), r"has '\\x00\\x00\\x00\\x00' after its header's closing brace"),
    Row("B5", frame(f"  {{{entry_text(A)}}}", bytes(8)), "begins with b' ', not with '{'"),
    Row("B6", frame(f"{{{entry_text(A)}}}\n\t\r ", bytes(8)), entries=[A]),
    Row("B7", frame(b"\xef\xbb\xbf{}"), r"begins with b'\\xef', not with '{'"),
    Row("B8", frame("[]"), r"begins with b'\[', not with '{'"),
    Row("B9", frame("{}")),
    Row("B10", frame("{}", bytes(8)), "has 8 bytes after its last tensor: has 18 bytes, its header accounts for 10"),
    Row(
        "B11", frame('{},"__metadata__":{"k":"v"}}'), "broken header that safetensors writes for a file without tensors"
    ),
    Row("B12", frame('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"), "nests too deep"),
    Row("B12-objects", frame('{"a":' * 200_000 + "0" + "}" * 200_000), "nests too deep"),
    Row("B13", frame(f'{{"\\ud800":{{{GOOD_A}}}}}', bytes(8)), r"tensor '\\ud800' has a lone surrogate in its name"),
    Row("B14", frame(f'{{"\\u0061":{{{GOOD_A}}}}}', bytes(8)), entries=[A]),
    Row("B15", frame(f'{{"模型.重み":{{{GOOD_A}}}}}', bytes(8)), entries=["模型.重み:F32[2]@0..8"]),
    Row(
        "B16",
        build("\u00e9:U8[1]@0..1", "e\u0301:U8[1]@1..2", data=2),
        entries=["\u00e9:U8[1]@0..1", "e\u0301:U8[1]@1..2"],
    ),
    Row("B17", build(":F32[2]@0..8", data=8), entries=[":F32[2]@0..8"]),
    Row("B18", build(f"{ODD_NAME}:F32[2]@0..8", data=8), entries=[f"{ODD_NAME}:F32[2]@0..8"]),
    Row("B18-shown", build(f"{ODD_NAME}:F32[2]@0..9", data=9), r"'\\x00/../x\\n\\x1b\[31mred'", tensors=[ODD_NAME]),
    Row("B19", fields('{"dtype":"F32","shape":[2],"data_offsets":[0,08]}'), "not JSON"),
    Row("B19-nan", fields('{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}'), r"shape \[nan\]", ["a"]),
    Row("B19-inf", fields('{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}'), r"\[0, inf\]", ["a"]),
    Row("C1", frame(f"{{{entry_text(A)},{entry_text(A)}}}", bytes(8)), "has 'a' twice in its header", ["a"]),
    Row("C2", build(A, "a:F32[2]@8..16", data=16), "has 'a' twice in its header", ["a"]),
    Row("C3", build(A, "a:F32[4]@0..16", data=16), "has 'a' twice in its header", ["a"]),
    Row(
        "C3-escaped",
        frame(f'{{{entry_text(A)},"\\u0061":{{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}}}', bytes(8)),
        "has 'a' twice in its header",
        ["a"],
    ),
    Row("C4", fields('{"dtype":"F16",' + GOOD_A + "}"), "tensor 'a' has 'dtype' twice", ["a"]),
    Row("C5", fields("{" + GOOD_A + ',"x":1}'), "tensor 'a' has the unknown field 'x'", ["a"]),
    Row("C6", fields('{"dtype":"F32","shape":[2]}'), "tensor 'a' has no data_offsets", ["a"]),
    Row("C6-dtype", fields('{"shape":[2],"data_offsets":[0,8]}'), "tensor 'a' has no dtype", ["a"]),
    Row("C6-shape", fields('{"dtype":"F32","data_offsets":[0,8]}'), "tensor 'a' has no shape", ["a"]),
    Row(
        "C6-offsets",
        fields('{"dtype":"F32","shape":[2],"offsets":[0,8]}'),
        "tensor 'a' has no data_offsets, the unknown field 'offsets'",
        ["a"],
    ),
    Row("C7", fields('{"dtype":"F32","shape":[2],"data_offsets":[8]}'), "an array of 1, not an array of 2", ["a"]),
    Row("C7-3", fields('{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}'), "array of 3, not an array of 2", ["a"]),
    Row("C8", fields("null"), "tensor 'a' is null, not an object", ["a"]),
    Row("C8-text", fields('"F32"'), "tensor 'a' is 'F32', not an object", ["a"]),
    Row("C9", fields('["F32",[2],[0,8]]'), "tensor 'a' is an array of 3, not an object", ["a"]),
    *(
        Row(f"C10-{word}", build(f"a:{word}[2]@0..8", data=8), f"unknown dtype '{word}', not one of BOOL, F4,", ["a"])
        for word in ("f32", "F128", "FLOAT")
    ),
    Row("C10-number", fields('{"dtype":3,"shape":[2],"data_offsets":[0,8]}'), "unknown dtype 3", ["a"]),
    Row("C10-array", fields('{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}'), "dtype an array of 1", ["a"]),
    *(
        Row(
            f"C11-{word}",
            fields(f'{{"dtype":"F32","shape":[{word}],"data_offsets":[0,8]}}'),
            rf"tensor 'a' has the shape \[{re.escape(shown)}\], not integers from 0 to 9223372036854775807",
            ["a"],
        )
        for word, shown in [
            ("-2", "-2"),
            ("2.0", "2.0"),
            ('"2"', "'2'"),
            ("null", "null"),
            ("-0", "-0.0"),
            ("true", "true"),
            ("[2]", "an array of 1"),
        ]
    ),
    Row("C11-shape", fields('{"dtype":"F32","shape":2,"data_offsets":[0,8]}'), "shape that is 2, not an array", ["a"]),
    Row("C11-offset", fields('{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}'), r"data_offsets \[0, 8.0\]", ["a"]),
    Row("C12", build("a:U8[18446744073709551616]@0..8", data=8), "not integers from 0 to 9223372036854775807", ["a"]),
    Row("C12-offset", build("a:U8[8]@0..18446744073709551616", data=8), "not integers from 0 to 92233720368", ["a"]),
    Row(
        "C12-exact",
        build("a:U8[9007199254740993]@0..9007199254740993"),
        "of 9007199254741089 bytes, 9007199254740993 are missing",
    ),
    Row("C12-huge", build("a:U8[" + "9" * 5000 + "]@0..8", data=8), "a number of thousands of digits"),
    Row("C13", build(f"a:U8[{','.join('1' * 300)}]@0..1", data=1), "has 300 dims, over the limit of 64", ["a"]),
    Row("D1", build("a:F32[2]@8..0", data=8), r"data_offsets \[8, 0\] that end before they begin", ["a"]),
    Row("D2", build("a:F32[4]@0..16", data=8), "is truncated: has 72 of 80 bytes, 8 are missing"),
    Row("D3", build(A, "b:F32[2]@4..12", data=12), r"'b' has .* \[4, 12\], inside tensor 'a' at \[0, 8\]", ["b", "a"]),
    Row("D4", build("b:F32[2]@0..8", A, data=8), r"'b' has .* \[0, 8\], inside tensor 'a' at \[0, 8\]", ["b", "a"]),
    Row("D5", build(A, "b:F32[2]@16..24", data=24), "'b' has .* a hole: bytes 8 to 16 belong to no tensor", ["b"]),
    Row("D6", build("a:F32[2]@8..16", data=16), "'a' has .* a hole: bytes 0 to 8 belong to no tensor", ["a"]),
    Row("D7", build("a:F32[2]@0..16", data=16), r"type F32\[2\] of 8 bytes, its data_offsets span 16", ["a"]),
    Row("D8", build("a:F64[4]@0..16", data=16), r"type F64\[4\] of 32 bytes, its data_offsets span 16", ["a"]),
    Row("D9", build("a:F32[4294967296,4294967296]@0..0"), "dims multiply to more than 9223372036854775807", ["a"]),
    Row("D10", build("a:F32[9223372036854775810,2]@0..16", data=16), "not integers from 0 to 92233720368", ["a"]),
    Row("D11", build("a:F32[4611686018427387904]@0..0"), "of 18446744073709551616 bytes, .* span 0", ["a"]),
    Row("D12", build(f"a:F32[0,{2**63},{2**63}]@0..0"), "not integers from 0 to 9223372036854775807", ["a"]),
    Row("D12-end", build(f"a:F32[{2**63},0]@0..0"), "not integers from 0 to 9223372036854775807", ["a"]),
    Row("D12-middle", build(f"a:F32[{2**62},0,{2**62}]@0..0"), "dims multiply to more than 92233720368", ["a"]),
    Row("D12-fits", build(f"a:F32[{2**63 - 1},0]@0..0"), entries=[f"a:F32[{2**63 - 1},0]@0..0"]),
    Row(
        "D13",
        build("b:F32[2]@8..16", "z:F32[0]@8..8", "y:F32[0,3]@16..16", A, "x:F32[0]@0..0", data=16),
        entries=["x:F32[0]@0..0", A, "z:F32[0]@8..8", "b:F32[2]@8..16", "y:F32[0,3]@16..16"],
    ),
    Row("D14", build(A, "z:F32[0]@4..4", data=8), r"'z' has .* \[4, 4\], inside tensor 'a' at \[0, 8\]", ["z", "a"]),
    Row(
        "D15",
        build("z:F32[0]@100..100"),
        "'z' has .* a hole: bytes 0 to 100 belong to no tensor",
        ["z"],
        also=["truncated"],
    ),
    Row("D16", build("a:F32[1]@0..0"), r"type F32\[1\] of 4 bytes, its data_offsets span 0", ["a"]),
    Row("D17", build("a:I64[]@0..8", data=8), entries=["a:I64[]@0..8"]),
    Row("D17-empty", build("a:U8[]@0..0"), r"type U8\[\] of 1 bytes, its data_offsets span 0", ["a"]),
    Row("D18", build("b:F32[2]@8..16", A, data=16), entries=[A, "b:F32[2]@8..16"]),
    Row("D19", build("a:U8[3]@0..3", "b:F32[2]@3..11", data=11), entries=["a:U8[3]@0..3", "b:F32[2]@3..11"]),
    Row("D20", frame(f"{{{entry_text(A)}}}", bytes(8)), entries=[A]),
    Row("D21", build("a:F4[3]@0..2", data=2), r"type F4\[3\] of 12 bits, which do not end at a byte", ["a"]),
    Row("D21-f6", build("a:F6_E2M3[3]@0..3", data=3), "of 18 bits, which do not end at a byte", ["a"]),
    Row("D21-even", build("a:F4[2,4]@0..4", data=4), entries=["a:F4[2,4]@0..4"]),
    Row(
        "D22",
        build("a:F6_E2M3[4]@0..3", "b:F8_E8M0[3]@3..6", "c:F8_E4M3FNUZ[1]@6..7", "d:C64[2]@7..23", data=23),
        entries=["a:F6_E2M3[4]@0..3", "b:F8_E8M0[3]@3..6", "c:F8_E4M3FNUZ[1]@6..7", "d:C64[2]@7..23"],
    ),
    Row("D23", frame("{" + entry_text("a:BOOL[2]@0..2") + "}", b"\x02\xff"), entries=["a:BOOL[2]@0..2"]),
    Row("E1", frame('{"__metadata__":{"k":1}}'), "in __metadata__ that is 1, not a string, at 'k'"),
    Row("E1-bool", frame('{"__metadata__":{"k":true}}'), "that is true, not a string, at 'k'"),
    Row("E1-object", frame('{"__metadata__":{"k":{}}}'), "that is an object, not a string, at 'k'"),
    Row("E1-list", frame('{"__metadata__":["k"]}'), "__metadata__ that is an array of 1, not an object of strings"),
    Row("E2", frame(f'{{"__metadata__":null,{entry_text(A)}}}', bytes(8)), entries=[A]),
    Row("E3", frame(f'{{"__metadata__":{{}},{entry_text(A)}}}', bytes(8)), entries=[A]),
    Row("E4", frame(f'{{"__metadata__":{{{GOOD_A}}}}}', bytes(8)), "that is an array of 1, not a string, at 'shape'"),
    Row("E5", frame('{"__metadata__":{},"__metadata__":{}}'), "has '__metadata__' twice in its header"),
    Row("E6", frame('{"__metadata__":{"k":"v","k":"w"}}'), "has 'k' twice in __metadata__"),
    Row("E6-surrogate", frame('{"__metadata__":{"k":"\\ud800"}}'), "lone surrogate in __metadata__ at 'k'"),
    Row("E7", frame('{"__metadata__":{"format":"pt"}}')),
    Row("E8", frame(f'{{"__metadata__":{{"total":"8"}},{entry_text(A)}}}', bytes(8)), entries=[A]),
    Row("E9", frame(json.dumps({"__metadata__": {"log": "\0\x1bé" * 350_000}}))),
]
ACCEPTED = [row for row in ROWS if not row.refused]
REFUSED = [row for row in ROWS if row.refused]


def ids(rows: list[Row]) -> list[str]:
    return [row.id for row in rows]


def test_every_known_case_has_a_row() -> None:
    known = {
        f"{letter}{i}" for letter, count in zip("ABCDE", (18, 19, 13, 24, 9), strict=True) for i in range(1, count + 1)
    }
    elsewhere = {"A8", "A9", "A17"}  # below: the first two need 100 MB of file, the third is no bytes at all
    slicing = {"D24"}  # about what is done with an accepted entry
    assert {row.id.split("-")[0] for row in ROWS} == known - elsewhere - slicing


@pytest.mark.parametrize("row", ACCEPTED, ids=ids(ACCEPTED))
def test_accepts(row: Row, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(row.data)
    header, digest = read_header(path, name=FILE)
    assert specs_of(header) == list(row.entries)
    assert {(entry.file, entry.strides) for entry in header.entries} <= {(FILE, None)}
    assert header.nbytes == 8 + int.from_bytes(row.data[:8], "little")
    assert digest == hashlib.sha256(row.data[: header.nbytes]).hexdigest()


@pytest.mark.parametrize("row", REFUSED, ids=ids(REFUSED))
def test_refuses(row: Row, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(row.data)
    with pytest.raises(CheckpointError, match=row.refused) as caught:
        read_header(path, name=FILE)
    problem, *others = caught.value.problems
    assert all(re.search(text, other.message) for text, other in zip(row.also, others, strict=True))
    assert problem.kind == "header"
    assert problem.message.startswith(f"{FILE}: ")
    assert problem.message.isprintable()
    assert problem.names[0] == FILE
    if row.tensors:
        assert problem.names[1:] == tuple(row.tensors)
        assert all(repr(name) in problem.message for name in row.tensors)


@pytest.mark.skipif(int(version("safetensors").split(".")[1]) < 8, reason="the verdicts are those of safetensors 0.8.0")
@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_differs_from_the_reference_only_where_stated(row: Row) -> None:
    accepted = reference(row.data) is not None
    assert accepted == (not row.refused or row.id in STRICTER)


def test_golden_bytes() -> None:
    data = (
        b"\x50\0\0\0\0\0\0\0"
        b'{"__metadata__":{"k":"v"},"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}  '
        b"\x01\x02\x03"
    )
    entry = Entry("w", TensorType((3,), DType.U8), FILE, 88)
    assert parse(data) == Header((entry,), {"k": "v"}, 88, data[:88])


def test_metadata_is_kept_and_absent_or_null_metadata_is_empty() -> None:
    assert parse(frame('{"__metadata__":{"format":"pt","":"\\n"}}')).metadata == {"format": "pt", "": "\n"}
    assert parse(frame('{"__metadata__":null}')).metadata == {}
    assert parse(frame("{}")).metadata == {}


@pytest.mark.parametrize("nbytes", [2, 99_999_999, 100_000_000])
def test_frame_length_up_to_the_limit(nbytes: int) -> None:  # A8
    assert frame_length(nbytes.to_bytes(8, "little"), name=FILE, size=nbytes + 8) == nbytes


def test_frame_length_over_the_limit() -> None:  # A9
    with pytest.raises(CheckpointError, match="header length of 100000001, over the limit of 100000000 bytes"):
        frame_length((10**8 + 1).to_bytes(8, "little"), name=FILE, size=7 * 2**30)


def test_the_limit_is_named_before_the_file_size() -> None:
    with pytest.raises(CheckpointError, match="header length of 132095296, over the limit"):
        frame_length((132_095_296).to_bytes(8, "little"), name=FILE, size=10)


def test_a_dangling_link_says_where_it_points(tmp_path: Path) -> None:  # A17
    path = tmp_path / "x"
    path.symlink_to("../../blobs/4d7a")
    with pytest.raises(CheckpointError, match=rf"{FILE}: is a link to '../../blobs/4d7a', which does not exist"):
        read_header(path, name=FILE)


def test_what_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{FILE}: cannot be read: No such file or directory"):
        read_header(tmp_path / "x", name=FILE)
    with pytest.raises(CheckpointError, match=f"{FILE}: cannot be read: Is a directory"):
        read_header(tmp_path, name=FILE)


def test_a_header_that_could_not_be_read_whole_is_refused() -> None:
    data = build(A, data=8)
    with pytest.raises(CheckpointError, match="has a header of 64 bytes, 40 could be read"):
        parse_header(data[:40], name=FILE, size=len(data))


def test_a_file_name_is_shown_escaped() -> None:
    with pytest.raises(CheckpointError) as caught:
        frame_length(b"", name="a\x1b[31m", size=0)
    assert caught.value.problems[0].message.startswith(r"'a\x1b[31m': is empty")
    assert caught.value.problems[0].names == ("a\x1b[31m",)


def test_a_long_name_is_cut_in_the_message_only() -> None:
    name = "x" * 100_000
    with pytest.raises(CheckpointError) as caught:
        parse(build(f"{name}:F32[2]@0..9", data=9))
    assert len(caught.value.problems[0].message) < 600
    assert caught.value.problems[0].names == (FILE, name)


def test_every_faulty_tensor_is_reported() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(build("d:F32[2]@4..12", "c:F128[2]@8..16", "b:F32[3]@0..8", A, "e:U8[1]@99..100", data=16))
    messages = [problem.message for problem in caught.value.problems]
    assert [re.sub(r"^.*?: | has .*", "", message) for message in messages] == [
        "tensor 'c'",  # faults of one entry, in header order
        "tensor 'b'",
        "tensor 'd'",  # faults of the layout, in file order; holes are not looked for among faulty entries
        "is truncated:",
    ]


def test_every_repeated_name_is_reported() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(build(A, "b:U8[1]@8..9", A, "b:U8[1]@8..9", "c:U8[1]@9..10", data=10))
    assert [problem.names for problem in caught.value.problems] == [(FILE, "a"), (FILE, "b")]


def test_data_is_neither_read_nor_part_of_the_digest(tmp_path: Path) -> None:
    nbytes = 10 * 2**30
    raw = build(f"a:U8[{nbytes}]@0..{nbytes}")
    path = tmp_path / "sparse"
    path.write_bytes(raw)
    os.truncate(path, len(raw) + nbytes)
    header, digest = read_header(path, name=FILE)
    assert specs_of(header) == [f"a:U8[{nbytes}]@0..{nbytes}"]
    assert digest == hashlib.sha256(raw).hexdigest()


def test_ninety_thousand_entries() -> None:
    count = 90_000
    specs = [f"model.layers.{i}.w:BF16[4,8]@{64 * i}..{64 * i + 64}" for i in range(count)]
    header_only = build(*reversed(specs))
    header = parse_header(header_only, name=FILE, size=len(header_only) + 64 * count)
    assert specs_of(header) == specs


def reference(data: bytes) -> dict[str, tuple[tuple[int, ...], str, bytes]] | None:
    """What the reference library reads, or None where it refuses."""
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return {name: (tuple(info["shape"]), info["dtype"], bytes(info["data"])) for name, info in tensors}


def contents(header: Header, data: bytes) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    return {
        entry.name: (entry.type.shape, entry.type.dtype.value, data[entry.offset : entry.offset + entry.type.nbytes])
        for entry in header.entries
    }


def agree(data: bytes) -> None:
    """Refused, or read just as the reference library reads it."""
    try:
        header = parse(data)
    except CheckpointError:
        return
    assert contents(header, data) == reference(data)


NAMES = st.text(max_size=8).filter(lambda name: name != "__metadata__")


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Valid files: any dtype and name, header order apart from data order, blanks between and after."""
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    texts, begin = [], 0
    for name in names:
        dtype = draw(st.sampled_from(DType))
        shape = [*draw(st.lists(st.integers(0, 3), max_size=3)), *([4] if dtype.is_packed else [])]
        end = begin + TensorType(tuple(shape), dtype).nbytes
        blank = draw(st.sampled_from(["", " ", "\n\t"]))
        key = json.dumps(name, ensure_ascii=draw(st.booleans()))
        texts.append(f'{key}:{{"shape":{shape},{blank}"data_offsets":[{begin},{end}],"dtype":"{dtype}"}}')
        begin = end
    if draw(st.booleans()):
        texts.append(f'"__metadata__":{json.dumps(draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3))))}')
    text = "{" + ",".join(draw(st.permutations(texts))) + "}" + draw(st.sampled_from(["", "   ", "\r\n"]))
    return frame(text, bytes(index % 251 for index in range(begin)))


@given(files())
@settings(max_examples=200, deadline=None)
def test_valid_files_are_read_as_the_reference_reads_them(data: bytes) -> None:
    header = parse(data)
    assert contents(header, data) == reference(data)
    offsets = [(entry.offset, entry.type.nbytes, entry.name) for entry in header.entries]
    assert offsets == sorted(offsets)


TORCH_DTYPES = sorted(safetensors.torch._TYPES.items())


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)):
        _, dtype = draw(st.sampled_from(TORCH_DTYPES))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        tensor = torch.zeros(shape, dtype=dtype)
        if tensor.numel():  # any bits will do: payloads are compared as bytes
            raw = tensor.reshape(-1).view(torch.uint8)
            raw.copy_(torch.arange(raw.numel()) % 251)
        tensors[name] = tensor
    return tensors


@given(state_dicts(), st.dictionaries(NAMES, st.text(max_size=8), max_size=2))
@settings(max_examples=100, deadline=None)
def test_files_of_the_reference_writer(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("written") / FILE
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    header, _ = read_header(path, name=FILE)
    data = path.read_bytes()
    assert header.metadata == metadata
    assert {entry.name for entry in header.entries} == tensors.keys()
    with safetensors.safe_open(path, framework="pt") as handle:
        for entry in header.entries:
            tensor = handle.get_tensor(entry.name)
            assert tuple(tensor.shape) == entry.type.shape
            assert tensor.dtype == dict(TORCH_DTYPES)[entry.type.dtype.value]
            raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            assert data[entry.offset : entry.offset + entry.type.nbytes] == raw.numpy().tobytes()


EDITS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), st.binary(max_size=3)), min_size=1, max_size=4)


@given(files(), EDITS)
@settings(max_examples=1000, deadline=None)
def test_damaged_files_are_refused_or_read_alike(data: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    for start, count, text in edits:
        start %= len(data) + 1
        data = data[:start] + text + data[start + count :]
    agree(data)


NUMBERS = ["0", "1", "2", "4", "8", "-0", "-1", "1.0", "8e0", "1e", "01", "1e999", "NaN", "-Infinity", "9" * 5000]
LIMITS = [str(2**power) for power in (31, 32, 53, 62, 63, 64)]
WORDS = ["null", "true", '""', '"F32"', '"a"', '"\\ud800"', '"\\ud83d\\ude00"', '"\t"', '"\ud800"']
SCALARS = st.sampled_from(NUMBERS + LIMITS + WORDS)
KEYS = st.sampled_from(
    ['"a"', '"b"', '"\\u0061"', '""', '"__metadata__"', '"dtype"', '"shape"', '"data_offsets"', "'a'"]
)


def arrays(items: st.SearchStrategy[str], *, least: int = 0, most: int = 3) -> st.SearchStrategy[str]:
    return st.lists(items, min_size=least, max_size=most).map(lambda texts: f"[{','.join(texts)}]")


def objects(pairs: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[str]:
    return st.lists(pairs, max_size=4).map(lambda found: "{" + ",".join(f"{key}:{text}" for key, text in found) + "}")


SMALL = st.sampled_from(["0", "4", "8", "12", "1", "2", "3"])
VALUES = st.recursive(SCALARS, lambda inner: arrays(inner) | objects(st.tuples(KEYS, inner)), max_leaves=8)
ENTRIES = st.tuples(
    st.sampled_from(['"F32"', '"U8"', '"F4"', '"BF16"']) | SCALARS,
    arrays(SMALL | SCALARS),
    arrays(SMALL, least=2, most=2) | VALUES,
).map(lambda parts: f'{{"dtype":{parts[0]},"shape":{parts[1]},"data_offsets":{parts[2]}}}')


@given(objects(st.tuples(KEYS, ENTRIES | VALUES)), st.sampled_from([0, 4, 8, 12]))
@settings(max_examples=500, deadline=None)
def test_any_json_is_refused_or_read_alike(text: str, nbytes: int) -> None:
    agree(frame(text.encode("utf-8", "surrogatepass"), bytes(nbytes)))


TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\d+|[\[\]{}:,]')


@given(files(), st.lists(st.tuples(st.integers(0, 200), SCALARS | VALUES), min_size=1, max_size=2))
@settings(max_examples=1000, deadline=None)
def test_headers_with_other_tokens_are_refused_or_read_alike(data: bytes, swaps: list[tuple[int, str]]) -> None:
    nbytes = 8 + int.from_bytes(data[:8], "little")
    tokens = TOKEN.findall(data[8:nbytes].decode())
    for index, text in swaps:
        tokens[index % len(tokens)] = text
    agree(frame("".join(tokens).encode("utf-8", "surrogatepass"), data[nbytes:]))


@given(st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_read_alike(data: bytes) -> None:
    agree(data)
