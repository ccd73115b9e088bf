"""Old content or new content, never another, and nothing left behind."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import pytest

from loadplan.cache import write_file
from loadplan.cache.write_file import FolderNotWritable, make_folder, write_atomically


@contextmanager
def interrupt_at(count: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the `count`-th line that runs in write_file.py."""
    left = count

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != write_file.__file__:
            return None
        left -= event == "line"
        if left == 0:
            left -= 1
            raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)


def test_writes_bytes_or_what_a_callable_writes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    assert path.read_bytes() == b"one"
    write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "file", b"")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failing_callable_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half of the new")
        file.flush()
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# An interrupt between the body and the end of a `with` leaves closing the file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    line, contents = 0, set()
    done = False
    while not done:
        line += 1
        path.write_bytes(b"old")
        try:
            with interrupt_at(line):
                write_atomically(path, b"new")
            done = True
        except KeyboardInterrupt:
            pass
        contents.add(path.read_bytes())
        assert list(tmp_path.iterdir()) == [path], line
    assert line > 15
    assert contents == {b"old", b"new"}


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"old", b"new", False)


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(FolderNotWritable) as caught:
        write_atomically(file / "x", b"new")
    assert isinstance(caught.value, OSError)
    assert str(caught.value) == (
        f"{file}: cannot be written (Not a directory); "
        "free some space, change its permissions, or choose another folder"
    )
    with pytest.raises(FolderNotWritable) as caught:
        make_folder(file / "a" / "b")
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(file))


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderNotWritable, match="No such file"):
        write_atomically(tmp_path / "a" / "x", b"new")
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    write_atomically(tmp_path / "a" / "b" / "x", b"new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FolderNotWritable, match="Permission denied"):
        write_atomically(tmp_path / "x", b"new")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(FolderNotWritable, match="No space left on device"):
        write_atomically(tmp_path / "x", write)
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync, synced = tmp_path / "x", os.fsync, []

    def record(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode) and found.st_size, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_atomically(path, b"new")
    assert synced == [(False, 3, False), (True, False, True)]


def test_file_systems_without_folder_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
