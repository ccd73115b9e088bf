"""What goes in comes out, or an error says why not."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from loadplan.cache.digest import NotADigest, digest_bytes
from loadplan.cache.store import BlobMissing, BlobStore, DigestMismatch, Problem, ProblemKind
from loadplan.cache.write_file import FolderNotWritable

DATA = b"some bytes"
DIGEST = digest_bytes(DATA)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "deep" / "blobs")


def damage(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("data", [b"", DATA, bytes(5_000_000)])
def test_round_trip(store: BlobStore, tmp_path: Path, data: bytes) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(data)
    digest = digest_bytes(data)
    assert not store.has(digest)
    assert store.put_file(source) == store.put_bytes(data) == store.put_bytes(bytearray(data)) == digest
    assert store.has(digest)
    assert store.get_bytes(digest) == data
    store.copy_to(digest, copy)
    assert copy.read_bytes() == data
    assert store.check() == ()


def test_layout_and_mode(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"other")
    other = store.put_file(tmp_path / "source")
    assert store.put_bytes(DATA) == DIGEST
    for digest in (DIGEST, other):
        path = store.folder / digest[:2] / digest[2:]
        assert store.path(digest) == path
        assert stat.S_IMODE(path.stat().st_mode) & 0o222 == 0


def test_no_links_to_changing_files(store: BlobStore, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(DATA)
    store.put_file(source)
    source.write_bytes(b"changed")
    store.copy_to(DIGEST, copy)
    copy.write_bytes(b"changed")
    assert store.get_bytes(DIGEST) == DATA
    assert store.path(DIGEST).stat().st_nlink == 1


def test_missing(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(BlobMissing) as caught:
        store.get_bytes(DIGEST)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == f"{store.path(DIGEST)}: no blob {DIGEST[:12]} in the store; build it again"
    with pytest.raises(BlobMissing):
        store.copy_to(DIGEST, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert store.check() == ()
    assert not store.folder.exists()


@pytest.mark.parametrize("junk", [b"", DATA[:-1], DATA + b"x", b"Some bytes"])
@pytest.mark.parametrize("put", ["put_bytes", "put_file"])
def test_damage_is_refused_and_put_mends_it(store: BlobStore, tmp_path: Path, junk: bytes, put: str) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(b"old")
    store.put_bytes(DATA)
    path = store.path(DIGEST)
    damage(path, junk)

    with pytest.raises(DigestMismatch) as caught:
        store.get_bytes(DIGEST)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.path, error.wanted, error.found) == (path, DIGEST, digest_bytes(junk))
    assert str(error).startswith(f"{path}: filed as {DIGEST[:12]}, holds {digest_bytes(junk)[:12]}; ")
    with pytest.raises(DigestMismatch):
        store.copy_to(DIGEST, copy)
    assert copy.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [copy, tmp_path / "deep"]
    assert store.check() == (Problem(ProblemKind.DAMAGED, path),)

    source = tmp_path / "source"
    source.write_bytes(DATA)
    assert (store.put_bytes(DATA) if put == "put_bytes" else store.put_file(source)) == DIGEST
    assert store.get_bytes(DIGEST) == DATA
    assert store.check() == ()


@pytest.mark.parametrize("text", ["", "../../etc/passwd", DIGEST.upper(), DIGEST[:63], DIGEST + "\n", f"/{DIGEST[1:]}"])
def test_names_from_outside(store: BlobStore, tmp_path: Path, text: str) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.path(text),
        lambda: store.has(text),
        lambda: store.is_good(text),
        lambda: store.get_bytes(text),
        lambda: store.copy_to(text, tmp_path / "copy"),
    )
    for call in calls:
        with pytest.raises(NotADigest, match=rf"\({len(text)} characters\) is not a digest"):
            call()


def test_check_lists_everything_odd(store: BlobStore) -> None:
    other = store.put_bytes(b"other")
    store.put_bytes(DATA)
    damage(store.path(other), b"junk")
    prefix = store.folder / DIGEST[:2]
    odd = {
        store.path(other): ProblemKind.DAMAGED,
        store.folder / ".tmp-0123": ProblemKind.TEMPORARY,
        prefix / ".tmp-4567": ProblemKind.TEMPORARY,
        store.folder / "notes.txt": ProblemKind.MISNAMED,
        prefix / DIGEST: ProblemKind.MISNAMED,
        prefix / DIGEST[2:].upper(): ProblemKind.MISNAMED,
        store.folder / DIGEST[:3] / DIGEST[3:]: ProblemKind.MISNAMED,
        store.folder / "ab" / "c" / "d": ProblemKind.MISNAMED,
        store.folder / "ab" / "c": ProblemKind.MISNAMED,
        store.folder / "ff" / ("f" * 62): ProblemKind.MISNAMED,
    }
    (store.folder / "ff").mkdir()
    (store.folder / "ff" / ("f" * 62)).symlink_to(store.path(DIGEST))
    (store.folder / "ab" / "c").mkdir(parents=True)
    for path in odd:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_bytes(DATA)
    assert store.check() == tuple(Problem(odd[path], path) for path in sorted(odd))
    assert store.get_bytes(DIGEST) == DATA


def test_folder_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(DATA)
    store = BlobStore(file / "blobs")
    assert not store.has(DIGEST)
    assert not store.is_good(DIGEST)
    assert store.check() == ()
    with pytest.raises(BlobMissing):
        store.get_bytes(DIGEST)
    with pytest.raises(FolderNotWritable, match=f"^{file}: cannot be written"):
        store.put_bytes(DATA)
    with pytest.raises(FolderNotWritable, match=f"^{file}: cannot be written"):
        store.put_file(file)


def test_source_that_is_missing_or_a_folder_makes_no_store(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.put_file(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        store.put_file(tmp_path)
    assert not store.folder.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_store(store: BlobStore) -> None:
    store.put_bytes(DATA)
    store.folder.chmod(0o500)
    assert store.get_bytes(DIGEST) == DATA
    assert store.put_bytes(DATA) == DIGEST
    with pytest.raises(FolderNotWritable, match="Permission denied"):
        store.put_bytes(b"new")
