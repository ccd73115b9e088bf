"""The files that a plan reads: found, compared with what the plan expects, opened one at a time."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import overload

from loadplan.cache.error import LoadplanError
from loadplan.runtime.file_system import is_network, is_resident
from loadplan.runtime.location import folder_of, locate
from loadplan.runtime.pages import Memory, map_file, own
from loadplan.runtime.plan import PlanFile

_GUARD_NBYTES = 4 << 20  # read at once; headers are smaller
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.preadv.restype = ctypes.c_ssize_t
_LIBC.preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)


class FileMismatch(LoadplanError, OSError):
    """A checkpoint file is missing, or is not the one that the plan was compiled for."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; restore the file, or compile the plan again"


class ReadError(LoadplanError, OSError):
    """The system could not read a part of a checkpoint file."""

    def __init__(self, name: str, offset: int, reason: str) -> None:
        super().__init__(name, offset, reason)
        self.name, self.offset, self.reason = name, offset, reason

    def __str__(self) -> str:
        return f"{self.name}: cannot be read at byte {self.offset} ({self.reason}); check the disk, or restore the file"


class SourceFile:
    """One file, checked when made; reading it later fails if it was replaced or changed in between."""

    def __init__(self, path: str | Path, expected: PlanFile) -> None:
        """Compare size and header of the file at `path` with `expected`. Raises `FileMismatch`."""
        self._path, self.name, self._size = path, expected.name, expected.size
        self._map: Memory | None = None
        self._lock = Lock()
        self._state: os.stat_result | None = None
        with self.open() as descriptor:
            self.is_remote = is_network(descriptor)
            digest = hashlib.sha256()
            for offset, nbytes in expected.guards:  # a hostile plan may guard all of a large file
                for at in range(offset, offset + nbytes, _GUARD_NBYTES):
                    digest.update(self._pread(descriptor, min(_GUARD_NBYTES, offset + nbytes - at), at))
            if digest.hexdigest() != expected.header_digest:
                raise FileMismatch(self.name, "its header is not the one that the plan was compiled for")

    @contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor of the file, as long as the block lasts. Raises `FileMismatch`."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FileMismatch(self.name, f"cannot be opened ({error.strerror})") from error
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise FileMismatch(self.name, "is no file")
            if state.st_size != self._size:
                raise FileMismatch(self.name, f"has {state.st_size} bytes, the plan expects {self._size}")
            if self._state is None:
                self._state = state
            elif not _is_unchanged(self._state, state):
                raise FileMismatch(self.name, "was replaced or changed while it was being loaded")
            yield descriptor
        finally:
            os.close(descriptor)

    def check_unchanged(self) -> None:
        """Raise `FileMismatch` if the file was replaced or changed since this was made."""
        with self.open():
            pass

    def map(self) -> Memory:
        """The whole file in memory, private and copy on write; unmapped when the last tensor on it is gone.

        `mmap.mmap` would hold a descriptor for as long, and a model may have more files than a process may have of them.
        """
        with self._lock:
            if self._map is None:
                with self.open() as descriptor:
                    address = map_file(descriptor, self._size)
                self._map = own(address, self._size, address, self._size)
            return self._map

    @cached_property
    def is_resident(self) -> bool:
        """Whether its bytes are in the page cache, by a sample."""
        return is_resident(ctypes.addressof(self.map()), self._size)

    def read_into(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, one after the other, with the bytes from `offset`.

        Raises:
            FileMismatch: the file ends before.
            ReadError: the system cannot read it.
        """
        left = list(views)
        while left:
            try:
                count = os.preadv(descriptor, left, offset)
            except OSError as error:
                raise ReadError(self.name, offset, str(error.strerror)) from error
            if count == 0:
                raise FileMismatch(self.name, f"ends at byte {offset}")
            offset += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]

    def scatter(self, descriptor: int, places: array[int], offset: int) -> None:
        """As `read_into`, with addresses: `places` holds address and nbytes of each, at most 1,024; it is used up."""
        first = 0
        while first < len(places):
            start = places.buffer_info()[0] + first * places.itemsize
            count = _LIBC.preadv(descriptor, start, (len(places) - first) // 2, offset)
            if count < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                raise ReadError(self.name, offset, os.strerror(number))
            if count == 0:
                raise FileMismatch(self.name, f"ends at byte {offset}")
            offset += count
            while first < len(places) and count >= places[first + 1]:
                count -= places[first + 1]
                first += 2
            if count:
                places[first] += count
                places[first + 1] -= count

    def _pread(self, descriptor: int, nbytes: int, offset: int) -> bytearray:
        data = bytearray(nbytes)
        self.read_into(descriptor, [memoryview(data)] if nbytes else [], offset)
        return data


def _is_unchanged(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether it is the same file, not written in between.

    ctime moves with every write, even when mtime is set back; but also when a cache links the file into another folder,
    or takes such a link away, which `nlink` shows.
    """
    kept = all(getattr(before, name) == getattr(after, name) for name in ("st_size", "st_dev", "st_ino", "st_mtime_ns"))
    return kept and (before.st_ctime_ns == after.st_ctime_ns or before.st_nlink != after.st_nlink)


class SourceFiles(Sequence[SourceFile]):
    """The files of a folder in the order of a plan, each checked before it is handed out."""

    def __init__(self, folder: Path, expected: Sequence[PlanFile], used: Collection[int]) -> None:
        """Check the files whose numbers are in `used` now, others when asked for. Raises `FileMismatch`."""
        self._folder, self._expected = str(folder), expected
        self._made: dict[int, SourceFile] = {}
        for number in sorted(used):
            self[number]

    def __len__(self) -> int:
        return len(self._expected)

    @overload
    def __getitem__(self, number: int) -> SourceFile: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[SourceFile]: ...
    def __getitem__(self, number: int | slice) -> SourceFile | Sequence[SourceFile]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if number not in self._made:
            expected = self._expected[number]
            self._made[number] = SourceFile(f"{self._folder}/{expected.name}", expected)
        return self._made[number]


def find_files(
    location: str | Path, expected: Sequence[PlanFile], used: Collection[int] | None = None
) -> Sequence[SourceFile]:
    """The checked files of the checkpoint at `location`, in the order of `expected`.

    Args:
        location: the checkpoint's folder, or one of its files; for a plan of a single file any path of that file.
        expected: what the plan says of each.
        used: numbers of those to check now, all if None; others need not be there, and are checked when asked for.

    Raises:
        LocationError: there is nothing at `location`.
        FileMismatch: a file is missing or another one.
    """
    path = locate(location)
    if _is_all(path, expected):
        return [SourceFile(path, expected[0])]
    return SourceFiles(folder_of(path), expected, range(len(expected)) if used is None else used)


def source_paths(location: str | Path, expected: Sequence[PlanFile]) -> dict[str, Path]:
    """Where the files that `find_files` finds lie, by their names in the plan. Raises `LocationError`."""
    path = locate(location)
    if _is_all(path, expected):
        return {expected[0].name: path}
    folder = folder_of(path)
    return {file.name: folder / file.name for file in expected}


def _is_all(path: Path, expected: Sequence[PlanFile]) -> bool:
    """Whether the path is that of the only file, which may have any name."""
    return path.is_file() and len(expected) == 1 and not path.name.endswith(".json")
