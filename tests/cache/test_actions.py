"""Action keys: a hit only when everything is there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.cache.actions import Artifact, ArtifactIncomplete, BadArtifact, parse_artifact
from loadplan.cache.cache import Cache
from loadplan.cache.digest import NotADigest, digest_bytes
from loadplan.cache.record import format_record, parse_record, write_record
from loadplan.cache.write_file import FolderNotWritable

KEY, OTHER_KEY = digest_bytes(b"key"), digest_bytes(b"other key")
CONTENTS = {"plan": b"a plan", "data": bytes(3000)}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def overwrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_round_trip(cache: Cache) -> None:
    assert cache.fetch(KEY) is None
    assert not cache.root.exists()
    artifact = cache.put(KEY, CONTENTS, {"seconds": "3"})
    assert artifact == Artifact({name: digest_bytes(data) for name, data in CONTENTS.items()}, {"seconds": "3"})
    assert cache.actions.find(KEY) == cache.find(KEY) == artifact
    assert cache.fetch(KEY) == CONTENTS
    assert cache.fetch(OTHER_KEY) is None


def test_literal_bytes_of_an_entry(cache: Cache) -> None:
    cache.put(KEY, {"plan": b""}, {"why": "é"})
    path = cache.root / "actions" / KEY[:2] / KEY[2:]
    body = f'{{"blobs":{{"plan":"{digest_bytes(b"")}"}},"format":1,"info":{{"why":"é"}},"key":"{KEY}"}}'.encode()
    assert path == cache.actions.path(KEY)
    assert path.read_bytes() == digest_bytes(body).encode() + b"\n" + body


def test_the_last_put_wins(cache: Cache) -> None:
    cache.put(KEY, {"plan": b"first"})
    cache.put(KEY, {"plan": b"second"})
    cache.put(OTHER_KEY, {})
    assert cache.fetch(KEY) == {"plan": b"second"}
    assert cache.fetch(OTHER_KEY) == {}


def test_blobs_come_first(cache: Cache) -> None:
    artifact = Artifact({f"file-{i}": digest_bytes(bytes([i])) for i in range(7)})
    cache.blobs.put_bytes(bytes([0]))
    with pytest.raises(ArtifactIncomplete) as caught:
        cache.actions.put(KEY, artifact)
    assert caught.value.missing == tuple(f"file-{i}" for i in range(1, 7))
    assert str(caught.value) == (
        f"action {KEY[:12]}: 6 of 7 blobs are not in the store "
        "(file-1, file-2, file-3, file-4, file-5, …); put the blobs first"
    )
    assert cache.actions.find(KEY) is None


def test_missing_blob_is_a_miss(cache: Cache) -> None:
    artifact = cache.put(KEY, CONTENTS)
    cache.blobs.path(artifact.blobs["data"]).unlink()
    assert cache.actions.find(KEY) is None
    assert cache.find(KEY) is None
    assert cache.fetch(KEY) is None


@pytest.mark.parametrize("junk", [b"", b"a pla", b"b plan"])
def test_damaged_blob_is_a_miss_until_built_again(cache: Cache, junk: bytes) -> None:
    artifact = cache.put(KEY, CONTENTS)
    overwrite(cache.blobs.path(artifact.blobs["plan"]), junk)
    assert cache.actions.find(KEY) == artifact  # says what there should be; the bytes are not looked at
    assert cache.find(KEY) is None
    assert cache.fetch(KEY) is None
    cache.put(KEY, CONTENTS)
    assert cache.fetch(KEY) == CONTENTS


def test_folder_in_place_of_a_blob_or_an_entry(cache: Cache) -> None:
    artifact = cache.put(KEY, CONTENTS)
    path = cache.blobs.path(artifact.blobs["plan"])
    path.unlink()
    path.mkdir()
    assert cache.fetch(KEY) is None
    cache.actions.path(OTHER_KEY).mkdir(parents=True)
    assert cache.fetch(OTHER_KEY) is None


def test_entry_under_another_key_is_a_miss(cache: Cache) -> None:
    cache.put(KEY, CONTENTS)
    path = cache.actions.path(OTHER_KEY)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(cache.actions.path(KEY).read_bytes())
    assert cache.actions.find(OTHER_KEY) is None


def test_every_truncation_and_every_flipped_byte_of_an_entry(cache: Cache) -> None:
    cache.put(KEY, CONTENTS)
    path = cache.actions.path(KEY)
    good = path.read_bytes()
    for i in range(len(good)):
        for bad in (good[:i], good[:i] + bytes([good[i] ^ 0x20]) + good[i + 1 :], good[:i] + good[i + 1 :]):
            path.write_bytes(bad)
            assert cache.actions.find(KEY) is None, bad
    path.write_bytes(good)
    assert cache.fetch(KEY) == CONTENTS


GOOD = {"format": 1, "key": KEY, "blobs": {"a": KEY}, "info": {"b": "c"}}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"key": OTHER_KEY},
        {"key": 3},
        {"blobs": []},
        {"blobs": {"a": "../../x"}},
        {"blobs": {"a": None}},
        {"info": {"b": 1}},
        {"info": None},
    ],
)
def test_entries_that_say_something_else(change: dict[str, object]) -> None:
    assert parse_artifact(GOOD, KEY) == Artifact({"a": KEY}, {"b": "c"})
    assert parse_artifact(GOOD | change, KEY) is None
    assert parse_artifact({name: value for name, value in GOOD.items() if name not in change}, KEY) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(KEY),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*GOOD, "a"]) | st.text(), inner),
)


@settings(deadline=None)
@given(JSON)
def test_well_formed_records_of_anything(value: object) -> None:
    assert parse_artifact(parse_record(format_record(value)), KEY) is None


@settings(deadline=None)
@given(st.fixed_dictionaries({"format": st.just(1), "key": st.just(KEY), "blobs": JSON, "info": JSON}))
def test_records_of_nearly_the_right_shape(value: object) -> None:
    parsed = parse_artifact(value, KEY)
    assert parsed is None or isinstance(parsed, Artifact)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Artifact({"a": "short"}), "'a': 'short'"),
        (lambda: Artifact({1: KEY}), f"1: '{KEY}'"),  # type: ignore[dict-item]
        (lambda: Artifact({}, {"b": 1}), "'b': 1"),  # type: ignore[dict-item]
    ],
)
def test_bad_artifacts(make: Callable[[], Artifact], message: str) -> None:
    with pytest.raises(BadArtifact) as caught:
        make()
    assert str(caught.value) == f"artifact: {message}; `blobs` maps str to digest, `info` maps str to str"


def test_an_artifact_keeps_its_own_maps() -> None:
    blobs = {"a": KEY}
    artifact = Artifact(blobs)
    blobs["b"] = "junk"
    assert artifact == Artifact({"a": KEY})


@pytest.mark.parametrize("text", ["", "../x", KEY.upper()])
def test_keys_from_outside(cache: Cache, text: str) -> None:
    for call in (cache.find, cache.fetch, cache.actions.find, lambda key: cache.put(key, {})):
        with pytest.raises(NotADigest):
            call(text)


def test_root_below_a_file_reads_as_empty_and_refuses_writes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    cache = Cache(file / "cache")
    assert cache.find(KEY) is None
    assert cache.fetch(KEY) is None
    for contents in (CONTENTS, {}):
        with pytest.raises(FolderNotWritable, match=f"^{file}: cannot be written .*choose another folder"):
            cache.put(KEY, contents)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_root(cache: Cache, tmp_path: Path) -> None:
    cache.put(KEY, CONTENTS)
    for path in (cache.actions.path(KEY).parent, cache.root / "actions", cache.root):
        path.chmod(0o500)
    assert cache.fetch(KEY) == CONTENTS
    with pytest.raises(FolderNotWritable, match="Permission denied"):
        cache.put(OTHER_KEY, CONTENTS)


def test_records_of_another_kind(cache: Cache) -> None:
    write_record(cache.actions.path(KEY), {"format": 1, "state": [1, 2, 3, 4, 5], "digest": KEY})
    assert cache.find(KEY) is None
