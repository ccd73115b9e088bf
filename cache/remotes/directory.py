"""A folder as a remote: on NFS, or another store. The layout is the store's own, so either can be used as the other."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loadplan.cache.actions import ActionCache
from loadplan.cache.digest import CHUNK_NBYTES
from loadplan.cache.remotes.blob_streams import IncomingBlob, OutgoingBlob
from loadplan.cache.remotes.entry_format import parse_entry_record
from loadplan.cache.remotes.remote import (
    MAX_ENTRY_NBYTES,
    BadRemoteData,
    RemoteEntry,
    RemoteError,
    RemoteRefused,
    RemoteUnavailable,
)
from loadplan.cache.store import ABSENT, BlobStore

_NO = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)


class DirectoryRemote:
    """Artifacts below `root`, which must exist: a folder that is not mounted is a remote that is down, not an empty one.

    Writes are temp + fsync + rename; there are no locks and no links. A file system that hangs (a hard NFS mount whose
    server is gone) hangs the thread that reads it: mount it soft.
    """

    def __init__(self, root: Path, *, read_only: bool = True) -> None:
        self.root, self.name, self.read_only = root, str(root), read_only
        self._blobs = BlobStore(root / "blobs")
        self._actions = ActionCache(root / "actions", self._blobs)

    def find_entry(self, key: str) -> RemoteEntry | None:
        with self._errors():
            file = self._open(self._actions.path(key))
            if file is None:
                return None
            with file:
                data = file.read(MAX_ENTRY_NBYTES + 1)
            if len(data) > MAX_ENTRY_NBYTES:
                raise BadRemoteData(self.name, f"the entry of {key[:12]} is larger than {MAX_ENTRY_NBYTES} bytes")
            return parse_entry_record(self.name, key, data, self._find_nbytes)

    def put_entry(self, key: str, entry: RemoteEntry) -> None:
        with self._errors():
            self._actions.put(key, entry.artifact)

    def has_blob(self, digest: str, nbytes: int) -> bool:
        with self._errors():
            return self._find_nbytes(digest) == nbytes

    def fetch_blob(self, blob: IncomingBlob) -> None:
        with self._errors():
            file = self._open(self._blobs.path(blob.digest))
        if file is None:
            raise BadRemoteData(self.name, f"blob {blob.digest[:12]} is not there")
        with file:
            file.seek(blob.offset)
            while data := self._read(file):
                blob.write(data)  # outside `_errors`: a full disk here is no fault of the remote

    def put_blob(self, blob: OutgoingBlob) -> None:
        with self._errors():
            self._blobs.put_file(blob.path)
        blob.count(blob.nbytes)

    def close(self) -> None:
        pass

    def _find_nbytes(self, digest: str) -> int | None:
        try:
            found = self._blobs.path(digest).stat()
        except ABSENT:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _open(self, path: Path) -> BinaryIO | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
        except ABSENT:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadRemoteData(self.name, f"{path.relative_to(self.root)} is not a file")
        return os.fdopen(descriptor, "rb", buffering=0)

    def _read(self, file: BinaryIO) -> bytes:
        with self._errors():
            return file.read(CHUNK_NBYTES)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what the file system says into the remote's errors."""
        try:
            if not self.root.is_dir():
                raise RemoteUnavailable(self.name, "the folder does not exist (is it mounted?)")
            yield
        except RemoteError:
            raise
        except OSError as error:
            kind = RemoteRefused if error.errno in _NO else RemoteUnavailable
            raise kind(self.name, error.strerror or type(error).__name__) from error
