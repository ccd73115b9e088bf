"""The message of Bazel's protocol: literal bytes, Google's protobuf as the judge, and fuzz."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from loadplan.cache.remotes.action_result import (
    ActionResult,
    BadActionResult,
    OutputFile,
    format_action_result,
    parse_action_result,
)

DIGEST = "ab" * 32
EXAMPLE = ActionResult((OutputFile("rank00/ä", DIGEST, 300), OutputFile("empty", "0" * 64, 0)), b"{}")
EXAMPLE_BYTES = (
    # output_files (field 2, bytes): path (1), digest (2): hash (1), size_bytes (2, varint)
    b"\x12\x52" + b"\x0a\x09rank00/\xc3\xa4" + b"\x12\x45" + b"\x0a\x40" + b"ab" * 32 + b"\x10\xac\x02"
    b"\x12\x4b" + b"\x0a\x05empty" + b"\x12\x42" + b"\x0a\x40" + b"0" * 64 +
    # stdout_raw (5), execution_metadata (9): worker (1)
    b"\x2a\x02{}" + b"\x4a\x0a" + b"\x0a\x08loadplan"
)  # fmt: skip


def _make_message_class() -> Any:
    """`ActionResult` from the field list of remote_execution.proto, made anew here: no code of ours takes part."""
    of, string, boolean, raw, int32, int64, message = (
        descriptor_pb2.FieldDescriptorProto,
        *(getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{n}") for n in ("STRING", "BOOL", "BYTES")),
        *(getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{n}") for n in ("INT32", "INT64", "MESSAGE")),
    )
    fields: dict[str, list[tuple[str, int, int, str, bool]]] = {
        "Digest": [("hash", 1, string, "", False), ("size_bytes", 2, int64, "", False)],
        "NodeProperties": [("unix_mode", 3, int64, "", False)],
        "OutputFile": [
            ("path", 1, string, "", False),
            ("digest", 2, message, "Digest", False),
            ("is_executable", 4, boolean, "", False),
            ("contents", 5, raw, "", False),
            ("node_properties", 7, message, "NodeProperties", False),
        ],
        "OutputDirectory": [("path", 1, string, "", False), ("tree_digest", 3, message, "Digest", False)],
        "OutputSymlink": [("path", 1, string, "", False), ("target", 2, string, "", False)],
        "ExecutedActionMetadata": [("worker", 1, string, "", False)],
        "ActionResult": [
            ("output_files", 2, message, "OutputFile", True),
            ("output_directories", 3, message, "OutputDirectory", True),
            ("exit_code", 4, int32, "", False),
            ("stdout_raw", 5, raw, "", False),
            ("stdout_digest", 6, message, "Digest", False),
            ("stderr_raw", 7, raw, "", False),
            ("stderr_digest", 8, message, "Digest", False),
            ("execution_metadata", 9, message, "ExecutedActionMetadata", False),
            ("output_file_symlinks", 10, message, "OutputSymlink", True),
            ("output_directory_symlinks", 11, message, "OutputSymlink", True),
            ("output_symlinks", 12, message, "OutputSymlink", True),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="v2.proto", package="build.bazel.remote.execution.v2", syntax="proto3"
    )
    for name, rows in fields.items():
        kind = file.message_type.add(name=name)
        for field, number, wire, of_type, is_many in rows:
            label = of.LABEL_REPEATED if is_many else of.LABEL_OPTIONAL
            made = kind.field.add(name=field, number=number, type=wire, label=label)
            if of_type:
                made.type_name = f".{file.package}.{of_type}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.ActionResult"))


Message = _make_message_class()

FILES = st.builds(
    OutputFile,
    st.text(min_size=1, max_size=40),
    st.text("0123456789abcdef", min_size=1, max_size=64),
    st.integers(0, 2**63 - 1),
)
RESULTS = st.builds(ActionResult, st.lists(FILES, max_size=8).map(tuple), st.binary(min_size=1, max_size=300))


def test_literal_bytes() -> None:
    assert format_action_result(EXAMPLE) == EXAMPLE_BYTES
    assert parse_action_result(EXAMPLE_BYTES) == EXAMPLE


@given(RESULTS)
def test_protobuf_reads_what_we_write(result: ActionResult) -> None:
    message = Message.FromString(format_action_result(result))
    assert [(file.path, file.digest.hash, file.digest.size_bytes) for file in message.output_files] == [
        (file.path, file.digest, file.nbytes) for file in result.files
    ]
    assert message.stdout_raw == result.stdout
    assert message.execution_metadata.worker == "loadplan"
    assert message.exit_code == 0
    assert message.SerializeToString() == format_action_result(result)  # byte for byte
    assert parse_action_result(format_action_result(result)) == result


@given(RESULTS, st.text(max_size=20))
def test_we_read_what_protobuf_writes_and_skip_what_we_need_not(result: ActionResult, worker: str) -> None:
    message = Message(stdout_raw=result.stdout, stderr_raw=b"a warning")
    message.execution_metadata.worker = worker
    for file in result.files:
        made = message.output_files.add(path=file.path, is_executable=True)
        made.digest.hash, made.digest.size_bytes = file.digest, file.nbytes
        made.node_properties.unix_mode = 0o755
    assert parse_action_result(message.SerializeToString()) == result


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00", "field number 0"),
        (b"\x12", "no number at byte 1"),
        (b"\x12\x05abc", "field 2 ends after the message"),
        (b"\x12" + b"\xff" * 9 + b"\x01", "field 2 ends after the message"),
        (b"\x12" + b"\xff" * 9 + b"\x02", "no number at byte 1"),
        (b"\x80" * 11, "no number at byte 0"),
        (b"\x13", "wire type 3 of field 2"),
        (b"\x10\x01", "field 2 of the result is there twice or of another type"),
        (b"\x11" + bytes(8), "field 2 of the result is there twice or of another type"),
        (b"\x2a\x01a\x2a\x01b", "field 5 of the result is there twice or of another type"),
        (b"\x20\x01", "the action ended with 1"),
        (b"\x1a\x00", "it has folders"),
        (b"\x32\x00", "it has a stdout blob"),
        (b"\x52\x00", "it has links"),
        (b"\x12\x00", "an output file has no path or no digest"),
        (b"\x12\x03\x0a\x01a", "an output file has no path or no digest"),
        (b"\x12\x06\x0a\x01a\x0a\x01b", "field 1 of an output file is there twice or of another type"),
        (b"\x12\x05\x0a\x01\xff\x12\x00", "b'\\xff' is not UTF-8"),
        (b"\x12\x09\x0a\x01a\x12\x04\x10\x01\x10\x02", "field 2 of a digest is there twice or of another type"),
    ],
)
def test_what_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadActionResult) as caught:
        parse_action_result(data)
    assert caught.value.reason == reason


def test_a_size_below_zero_is_read_as_such() -> None:
    message = Message()
    message.output_files.add(path="a").digest.size_bytes = -5
    assert parse_action_result(message.SerializeToString()).files[0].nbytes == -5


def _agree_with_protobuf(data: bytes) -> None:
    try:
        result = parse_action_result(data)
    except BadActionResult:
        return
    message = Message.FromString(data)  # DecodeError: we took what protobuf refuses
    assert [(file.path, file.digest.hash, file.digest.size_bytes) for file in message.output_files] == [
        (file.path, file.digest, file.nbytes) for file in result.files
    ]
    assert message.stdout_raw == result.stdout


@given(st.binary(max_size=200))
def test_fuzz(data: bytes) -> None:
    _agree_with_protobuf(data)


@given(RESULTS, st.data())
def test_fuzz_near_a_good_message(result: ActionResult, data: st.DataObject) -> None:
    spoiled = bytearray(format_action_result(result))
    for _ in range(data.draw(st.integers(1, 3))):
        if spoiled:
            at = data.draw(st.integers(0, len(spoiled) - 1))
            spoiled[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    _agree_with_protobuf(bytes(spoiled))


def test_the_judge_can_say_no() -> None:
    with pytest.raises(DecodeError):
        Message.FromString(b"\x12\x05abc")
