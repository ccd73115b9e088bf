"""Files that appear whole or not at all: written beside their place, synced, then renamed into it."""

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from loadplan.cache.error import LoadplanError

TEMPORARY_PREFIX = ".tmp-"  # a file so named is being written, or its writer was killed

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderNotWritable(LoadplanError, OSError):
    """A folder that takes no new files: no permission, no space, or not a folder."""

    def __init__(self, number: int | None, reason: str | None, filename: str) -> None:
        super().__init__(number, reason, filename)

    def __str__(self) -> str:
        return (
            f"{self.filename}: cannot be written ({self.strerror}); "
            "free some space, change its permissions, or choose another folder"
        )


def write_atomically(path: Path, data: bytes | bytearray | memoryview | Callable[[BinaryIO], object]) -> None:
    """Make `path` hold `data`, or what the callable writes; on any failure it keeps what it held before.

    Its folder must exist (`make_folder`). A link at `path` is replaced, not followed.

    Raises:
        FolderNotWritable: the folder takes no new file, or is full.
    """
    with temporary_file(path.parent) as file:
        if callable(data):
            data(file)
        else:
            file.write(data)
        commit(file, path)


@contextmanager
def temporary_file(folder: Path) -> Iterator[BinaryIO]:
    """A new file in `folder`, open for writing, that is gone at the end unless `commit` has placed it."""
    # The name is fixed before the file exists: no interrupt can come between making it and knowing it.
    path = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with _create(path) as file:
            yield file
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, FolderNotWritable):
            raise FolderNotWritable(error.errno, error.strerror, str(folder)) from error
        raise
    finally:
        with suppress(OSError):
            path.unlink()


def commit(file: BinaryIO, path: Path, *, is_read_only: bool = False) -> None:
    """Give the temporary `file` its place: all its bytes first, then its mode, then its name."""
    file.flush()
    os.fsync(file.fileno())
    if is_read_only:
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)
    Path(file.name).replace(path)
    _sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it, where missing, so that they outlive a power cut."""
    try:
        if folder.is_dir():
            return
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
    except FolderNotWritable:
        raise
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(folder)) from error


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, which syncing the files does not do (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): the file system has no sync for folders
            raise
    finally:
        os.close(descriptor)
