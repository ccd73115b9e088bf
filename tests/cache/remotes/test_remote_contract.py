"""What holds for every kind of remote, against real servers: one suite, run over each."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_places import KINDS, QUICK, Place, make_place

from loadplan.cache import Artifact, Cache, digest_bytes
from loadplan.cache.remotes import BadRemoteData, RemoteEntry, RemoteReadOnly, RemoteSet
from loadplan.cache.remotes.blob_streams import OutgoingBlob, receive_blob
from loadplan.cache.transfer import PushReport, pull, push

KEY, OTHER_KEY = digest_bytes(b"key"), digest_bytes(b"other key")
BIG = random.Random(5).randbytes(9 << 20)  # more than one read, part and window of any kind
CONTENTS = {
    "plan": b"a plan",
    "rank00/model.safetensors": BIG,
    "empty": b"",
    "again": b"a plan",
    "zeros": bytes(300_000),
}
SMALL = {name: data for name, data in CONTENTS.items() if data is not BIG}
INFO = {"made by": "a test", "größe": "9 MiB"}


@pytest.fixture(scope="module", params=KINDS)
def shared_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with make_place(request.param, tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.fixture
def place(shared_place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return shared_place


@pytest.fixture
def source(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "a")
    cache.put(KEY, CONTENTS, INFO)
    return cache


@pytest.fixture
def small(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "a")
    cache.put(KEY, SMALL, INFO)
    return cache


def test_nothing_is_found_where_nothing_was_put(place: Place) -> None:
    remote, key = place.open(True), digest_bytes(b"never put")
    assert remote.find_entry(key) is None
    assert not remote.has_blob(key, 3)


def test_machine_a_pushes_and_machine_b_pulls_the_same_bits(place: Place, source: Cache, tmp_path: Path) -> None:
    remote = place.open(False)
    first = source.push([KEY], remote)
    assert first.entries == 1
    assert source.push([KEY, KEY], remote) == PushReport(0, 0, 0, first.nbytes + first.known_nbytes)

    target = Cache(tmp_path / "elsewhere" / "b", [place.open(True)])
    told: list[tuple[int, int]] = []
    artifact = target.pull(KEY, progress=lambda done, total: told.append((done, total)))
    assert artifact == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    total = sum(len(data) for data in set(CONTENTS.values()))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert target.blobs.check() == ()


def test_the_entry_comes_back_as_it_went(place: Place, source: Cache) -> None:
    remote = place.open(False)
    source.push([KEY], remote)
    artifact = source.find(KEY)
    assert artifact is not None
    entry = RemoteEntry(artifact, {digest_bytes(data): len(data) for data in CONTENTS.values()})
    assert remote.find_entry(KEY) == entry
    for digest, nbytes in entry.nbytes.items():
        assert remote.has_blob(digest, nbytes)
        assert not remote.has_blob(digest, nbytes + 1)


def test_an_entry_is_replaced(place: Place, small: Cache) -> None:
    remote = place.open(False)
    small.push([KEY], remote)
    small.put(KEY, {"plan": b"a newer plan"})
    assert small.push([KEY], remote).entries == 1
    found = remote.find_entry(KEY)
    assert found is not None
    assert found.artifact == Artifact({"plan": digest_bytes(b"a newer plan")})


def test_an_interrupted_blob_goes_on_where_it_was(place: Place, source: Cache, tmp_path: Path) -> None:
    digest, store = digest_bytes(BIG), Cache(tmp_path / "b").blobs
    source.push([KEY], place.open(False))
    remote = place.open(True)
    with pytest.raises(ZeroDivisionError), receive_blob(remote.name, store, digest, len(BIG), lambda _: None) as blob:
        blob.write(BIG[:5_000_000])
        raise ZeroDivisionError
    got: list[int] = []
    with receive_blob(remote.name, store, digest, len(BIG), got.append) as blob:
        assert blob.offset == 5_000_000
        remote.fetch_blob(blob)
    assert store.get_bytes(digest) == BIG
    assert sum(got) == len(BIG)
    assert min(got) >= 0  # it was not started anew


def test_pushing_to_a_remote_for_reading_is_an_error(place: Place, small: Cache) -> None:
    with pytest.raises(RemoteReadOnly, match=r"opened for reading only; open it with read_only = false"):
        small.push([KEY], place.open(True))


@pytest.mark.parametrize("spoil", ["other bytes", "same length", "shorter", "longer", "empty", "missing"])
def test_a_bad_blob_is_a_miss_and_poisons_nothing(
    place: Place, small: Cache, tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    small.push([KEY], place.open(False))
    digest = digest_bytes(b"a plan")
    bad = {
        "other bytes": b"something else",
        "same length": b"a plam",
        "shorter": b"a pl",
        "longer": b"a plan!",
        "empty": b"",
    }
    if spoil == "missing":
        place.remove("blob", digest)
    else:
        place.write("blob", digest, bad[spoil])
    target = Cache(tmp_path / "b")
    remotes = RemoteSet([place.open(True)])
    with caplog.at_level(logging.WARNING, "loadplan.cache.remotes"):
        assert pull(target, KEY, remotes, policy=QUICK) is None
        assert pull(target, KEY, remotes, policy=QUICK) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert remotes.remotes[0].name in warnings[0]
    assert target.find(KEY) is None
    assert not target.blobs.has(digest)
    # Whoever has the right bytes puts them there again.
    if spoil != "same length":  # a remote is asked for the size only: that one has to be deleted there
        small.push([KEY], place.open(False))
        assert pull(target, KEY, remotes, policy=QUICK) is not None
        assert target.fetch(KEY) == SMALL
    else:
        place.write("blob", digest, b"a plan")


@pytest.mark.parametrize("spoil", ["torn", "garbage", "empty", "of another key", "huge"])
def test_a_bad_entry_is_a_miss(place: Place, small: Cache, tmp_path: Path, spoil: str) -> None:
    small.put(OTHER_KEY, {"plan": b"another plan"})
    small.push([KEY, OTHER_KEY], place.open(False))
    good = place.read("entry", KEY)
    spoiled = {
        "torn": good[: len(good) // 2],
        "garbage": b"\xff" * 100,
        "empty": b"",
        "of another key": place.read("entry", OTHER_KEY),
        "huge": good + bytes(17 << 20),
    }
    place.write("entry", KEY, spoiled[spoil])
    target = Cache(tmp_path / "b")
    with pytest.raises(BadRemoteData):
        place.open(True).find_entry(KEY)
    assert pull(target, KEY, RemoteSet([place.open(True)]), policy=QUICK) is None
    assert push(small, [KEY], place.open(False)).entries == 1
    assert place.read("entry", KEY) == good
    assert pull(target, KEY, RemoteSet([place.open(True)]), policy=QUICK) is not None


def test_a_blob_by_itself(place: Place, tmp_path: Path) -> None:
    data = b"alone" * 1000
    path = tmp_path / "alone"
    path.write_bytes(data)
    remote = place.open(False)
    counted: list[int] = []
    remote.put_blob(OutgoingBlob(path, digest_bytes(data), len(data), counted.append))
    assert sum(counted) == len(data)
    assert place.read("blob", digest_bytes(data)) == data
    remote.close()
    assert remote.has_blob(digest_bytes(data), len(data))  # after a close, too
