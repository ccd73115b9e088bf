"""Signature files: literal bytes, and everything else refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys import private_key, write_private
from strategies import json_texts

from loadplan.cache.digest import digest_bytes
from loadplan.cache.signing import PublicKey, read_signing_key
from loadplan.runtime.signature_file import (
    PlanSignature,
    SignatureFileError,
    parse_signatures,
    read_signatures,
    sign_plan,
    write_signatures,
)

PLAN, FILES = digest_bytes(b"plan"), {"b/m.safetensors": digest_bytes(b"b"), "a": digest_bytes(b"a")}
RAW = private_key("ci").public_key().public_bytes_raw()
ID = digest_bytes(RAW)


@pytest.fixture
def signature(tmp_path: Path) -> PlanSignature:
    return sign_plan(read_signing_key(write_private(tmp_path, "ci")), PLAN, FILES)


def test_what_is_signed(signature: PlanSignature) -> None:
    """Literal bytes, checked by the library alone."""
    names = f'{{"a":"{FILES["a"]}","b/m.safetensors":"{FILES["b/m.safetensors"]}"}}'
    message = f'loadplan plan v1\0{{"files":{names},"plan":"{PLAN}"}}'.encode()
    private_key("ci").public_key().verify(signature.signature, message)
    assert signature.key == ID
    assert signature.is_right(PublicKey(RAW))


def test_literal_file(tmp_path: Path, signature: PlanSignature) -> None:
    plan = tmp_path / "m.loadplan"
    assert read_signatures(plan) == ()
    write_signatures(plan, [signature])
    assert json.loads((tmp_path / "m.loadplan.sig").read_bytes()) == {
        "format": 1,
        "signatures": [{"key": ID, "plan": PLAN, "files": FILES, "signature": signature.signature.hex()}],
    }
    assert read_signatures(plan) == (signature,)


def _file(**fields: object) -> bytes:
    row = {"key": ID, "plan": PLAN, "files": FILES, "signature": "00" * 64} | fields
    return json.dumps({"format": 1, "signatures": [row]}).encode()


BAD = {
    "empty": b"",
    "text": b"signed, me",
    "not utf-8": b'{"format": 1, "signatures": "\xff"}',
    "a list": b"[]",
    "other format": b'{"format": 2, "signatures": []}',
    "true": b'{"format": true, "signatures": []}',
    "more fields": b'{"format": 1, "signatures": [], "comment": ""}',
    "twice": b'{"format": 1, "signatures": [], "signatures": []}',
    "deep": b"[" * 100_000,
    "deep in place": b'{"format": 1, "signatures": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "many": json.dumps({"format": 1, "signatures": [{}] * 65}).encode(),
    "row": json.dumps({"format": 1, "signatures": [[]]}).encode(),
    "more in a row": _file(comment=""),
    "short signature": _file(signature="00" * 63),
    "upper case": _file(signature="AB" * 64),
    "no hex": _file(signature="zz" * 64),
    "plan": _file(plan="abc"),
    "key": _file(key=""),
    "files": _file(files=[]),
    "digest of a file": _file(files={"a": "abc"}),
    "number": _file(files={"a": 3}),
    "surrogate": _file(files={"\ud800": ID}),
    "large": b" " * ((16 << 20) + 1),
    "huge number": b'{"format": ' + b"1" * 5000 + b', "signatures": []}',
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "p.sig").write_bytes(BAD[kind])
    with pytest.raises(SignatureFileError, match=r"p\.sig: is no signature file") as caught:
        read_signatures(tmp_path / "p")
    assert len(str(caught.value)) < 1000


@given(data=st.binary(max_size=60) | json_texts("signatures"))
def test_any_bytes(data: bytes) -> None:
    try:
        found = parse_signatures(data)
    except (ValueError, TypeError, RecursionError):
        return
    assert found == ()


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_one_byte_changed(place: int, byte: int) -> None:
    """Refused, or not right, or the same."""
    key = private_key("ci")
    message = f'loadplan plan v1\0{{"files":{{"a":"{ID}"}},"plan":"{PLAN}"}}'.encode()
    data = bytearray(_file(files={"a": ID}, signature=key.sign(message).hex()))
    (good,) = parse_signatures(bytes(data))
    data[place % len(data)] = byte
    try:
        found = parse_signatures(bytes(data))
    except (ValueError, TypeError, RecursionError):
        return
    for signature in found:
        assert signature == good or signature.key != ID or not signature.is_right(PublicKey(RAW))
