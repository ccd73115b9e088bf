"""A store that takes no writes, or may not be read, and a full disk: reading goes on, and errors say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes

KEY = digest_bytes(b"key")
START = f"""
import os, sys
from pathlib import Path
from loadplan.cache import Cache, FolderNotWritable, NotReadable
place = Path(sys.argv[1])
cache, KEY = Cache(place / "cache"), {KEY!r}
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)  # nobody: root may do everything
def refused(error, work):
    try:
        work()
    except error as caught:
        assert "cannot be" in str(caught) and "permissions" in str(caught), caught
    else:
        raise AssertionError("not refused")
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches, with a cache of one entry."""
    folder = Path(tempfile.mkdtemp(prefix="loadplan-test-"))
    folder.chmod(0o755)
    Cache(folder / "cache").put(KEY, {"a": b"first", "b": b"second"})
    (folder / "source").write_bytes(b"third")
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def run(place: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + code, place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_read_only_store_is_read(place: Path) -> None:
    for path in (place / "cache").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (place / "cache").chmod(0o555)
    run(
        place,
        """
assert cache.fetch(KEY) == {"a": b"first", "b": b"second"}
assert cache.find(KEY) is not None
assert [entry.key for entry in cache.entries()] == [KEY]
assert cache.info().blobs == 2
assert cache.check().problems == ()
assert cache.gc(max_nbytes=0, grace_s=0.0, dry_run=True).blobs == 2
with cache.lease(KEY) as lease:
    assert not lease.is_builder
with cache.lease("0" * 64) as lease:
    assert lease.is_builder  # and its put says what is wrong
refused(FolderNotWritable, lambda: cache.put(KEY, {"c": b"third"}))
refused(FolderNotWritable, lambda: cache.put(KEY, {"a": b"first"}))
refused(FolderNotWritable, lambda: cache.put_files(KEY, {"a": place / "source"}))
refused(FolderNotWritable, lambda: cache.pin(KEY, "x"))
refused(FolderNotWritable, lambda: cache.gc(max_nbytes=0, grace_s=0.0))
refused(FolderNotWritable, lambda: cache.materialize(KEY, place / "out"))
assert cache.repair().removed == ()
""",
    )
    assert Cache(place / "cache").fetch(KEY) == {"a": b"first", "b": b"second"}


@pytest.mark.parametrize("part", ["actions", "blobs"])
def test_what_may_not_be_read_is_no_miss(place: Path, part: str) -> None:
    """Else a build would make again, for ever, what is there."""
    for path in (place / "cache" / part).rglob("*"):
        if path.is_file():
            path.chmod(0)
    if os.geteuid() != 0:
        pytest.skip("the owner may read; needs root to become another user")
    run(place, "refused(NotReadable, lambda: cache.fetch(KEY)); refused(NotReadable, lambda: cache.find(KEY))")


def test_a_full_disk(tmp_path: Path) -> None:
    """On a small file system of its own; what was there before stays, and fits again when there is space."""
    tmp_path.joinpath("disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path / "disk")]
    unshare = ["unshare", "-m"]  # gone with the process
    may = (
        shutil.which("unshare") and not subprocess.run([*unshare, *mount], capture_output=True, check=False).returncode
    )
    if not may:
        pytest.skip("needs the right to mount a file system")
    code = f"""
import subprocess, sys
from pathlib import Path
from loadplan.cache import Cache, FolderNotWritable
subprocess.run({mount!r}, check=True)
disk, KEY, OTHER = Path(sys.argv[1]), {KEY!r}, "1" * 64
cache = Cache(disk / "cache")
cache.put(KEY, {{"a": b"first"}})
(disk.parent / "large").write_bytes(bytes(1_000_000))
for work in (
    lambda: cache.put(OTHER, {{"large": bytes(1_000_000)}}),
    lambda: cache.put_files(OTHER, {{"large": disk.parent / "large"}}),
):
    try:
        work()
    except FolderNotWritable as error:
        assert "No space left on device" in str(error), error
        assert "free some space" in str(error), error
    else:
        raise AssertionError("not refused")
    assert cache.fetch(OTHER) is None
    assert cache.fetch(KEY) == {{"a": b"first"}}
    assert cache.check().problems == ()
cache.put(OTHER, {{"small": bytes(1000)}})
assert cache.fetch(OTHER) == {{"small": bytes(1000)}}
"""
    command = [*unshare, sys.executable, "-c", code, str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
