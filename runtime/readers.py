"""What reads stretches of files into memory: `preadv`, or a reading library, behind one small interface.

    preadv             the system call, many places at once; the default, needs nothing
    runai              Run:ai Model Streamer (`read_with_runai`), io_uring where the kernel has it
    fastsafetensors    its reader for file systems without GPUDirect (`read_with_fastsafetensors`)

A library only moves bytes. Which bytes, whether the file is the one that the plan was compiled for, before and after,
and what a failure is called stay here and in `source_files`, the same for all.

A reader keeps nothing between calls: threads, rings and buffers of a library live as long as one call, so that whatever
ends a load ends them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol, cast

from loadplan.cache.error import LoadplanError
from loadplan.runtime.source_files import ReadError, SourceFile

Backend = Literal["preadv", "runai", "fastsafetensors"]
Place = tuple[int, int, int]  # offset in a file; address and nbytes in memory
Batch = tuple[int, "array[int]"]  # offset in a file; address and nbytes of at most 1,024 places that follow each other

_PROBE_NBYTES = 1 << 20  # per read, while looking for the byte at which a library failed


class BackendError(LoadplanError, ImportError):
    """The library of the back end asked for is not installed, or not in a version that is known."""


class Reader(Protocol):
    """A way to read. Used by many threads at once."""

    @property
    def pieces(self) -> int:
        """How many pieces of a file (16 MiB) one call should read, for its own cost not to matter."""

    @property
    def staging_nbytes(self) -> int:
        """Bytes that one call holds for a while, besides the places that it fills."""

    def read(self, file: SourceFile, descriptor: int, batches: Iterable[Batch]) -> None:
        """Fill all places of all batches from `file`, open as `descriptor`; the arrays are used up.

        When this returns or raises, nothing writes to the places any more.

        Raises:
            FileMismatch: the file ends before a place is full.
            ReadError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Preadv:
    """The system call preadv(2)."""

    pieces: int = 1
    staging_nbytes: int = 0

    def read(self, file: SourceFile, descriptor: int, batches: Iterable[Batch]) -> None:
        """See `Reader`."""
        for offset, places in batches:
            file.scatter(descriptor, places, offset)


def find_reader(backend: Backend) -> Reader:
    """The reader of this name; its library is imported now. Raises `BackendError`."""
    if backend == "preadv":
        return Preadv()
    try:
        module = import_module(f"loadplan.runtime.read_with_{backend}")
    except (ImportError, OSError) as error:  # also what a library of its own cannot load
        raise BackendError(
            f"backend={backend!r} cannot be imported ({error}); pip install 'loadplan[{backend}]', or use preadv"
        ) from error
    return cast(Reader, module.READER)


def places_of(batches: Iterable[Batch]) -> list[Place]:
    """All places that hold anything, as libraries take them."""
    found: list[Place] = []
    for offset, places in batches:
        for index in range(0, len(places), 2):
            nbytes = places[index + 1]
            if nbytes:
                found.append((offset, places[index], nbytes))
            offset += nbytes
    return found


def explain(file: SourceFile, descriptor: int, places: Sequence[Place], failed: int, reason: str) -> ReadError:
    """The error to raise when a library could not fill the place number `failed`, and said no more than `reason`.

    Reads all of them once more, by `preadv`, to name the byte and the system's own words; all, since a library may read
    neighbours at once and blame the first. If that succeeds it is still an error, at the first byte of that place: what
    the library left in memory is not known.

    Raises:
        FileMismatch: the file ends before.
        ReadError: the system cannot read it either.
    """
    probe = memoryview(bytearray(_PROBE_NBYTES))
    for offset, _, nbytes in places:
        for done in range(0, nbytes, _PROBE_NBYTES):
            file.read_into(descriptor, [probe[: nbytes - done]], offset + done)
    return ReadError(file.name, places[failed][0], reason)
