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


def write_atomically(
    path: Path, data: bytes | bytearray | memoryview | Callable[[BinaryIO], object], *, is_durable: bool = True
) -> None:
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
        commit(file, path, is_durable=is_durable)


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


def commit(file: BinaryIO, path: Path, *, is_read_only: bool = False, is_durable: bool = True) -> None:
    """Give the temporary `file` its place: all its bytes first, then its mode, then its name.

    What is not durable may be gone or torn after a power cut: for files that know their own digest.
    """
    file.flush()
    if is_durable:
        os.fsync(file.fileno())
    if is_read_only:
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)
    Path(file.name).replace(path)
    if is_durable:
        sync_folder(path.parent)


def age_s(path: Path, now_s: float) -> float:
    """Seconds since the file was written, linked or renamed; 0.0 when it is not there.

    ctime counts too: a hard link keeps the mtime of its source, which may be old.
    """
    try:
        found = path.lstat()
    except OSError:
        return 0.0
    return now_s - max(found.st_mtime_ns, found.st_ctime_ns) / 1e9


def temporary_files(folder: Path) -> Iterator[Path]:
    """What writers are at work on below `folder`, or killed writers have left."""
    return (path for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")) if path.is_file() or path.is_symlink())


def finished_files(folder: Path) -> list[Path]:
    """What lies in `folder` and is not temporary, in order; nothing when there is no such folder."""
    try:
        return [path for path in sorted(folder.iterdir()) if not path.name.startswith(TEMPORARY_PREFIX)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def set_aside(path: Path) -> Path | None:
    """Take the file out of its place, to look at it there undisturbed; None when it is gone. Raises `FolderNotWritable`."""
    aside = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        path.rename(aside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error
    return aside


def put_back(aside: Path, path: Path) -> None:
    """Give the file its place again, unless there is a newer one."""
    with suppress(FileNotFoundError):  # another process cleaned up
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            aside.rename(path)
            return
        aside.unlink()


def remove_file(path: Path) -> bool:
    """Remove it; False when it was gone already. Raises `FolderNotWritable`."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error
    return True


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it, where missing, so that they outlive a power cut."""
    try:
        if folder.is_dir():
            return
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    except FolderNotWritable:
        raise
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(folder)) from error


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, which syncing the files does not do (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): the file system has no sync for folders
            raise
    finally:
        os.close(descriptor)
