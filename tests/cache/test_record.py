"""A record is read back whole, or not at all."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.cache.digest import digest_bytes
from loadplan.cache.record import find_record, format_record, parse_record, write_record

GOLDEN = b'015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862\n{"a":1}'


def sealed(body: bytes) -> bytes:
    return digest_bytes(body).encode() + b"\n" + body


def test_literal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "record"
    assert find_record(path) is None
    write_record(path, {"a": 1})
    assert path.read_bytes() == format_record({"a": 1}) == GOLDEN
    assert find_record(path) == parse_record(GOLDEN) == {"a": 1}


def test_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(GOLDEN)
    assert find_record(tmp_path) is None
    assert find_record(tmp_path / "file" / "below") is None


def test_every_truncation_and_every_flipped_bit() -> None:
    for i in range(len(GOLDEN)):
        assert parse_record(GOLDEN[:i]) is None, i
        for bit in range(8):
            flipped = bytearray(GOLDEN)
            flipped[i] ^= 1 << bit
            assert parse_record(bytes(flipped)) is None, (i, bit)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 200_000, b"9" * 5000, b"{}{}", b"\n"])
def test_right_digest_of_what_is_not_json(body: bytes) -> None:
    assert parse_record(sealed(body)) is None


@settings(deadline=None)
@given(st.binary())
def test_random_bytes(data: bytes) -> None:
    assert parse_record(data) is None
    parse_record(sealed(data))
