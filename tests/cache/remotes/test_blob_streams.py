"""Blobs that arrive in pieces, over several tries, with other writers about."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadplan.cache import BlobStore, FolderNotWritable, ProblemKind, digest_bytes
from loadplan.cache.remotes import BadRemoteData, RemoteUnavailable
from loadplan.cache.remotes.blob_streams import IncomingBlob, OutgoingBlob, receive_blob

DATA = bytes(range(256)) * 40
DIGEST = digest_bytes(DATA)


def _receive(store: BlobStore, data: bytes, *, stop: bool = False) -> int:
    """Send the rest of `data` from where the blob is; how many bytes were there before."""
    with receive_blob("test", store, DIGEST, len(DATA), lambda _: None) as blob:
        start = blob.offset
        blob.write(data[start:])
        if stop:
            raise RemoteUnavailable("test", "cut")
    return start


def _left(store: BlobStore) -> list[bytes]:
    return [path.read_bytes() for path in sorted(store.folder.glob(".tmp-*"))]


def test_what_is_left_is_temporary_and_serves_the_next(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    for end in (0, 1000, 3000):
        with pytest.raises(RemoteUnavailable):
            _receive(store, DATA[:end], stop=True)
    assert _left(store) == [DATA[:3000]]
    assert [problem.kind for problem in store.check()] == [ProblemKind.TEMPORARY]
    assert not store.has(DIGEST)
    assert _receive(store, DATA) == 3000
    assert store.get_bytes(DIGEST) == DATA
    assert store.check() == ()
    assert store.path(DIGEST).stat().st_mode & 0o222 == 0


def test_a_try_that_got_less_leaves_the_longer_one(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    with pytest.raises(RemoteUnavailable):
        _receive(store, DATA[:3000], stop=True)
    with (
        pytest.raises(RemoteUnavailable),
        receive_blob("test", store, DIGEST, len(DATA), lambda _: None) as blob,
    ):
        blob.restart()
        blob.write(DATA[:10])
        raise RemoteUnavailable("test", "cut")
    assert _left(store) == [DATA[:3000]]


@pytest.mark.parametrize("bad", [DATA[:-1] + b"?", DATA + b"?", b"?" * len(DATA)])
def test_bad_bytes_are_not_kept(tmp_path: Path, bad: bytes) -> None:
    store = BlobStore(tmp_path / "blobs")
    with pytest.raises(BadRemoteData):
        _receive(store, bad)
    assert list(store.folder.iterdir()) == []


def test_a_bad_prefix_is_not_kept_either(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.folder.mkdir()
    (store.folder / f".tmp-{DIGEST}-0123").write_bytes(b"?" * 500)
    with pytest.raises(BadRemoteData):
        _receive(store, DATA)
    assert list(store.folder.iterdir()) == []
    assert _receive(store, DATA) == 0


def test_a_prefix_longer_than_the_blob_is_clipped(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.folder.mkdir()
    (store.folder / f".tmp-{DIGEST}-0123").write_bytes(DATA + b"more")
    assert _receive(store, DATA) == len(DATA)
    assert store.get_bytes(DIGEST) == DATA


def test_two_receive_the_same_blob_at_once(tmp_path: Path) -> None:
    """The second takes what the first has so far, finishes first and sweeps the first one's file away."""
    store = BlobStore(tmp_path / "blobs")
    with receive_blob("test", store, DIGEST, len(DATA), lambda _: None) as first:
        first.write(DATA[:9000])
        assert _receive(store, DATA) > 0
        store.path(DIGEST).unlink()
        first.write(DATA[9000:])
    assert store.get_bytes(DIGEST) == DATA
    assert store.check() == ()


def test_a_damaged_blob_is_replaced(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    path = store.path(DIGEST)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    _receive(store, DATA)
    assert store.get_bytes(DIGEST) == DATA


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so(tmp_path: Path, number: int) -> None:
    store = BlobStore(tmp_path / "blobs")
    with (
        pytest.raises(FolderNotWritable, match="cannot be written"),
        receive_blob("test", store, DIGEST, len(DATA), lambda _: None) as blob,
    ):
        blob.write(DATA[:100])
        raise OSError(number, "no space")
    assert _left(store) == [DATA[:100]]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FolderNotWritable):
        _receive(BlobStore(tmp_path / "file" / "blobs"), DATA)


@given(st.lists(st.one_of(st.integers(0, 300), st.none()), max_size=12))
def test_any_steps_count_right(tmp_path_factory: pytest.TempPathFactory, steps: list[int | None]) -> None:
    """Writes (of so many bytes) and restarts (None) against a plain bytes object."""
    counted: list[int] = []
    path = tmp_path_factory.mktemp("steps") / "file"
    with path.open("xb+") as file:
        blob = IncomingBlob("test", DIGEST, len(DATA), file, counted.append)
        model = b""
        for step in steps:
            if step is None:
                blob.restart()
                model = b""
            else:
                blob.write(DATA[blob.offset : blob.offset + step])
                model += DATA[len(model) : len(model) + step]
            assert (blob.offset, sum(counted)) == (len(model), len(model))
        file.flush()
        assert path.read_bytes() == model
        assert blob.is_right() == (model == DATA)


def test_an_outgoing_blob_counts_each_try_anew(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(DATA)
    counted: list[int] = []
    blob = OutgoingBlob(tmp_path / "blob", DIGEST, len(DATA), counted.append)
    with blob.open() as reader:
        assert reader.read(1000) == DATA[:1000]
    with blob.open() as reader:
        assert reader.read() == DATA
    assert sum(counted) == len(DATA)
