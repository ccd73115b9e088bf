"""Blobs on their way in and out: counted, bounded, digested, and stopped when the transfer is.

A blob that arrives is written to a temporary file of the store that only one object writes to. What an interrupted
transfer leaves is found by the digest in its name, and its bytes are *copied* into the next one's file: no two writers
ever share a file, so none needs a lock, and a bad prefix can only make the digest wrong at the end.
"""

import errno
import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from loadplan.cache.digest import CHUNK_NBYTES
from loadplan.cache.remotes.remote import BadRemoteData
from loadplan.cache.store import BlobStore
from loadplan.cache.write_file import (
    TEMPORARY_PREFIX,
    FolderNotWritable,
    commit,
    make_folder,
    temporary_file,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class IncomingBlob:
    """A blob as it arrives: `write` takes the bytes from `offset` on, and never more than `nbytes` in all.

    `on_bytes` is told how many bytes each step added (fewer than 0 at a restart) and may raise to end the transfer.
    """

    def __init__(self, remote: str, digest: str, nbytes: int, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self.remote, self.digest, self.nbytes = remote, digest, nbytes
        self.offset = 0
        self.is_resumed = False  # some bytes were left by an earlier transfer
        self.is_bad = False  # the bytes are of no use to anybody
        self._file, self._on_bytes = file, on_bytes
        self._hasher = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append what came.

        Raises:
            BadRemoteData: more than the entry said; nothing of it is kept.
        """
        if self.offset + len(data) > self.nbytes:
            self.is_bad = True
            raise BadRemoteData(self.remote, f"blob {self.digest[:12]} is longer than its {self.nbytes} bytes")
        self._file.write(data)
        self._hasher.update(data)
        self.offset += len(data)
        self._on_bytes(len(data))

    def restart(self) -> None:
        """Forget what came so far."""
        self._file.seek(0)
        self._file.truncate()
        self._hasher = hashlib.sha256()
        self._on_bytes(-self.offset)
        self.offset, self.is_resumed = 0, False

    def resume(self, left: Path) -> None:
        """Take over the bytes that an interrupted transfer left."""
        with left.open("rb", buffering=0) as file:
            while self.offset < self.nbytes and (data := file.read(min(CHUNK_NBYTES, self.nbytes - self.offset))):
                self.write(data)
        self.is_resumed = self.offset > 0

    def is_right(self) -> bool:
        """Whether every byte has come and the digest is the blob's."""
        return self.offset == self.nbytes and self._hasher.hexdigest() == self.digest

    def check(self) -> None:
        """
        Raises:
            BadRemoteData: not `is_right`.
        """
        if not self.is_right():
            self.is_bad = True
            raise BadRemoteData(self.remote, f"blob {self.digest[:12]} came with other bytes than its digest says")


@contextmanager
def receive_blob(
    remote: str, store: BlobStore, digest: str, nbytes: int, on_bytes: Callable[[int], None]
) -> Iterator[IncomingBlob]:
    """A blob to be filled, holding already what an earlier transfer left of it; filed at the end if it is right.

    When the transfer fails, the bytes stay for the next one, unless they are wrong.

    Raises:
        BadRemoteData: all bytes came, and they are not the blob.
        FolderNotWritable: the store takes no new file, or is full.
    """
    make_folder(store.folder)
    left = _find_left(store, digest)
    is_useful = True  # to the next transfer
    try:
        with _create(store.folder / f"{_prefix(digest)}{secrets.token_hex(8)}") as file:
            blob = IncomingBlob(remote, digest, nbytes, file, on_bytes)
            try:
                if left:
                    with suppress(FileNotFoundError):  # it was finished, or swept, this moment
                        blob.resume(left[-1])
                yield blob
                blob.check()
                _file_blob(file, store, digest)
                is_useful = False
            finally:
                is_useful = is_useful and not blob.is_bad and blob.offset > 0
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, FolderNotWritable):
            raise FolderNotWritable(error.errno, error.strerror, str(store.folder)) from error
        raise
    finally:
        found = _find_left(store, digest)
        for path in found[:-1] if is_useful else found:  # the longest serves all who come
            path.unlink(missing_ok=True)


def _prefix(digest: str) -> str:
    return f"{TEMPORARY_PREFIX}{digest}-"  # not a blob to anybody: `BlobStore.check` calls it temporary


def _find_left(store: BlobStore, digest: str) -> list[Path]:
    """The temporary files of the blob, the longest last."""
    found = []
    for path in store.folder.glob(f"{_prefix(digest)}*"):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_size, path))
    return [path for _, path in sorted(found)]


def _file_blob(file: BinaryIO, store: BlobStore, digest: str) -> None:
    path = store.path(digest)
    make_folder(path.parent)
    try:
        commit(file, path, is_read_only=True)
    except FileNotFoundError:  # another process took the file for one left behind; its bytes are still at hand
        file.seek(0)
        with temporary_file(store.folder) as copy:
            shutil.copyfileobj(file, copy, CHUNK_NBYTES)
            commit(copy, path, is_read_only=True)


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb+")
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error


class OutgoingBlob:
    """A blob of the local store on its way out; it can be opened again for another try.

    `on_bytes` is told how many bytes went (fewer than 0 when a try starts anew) and may raise to end the transfer.
    """

    def __init__(self, path: Path, digest: str, nbytes: int, on_bytes: Callable[[int], None]) -> None:
        self.path, self.digest, self.nbytes = path, digest, nbytes
        self._sent = 0
        self._on_bytes = on_bytes

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """A reader of the bytes from the first on, of which `read` is all that there is."""
        self.count(-self._sent)
        with self.path.open("rb") as file:
            yield cast("IO[bytes]", _CountingReader(file, self.count))

    def count(self, nbytes: int) -> None:
        """Say that so many more bytes went; for a remote that reads `path` by itself."""
        self._sent += nbytes
        self._on_bytes(nbytes)


class _CountingReader:
    """The bytes of an outgoing blob; each read is counted."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def read(self, nbytes: int = -1) -> bytes:
        data = self._file.read(nbytes)
        self._on_bytes(len(data))
        return data
