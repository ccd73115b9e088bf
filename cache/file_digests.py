"""Digests of source files, remembered by what the file system says of the file, so that each is read once."""

import logging
import os
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from loadplan.cache.digest import digest_file, digest_json, is_digest
from loadplan.cache.error import LoadplanError
from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import FolderNotWritable

logger = logging.getLogger(__name__)

FORMAT = 1

# A file changed twice within one tick of the file system's clock keeps its times, and with the same size nothing
# tells the two contents apart. So a file that is still fresh when its reading starts is not remembered ("racily
# clean", git's Documentation/technical/racy-git.txt). FAT has the coarsest clock: 2 s.
SETTLED_NS = 2_000_000_000


class FileChanged(LoadplanError, OSError):
    """A file that changed while it was read, so that its digest would be of neither content."""

    def __init__(self, path: Path, nbytes_before: int, nbytes_after: int) -> None:
        super().__init__(path, nbytes_before, nbytes_after)
        self.path, self.nbytes_before, self.nbytes_after = path, nbytes_before, nbytes_after

    def __str__(self) -> str:
        return (
            f"{self.path}: changed while it was read ({self.nbytes_before} bytes before, {self.nbytes_after} after); "
            "wait until it is written, then run again"
        )


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes whenever a file's content does, as stat(2) gives it."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int  # cannot be set back by the user, as mtime can

    @classmethod
    def of(cls, path: Path) -> "FileState":
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FileDigests:
    """One record a file at `folder/ab/cdef…`, named by device and inode: no path is kept, a renamed file is known."""

    folder: Path

    def digest(self, path: Path, *, attempts: int = 5) -> str:
        """The digest of what `path` holds; the file is read only if it is new, changed or fresh.

        It is read again, at most `attempts` times in all, when only its ctime moved: that may be a write that set mtime
        back, or a link that was made or removed.

        Raises:
            FileChanged: somebody wrote to it, or replaced it, during the reading.
        """
        start_ns = time.time_ns()
        state = FileState.of(path)
        known = self._find(state)
        if known is not None:
            return known
        digest, _ = digest_file(path)
        after = FileState.of(path)
        if replace(after, ctime_ns=state.ctime_ns) == state != after and attempts > 1:
            return self.digest(path, attempts=attempts - 1)  # it may only have been linked elsewhere, or made read-only
        if after != state:
            raise FileChanged(path, state.nbytes, after.nbytes)
        if start_ns - state.mtime_ns >= SETTLED_NS:
            self._remember(state, digest)
        return digest

    def find(self, path: Path) -> str | None:
        """The digest of what `path` holds, if it is remembered."""
        return self._find(FileState.of(path))

    def link(self, source: Path, destination: Path) -> None:
        """Make `destination` a hard link of `source`. What is remembered of it stays so, though its ctime moves.

        A write between the two looks would move mtime, which is in the past for all that is remembered.

        Raises:
            OSError: the file system has no links, or not from there to here.
        """
        before = FileState.of(source)
        known = self._find(before)
        os.link(source, destination)
        after = FileState.of(destination)
        if known is not None and replace(after, ctime_ns=before.ctime_ns) == before:
            self._remember(after, known)

    def _path(self, state: FileState) -> Path:
        name = digest_json([state.device, state.inode])
        return self.folder / name[:2] / name[2:]

    def _find(self, state: FileState) -> str | None:
        return parse_file_digest(find_record(self._path(state)), state)

    def _remember(self, state: FileState, digest: str) -> None:
        record = {"format": FORMAT, "state": astuple(state), "digest": digest}
        try:
            write_record(self._path(state), record, is_durable=False)  # syncing would take longer than many a file
        except FolderNotWritable as error:  # the answer is right all the same, only slow the next time too
            logger.warning("file digest not remembered: %s", error)


def parse_file_digest(value: object, state: FileState) -> str | None:
    """The digest in the record of a file in `state`, or None when the record says anything else."""
    match value:
        case {"format": 1, "state": list(found), "digest": str(digest)} if is_digest(digest):
            return digest if found == list(astuple(state)) else None
        case _:
            return None
