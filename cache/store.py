"""Blobs filed under their digest. A blob is whole, read-only and never changes; a damaged one is never handed out."""

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import FileIO
from pathlib import Path

from loadplan.cache.digest import NotADigest, digest_bytes, digest_file, digest_stream, is_digest
from loadplan.cache.error import LoadplanError
from loadplan.cache.record import NotReadable
from loadplan.cache.write_file import TEMPORARY_PREFIX, commit, make_folder, sync_folder, temporary_file

ABSENT = (FileNotFoundError, NotADirectoryError)  # the second when the store's folder is below a file


class DigestMismatch(LoadplanError, ValueError):
    """A blob's bytes are not those it is filed under."""

    def __init__(self, path: Path, wanted: str, found: str) -> None:
        super().__init__(path, wanted, found)
        self.path, self.wanted, self.found = path, wanted, found

    def __str__(self) -> str:
        return (
            f"{self.path}: filed as {self.wanted[:12]}, holds {self.found[:12]}; "
            "the blob is damaged: delete the file, or put the right bytes again"
        )


class BlobMissing(LoadplanError, KeyError):
    """No blob is filed under this digest."""

    def __init__(self, path: Path, digest: str) -> None:
        super().__init__(path, digest)
        self.path, self.digest = path, digest

    def __str__(self) -> str:  # KeyError's own would print a repr
        return f"{self.path}: no blob {self.digest[:12]} in the store; build it again"


class ProblemKind(StrEnum):
    DAMAGED = "damaged"  # holds other bytes than its name says
    MISNAMED = "misnamed"  # not where or not what a blob can be
    TEMPORARY = "temporary"  # left by a killed writer, or a writer is at work
    INCOMPLETE = "incomplete"  # names a blob that is not there


@dataclass(frozen=True, slots=True)
class Problem:
    """A path in the cache that is not what belongs there."""

    kind: ProblemKind
    path: Path
    nbytes: int = field(default=0, compare=False)  # of the file

    def to_json(self) -> dict[str, object]:
        return {"kind": str(self.kind), "path": str(self.path), "nbytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class BlobStore:
    """Blobs at `folder/ab/cdef…`, named by their SHA-256.

    Any number of processes may read and write at once, without locks: a blob gets its name by a rename when it is
    complete, and two writers of one blob write the same bytes. The folder is made by the first put.
    """

    folder: Path

    def path(self, digest: str) -> Path:
        """Where the blob is or would be.

        Raises:
            NotADigest: so that no text from outside can name a path elsewhere.
        """
        if not is_digest(digest):
            raise NotADigest(digest)
        return self.folder / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        """Whether the blob is there; its bytes are not looked at."""
        return self.path(digest).is_file()

    def is_good(self, digest: str) -> bool:
        """Whether the blob is there and holds the right bytes; reads all of them."""
        try:
            return digest_file(self.path(digest))[0] == digest
        except (*ABSENT, IsADirectoryError):
            return False
        except PermissionError as error:
            raise NotReadable(error.errno, error.strerror, str(self.path(digest))) from error

    def get_bytes(self, digest: str) -> bytes:
        """The blob's bytes, verified.

        Raises:
            BlobMissing, DigestMismatch
        """
        with self._open(digest) as file:
            data = file.read()
        found = digest_bytes(data)
        if found != digest:
            raise DigestMismatch(self.path(digest), digest, found)
        return data

    def copy_to(self, digest: str, destination: Path) -> None:
        """Make `destination` a writable copy of the blob, verified on the way; on failure it stays as it was.

        Raises:
            BlobMissing, DigestMismatch, FolderNotWritable
        """
        with self._open(digest) as source, temporary_file(destination.parent) as copy:
            found, _ = digest_stream(source, copy)
            if found != digest:
                raise DigestMismatch(self.path(digest), digest, found)
            commit(copy, destination)

    def put_bytes(self, data: bytes | bytearray | memoryview) -> str:
        """File `data` and return its digest; a damaged blob of that name is replaced."""
        digest = digest_bytes(data)
        if self.is_good(digest):
            return digest
        path = self.path(digest)
        make_folder(path.parent)
        with temporary_file(path.parent) as file:
            file.write(data)
            commit(file, path, is_read_only=True)
        return digest

    def put_file(
        self, source: Path, *, is_ours: bool = False, is_kept: Callable[[str], bool] = lambda digest: False
    ) -> str:
        """File `source`, read once, and return its digest; a blob of that name is replaced, damaged or not.

        Args:
            source: a file; a copy of it is filed, for its owner may write to it later.
            is_ours: nobody will write to it: it is made read-only, and the blob is a hard link where there can be one.
            is_kept: whether the blob of a digest is good, and to stay.
        """
        if is_ours:
            digest = self._put_link(source, is_kept)
            if digest is not None:
                return digest
        with source.open("rb", buffering=0) as original:
            make_folder(self.folder)
            with temporary_file(self.folder) as copy:
                digest, _ = digest_stream(original, copy)
                if is_kept(digest):
                    return digest
                path = self.path(digest)
                make_folder(path.parent)
                commit(copy, path, is_read_only=True)
        return digest

    def _put_link(self, source: Path, is_kept: Callable[[str], bool]) -> str | None:
        """File a hard link of `source`; None where there can be none."""
        make_folder(self.folder)
        link = self.folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            os.link(source.resolve(), link)  # link(2) would link a symbolic link itself
        except FileNotFoundError:
            raise
        except OSError:
            return None
        try:
            with link.open("rb", buffering=0) as file:
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)  # before it is read: nobody may begin
                digest, _ = digest_stream(file)
                if is_kept(digest):
                    return digest
                os.fsync(file.fileno())
            path = self.path(digest)
            make_folder(path.parent)
            link.replace(path)  # of two links to one file it leaves both (rename(2)): `unlink` below
            sync_folder(path.parent)
        finally:
            with suppress(OSError):
                link.unlink()
        return digest

    def digests(self) -> Iterator[tuple[str, os.stat_result]]:
        """What is filed, good or not, in order; looks at no bytes."""
        for path in sorted(self.folder.glob("??/*")):
            digest = path.parent.name + path.name
            if is_digest(digest):
                with suppress(FileNotFoundError):
                    yield digest, path.lstat()

    def check(self, progress: Callable[[int, int], None] | None = None) -> tuple[Problem, ...]:
        """Everything below the folder that is not a good blob, by path; reads every byte, repairs nothing.

        `progress` is called with (bytes read, bytes in all).
        """
        sizes = {path: nbytes_of(path) for path in sorted(self.folder.rglob("*"))}
        problems, done, total = [], 0, sum(sizes.values())
        for path, nbytes in sizes.items():
            kind = self._find_problem(path)
            if kind:
                problems.append(Problem(kind, path, nbytes))
            done += nbytes
            if progress is not None and nbytes:
                progress(done, total)
        return tuple(problems)

    def _find_problem(self, path: Path) -> ProblemKind | None:
        parts = path.relative_to(self.folder).parts
        if len(parts) == 1 and path.is_dir():
            return None
        if path.name.startswith(TEMPORARY_PREFIX):
            return ProblemKind.TEMPORARY
        digest = "".join(parts)
        if not is_digest(digest) or self.path(digest) != path or path.is_symlink() or not path.is_file():
            return ProblemKind.MISNAMED
        return None if self.is_good(digest) else ProblemKind.DAMAGED

    @contextmanager
    def _open(self, digest: str) -> Iterator[FileIO]:
        path = self.path(digest)
        try:
            file = path.open("rb", buffering=0)
        except ABSENT as error:
            raise BlobMissing(path, digest) from error
        except PermissionError as error:
            raise NotReadable(error.errno, error.strerror, str(path)) from error
        with file:
            yield file


def nbytes_of(path: Path) -> int:
    """Bytes of a regular file; 0 for anything else, and for what is gone."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
