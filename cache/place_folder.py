"""Folders that appear whole or not at all: filled beside their place, synced, then renamed into it."""

import errno
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import TEMPORARY_PREFIX, FolderNotWritable, age_s, make_folder, sync_folder

_ABANDONED_S = 3600.0  # nobody fills a folder and writes nothing for so long
_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class FolderExists(LoadplanError, FileExistsError):
    """A folder is to be made where something is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: is there already; give another folder, or remove it"


@contextmanager
def new_folder(place: Path, *, replace: bool) -> Iterator[Path]:
    """An empty folder to fill, which is at `place` when the block ends well, and gone when it does not.

    Files must be synced by who writes them. Where something is at `place` already, a process that is killed between
    two renames leaves nothing there; what killed processes left beside it is removed by the next one.

    Args:
        place: where it goes; an empty folder may be there.
        replace: take away whatever is there.

    Raises:
        FolderExists: something is there, and not to be replaced.
        FolderNotWritable: no space, or no permission.
    """
    try:
        if os.path.lexists(place) and not replace and not (place.is_dir() and not any(place.iterdir())):
            raise FolderExists(place)
        make_folder(place.parent)
        remove_drafts(place, time.time())
        draft = _beside(place)
        try:
            make_folder(draft)
            yield draft
            for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
                sync_folder(folder)
            _swap(draft, place, replace)
            sync_folder(place.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if isinstance(error, LoadplanError) or error.errno not in _NOT_WRITABLE:
            raise
        raise FolderNotWritable(error.errno, error.strerror, str(place.parent)) from error


def _swap(draft: Path, place: Path, replace: bool) -> None:
    try:
        draft.rename(place)  # absent, or an empty folder
        return
    except OSError as error:
        if not os.path.lexists(place):
            raise
        if not replace:
            raise FolderExists(place) from error
    aside = _beside(place)
    place.rename(aside)
    try:
        draft.rename(place)
    except OSError:
        aside.rename(place)
        raise
    _remove_tree(aside)


def remove_drafts(place: Path, now_s: float) -> None:
    """Remove what killed processes left beside `place`."""
    for path in place.parent.glob(f"{TEMPORARY_PREFIX}{glob.escape(place.name)}-*"):
        if all(age_s(part, now_s) >= _ABANDONED_S for part in (path, *path.rglob("*"))):
            _remove_tree(path)


def _beside(place: Path) -> Path:
    return place.parent / f"{TEMPORARY_PREFIX}{place.name}-{secrets.token_hex(8)}"


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
