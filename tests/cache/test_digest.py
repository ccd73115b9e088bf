"""One text for equal values, different texts for all others."""

import io
import json
from collections.abc import Iterator
from enum import StrEnum
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.cache import digest
from loadplan.cache.digest import NotCanonical, canonical_json, digest_bytes, digest_file, digest_json, is_digest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # FIPS 180-4 test vectors
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


class Colour(StrEnum):
    RED = "red"


def loop() -> Iterator[int]:
    yield 1


def test_known_digests(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert digest_bytes(b"") == EMPTY
    assert digest_bytes(b"abc") == digest_bytes(bytearray(b"abc")) == digest_bytes(memoryview(b"abc")) == ABC
    assert digest_file(path) == (ABC, 3)


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_file_around_the_chunk_size(tmp_path: Path, excess: int) -> None:
    data = bytes(range(256)) * (digest.CHUNK_NBYTES // 256) + b"x"
    data = data[: digest.CHUNK_NBYTES + excess]
    path = tmp_path / "large"
    path.write_bytes(data)
    sink = io.BytesIO()
    with path.open("rb", buffering=0) as file:
        assert digest.digest_stream(file, sink) == (digest_bytes(data), len(data)) == digest_file(path)
    assert sink.getvalue() == data


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ABC, True),
        (ABC.upper(), False),
        (ABC[:-1], False),
        (ABC + "0", False),
        (ABC + "\n", False),
        ("../" + ABC[3:], False),
        ("٣" * 64, False),
        (ABC.encode(), False),
        (None, False),
    ],
)
def test_is_digest(text: object, wanted: bool) -> None:
    assert is_digest(text) is wanted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (-(10**30), "-1000000000000000000000000000000"),
        ('é"\n\U0001f600', '"é\\"\\n\U0001f600"'),
        (Colour.RED, '"red"'),
        ((1, [2, ()]), "[1,[2,[]]]"),
        ({"b": 1, "a": {"d": None, "c": []}}, '{"a":{"c":[],"d":null},"b":1}'),
    ],
)
def test_text(value: object, text: str) -> None:
    assert canonical_json(value) == text.encode()


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ((1, 2), [1, 2]), ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}})],
)
def test_equal(one: object, other: object) -> None:
    assert digest_json(one) == digest_json(other)


DIFFERENT: tuple[object, ...] = (
    *(None, "null", "", 0, 1, -1, "1", True, False, "true", [], {}, [[]], [{}], [None], [1, 2], [2, 1], [[1], 2]),
    *(["1,2"], ["1", "2"], "[1,2]", {"a": 1}, {"a": "1"}, {"A": 1}, {"a": [1]}, {"a": None}, {"a": 1, "b": 2}),
    *({"a": 2, "b": 1}, {"a": {"b": 2}}, {"a,b": 2}, "é", "e\u0301", "\\u00e9", "a\x00", "a", " a", 2**53, 2**53 + 1),
)


def test_different() -> None:
    for one, other in combinations(DIFFERENT, 2):
        assert digest_json(one) != digest_json(other), (one, other)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "value: the float 0.5 has"),
        (1.0, "value: the float 1.0 has"),
        (float("nan"), "value: the float nan has"),
        ([float("inf")], "value[0]: the float inf has"),
        ({"a": [1, {"b": 1e9}]}, "value['a'][1]['b']: the float 1000000000.0 has"),
        ({1: 2}, "value: the int key 1 has"),
        ({"a": {None: 2}}, "value['a']: the NoneType key None has"),
        (b"x", "value: the bytes b'x' has"),
        ({1, 2}, "value: the set {1, 2} has"),
        (["\ud800"], "value: the lone surrogate '\\ud800' in a str has"),
    ],
)
def test_refused(value: object, message: str) -> None:
    with pytest.raises(NotCanonical) as caught:
        canonical_json(value)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value) == (
        f"{message} no canonical JSON text; use None, bool, int, well-formed str, list, tuple, or dict with str keys"
    )


def test_iterators_are_refused() -> None:
    with pytest.raises(NotCanonical, match="the generator"):
        canonical_json(loop())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES)
def test_reads_back(value: object) -> None:
    assert json.loads(canonical_json(value)) == value
