"""Files into the cache and out as a folder: linked where they can be, verified, whole or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from loadplan.cache.actions import Artifact
from loadplan.cache.cache import Cache, CannotMaterialize, NotCached
from loadplan.cache.digest import digest_bytes
from loadplan.cache.place_folder import FolderExists
from loadplan.cache.store import BlobMissing, DigestMismatch
from loadplan.cache.write_file import FolderNotWritable

KEY = digest_bytes(b"key")
CONTENTS = {"plan": b"a plan", "deep/er/data": bytes(3000), "empty": b""}
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The contents as files, written long ago."""
    made = {name: tmp_path / "made" / name.replace("/", "-") for name in CONTENTS}
    (tmp_path / "made").mkdir()
    for name, path in made.items():
        path.write_bytes(CONTENTS[name])
        os.utime(path, ns=(HOUR_NS, HOUR_NS))
    return made


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("are_ours", [True, False])
def test_round_trip(cache: Cache, files: dict[str, Path], tmp_path: Path, are_ours: bool) -> None:
    artifact = cache.put_files(KEY, files, {"why": "test"}, are_ours=are_ours)
    assert artifact == Artifact({name: digest_bytes(data) for name, data in CONTENTS.items()}, {"why": "test"})
    assert cache.fetch(KEY) == CONTENTS
    for name, path in files.items():
        blob = cache.blobs.path(artifact.blobs[name])
        assert path.samefile(blob) == are_ours
        assert stat.S_IMODE(blob.stat().st_mode) & 0o222 == 0
        assert (stat.S_IMODE(path.stat().st_mode) & 0o222 == 0) == are_ours
    assert cache.materialize(KEY, tmp_path / "out" / "here") == tmp_path / "out" / "here"
    assert read(tmp_path / "out" / "here") == CONTENTS
    assert read(cache.materialize(artifact, tmp_path / "again")) == CONTENTS
    assert (tmp_path / "again" / "plan").samefile(cache.blobs.path(artifact.blobs["plan"]))
    assert cache.check().problems == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "cache", "made", "out"]


def test_files_that_are_not_ours_may_change_later(cache: Cache, files: dict[str, Path]) -> None:
    cache.put_files(KEY, files, are_ours=False)
    for path in files.values():
        path.write_bytes(b"changed")
    assert cache.fetch(KEY) == CONTENTS


def test_a_link_is_filed_as_what_it_leads_to(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(files["plan"])
    artifact = cache.put_files(KEY, {"plan": tmp_path / "link"})
    blob = cache.blobs.path(artifact.blobs["plan"])
    assert not blob.is_symlink()
    assert blob.samefile(files["plan"])


def test_equal_files_are_one_blob_and_damage_is_replaced(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    artifact = cache.put_files(KEY, files)
    blob = cache.blobs.path(artifact.blobs["plan"])
    kept = blob.stat().st_ino
    (tmp_path / "copy").write_bytes(CONTENTS["plan"])
    cache.put_files(digest_bytes(b"2"), {"x": tmp_path / "copy"})
    assert blob.stat().st_ino == kept
    blob.unlink()
    blob.write_bytes(b"damage")
    assert cache.find(KEY) is None
    cache.put_files(digest_bytes(b"2"), {"x": tmp_path / "copy"})
    assert cache.fetch(KEY) == CONTENTS


def test_damage_through_a_link_is_seen(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    """Even with the same size and the time set back: every folder that shares the bytes is refused them."""
    cache.put_files(KEY, files)
    cache.materialize(KEY, tmp_path / "out")
    assert cache.find(KEY) is not None
    path = tmp_path / "out" / "plan"
    path.chmod(0o644)
    path.write_bytes(b"b plan")
    os.utime(path, ns=(HOUR_NS, HOUR_NS))
    assert cache.find(KEY) is None
    assert cache.fetch(KEY) is None
    with pytest.raises(DigestMismatch):
        cache.materialize(KEY, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "plan").write_bytes(CONTENTS["plan"])
    cache.put_files(KEY, files | {"plan": tmp_path / "plan"})
    assert read(cache.materialize(KEY, tmp_path / "out", replace=True)) == CONTENTS


def test_what_is_linked_need_not_be_read_again(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    """A digest that was remembered stays so under each name: who reads a file writes its record anew, and nobody does."""
    artifact = cache.put_files(KEY, files)
    assert cache.find(KEY) is not None
    for number in range(3):
        cache.materialize(KEY, tmp_path / f"out-{number}")
    before = {path: path.stat().st_mtime_ns for path in cache.files.folder.rglob("*") if path.is_file()}
    for number in range(3):
        for name, digest in artifact.blobs.items():
            assert cache.files.digest(tmp_path / f"out-{number}" / name) == digest
    assert cache.find(KEY) is not None
    assert {path: path.stat().st_mtime_ns for path in cache.files.folder.rglob("*") if path.is_file()} == before
    assert len(before) == len(CONTENTS)


def test_missing(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotCached, match="has no entry"):
        cache.materialize(KEY, tmp_path / "out")
    artifact = cache.put_files(KEY, files)
    cache.blobs.path(artifact.blobs["plan"]).unlink()
    with pytest.raises(NotCached):
        cache.materialize(KEY, tmp_path / "out")
    with pytest.raises(BlobMissing):
        cache.materialize(artifact, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_in_the_way_stays(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    cache.put_files(KEY, files)
    out = tmp_path / "out"
    out.mkdir()
    cache.materialize(KEY, out)  # empty: no one's
    with pytest.raises(FolderExists, match="is there already"):
        cache.materialize(KEY, out)
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FolderExists, match="is there already"):
        cache.materialize(KEY, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"
    (out / "extra").write_bytes(b"extra")
    assert read(cache.materialize(KEY, out, replace=True)) == CONTENTS
    (tmp_path / "link").symlink_to(out)
    cache.materialize(KEY, tmp_path / "link", replace=True)
    assert not (tmp_path / "link").is_symlink()
    assert read(out) == CONTENTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "file", "link", "made", "out"]


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\0b"])
def test_names_that_lead_out(cache: Cache, tmp_path: Path, name: str) -> None:
    cache.put(KEY, {name: b"x"})
    with pytest.raises(CannotMaterialize, match="leads out"):
        cache.materialize(KEY, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_another_file_system(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    there = Path("/dev/shm")
    if not os.access(there, os.W_OK) or there.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    other = Cache(there / f"loadplan-test-{os.getpid()}")
    try:
        artifact = other.put_files(KEY, files)
        assert other.fetch(KEY) == CONTENTS
        out = other.materialize(KEY, tmp_path / "out")
        assert read(out) == CONTENTS
        assert not (out / "plan").samefile(other.blobs.path(artifact.blobs["plan"]))
        assert other.check().problems == ()
    finally:
        shutil.rmtree(other.root)


def test_a_place_that_cannot_be_written(cache: Cache, files: dict[str, Path], tmp_path: Path) -> None:
    cache.put_files(KEY, files)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FolderNotWritable, match="cannot be written"):
        cache.materialize(KEY, tmp_path / "file" / "out")
    blocked = Cache(tmp_path / "file" / "cache")
    with pytest.raises(FolderNotWritable, match="cannot be written"):
        blocked.put_files(KEY, files)
    assert blocked.fetch(KEY) is None
