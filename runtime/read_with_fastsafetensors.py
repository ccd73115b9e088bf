"""Reading with fastsafetensors (extra `fastsafetensors`): its reader for file systems without GPUDirect Storage.

`SafeTensorsFileLoader`, the library's public class, reads the whole data of a file into one buffer, of which tensors are
parts: no use for stretches that belong to many. This uses what it is made of, `nogds_file_reader`: hence the narrow
version in `pyproject.toml`. It reads through a bounce buffer, from which its own thread copies to the place; so also
on the way to an accelerator, where the place is the pinned stage of `to_device`. GPUDirect Storage, which would spare
both, needs a device and files laid out for it; that part of the library is not used.

When a read fails the library also writes a line to stderr.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastsafetensors import cpp

from loadplan.runtime.readers import Batch, explain, places_of
from loadplan.runtime.source_files import SourceFile

_BOUNCE_NBYTES = 1 << 20  # in two halves, used in turn; small enough to stay in a core's cache


@dataclass(frozen=True, slots=True)
class Fastsafetensors:
    """A reader with one thread for each call; calls run in parallel. See `loadplan.runtime.readers.Reader`."""

    pieces: int = 4
    staging_nbytes: int = _BOUNCE_NBYTES + (16 << 10)  # its margins for alignment

    def read(self, file: SourceFile, descriptor: int, batches: Iterable[Batch]) -> None:
        """See `Reader`."""
        wanted = places_of(batches)
        failed: tuple[int, str] | None = None  # which of them, what the library says
        reader = cpp.nogds_file_reader(
            use_mmap=False, bbuf_size_kb=_BOUNCE_NBYTES >> 10, max_threads=1, use_cuda=False, device_id=0
        )
        try:
            requests = []
            for offset, address, nbytes in wanted:
                place = cpp.gds_device_buffer(address, nbytes, False)
                requests.append(reader.submit_read(descriptor, place, offset, nbytes, 0, True))
            for number, (request, (_, _, nbytes)) in enumerate(zip(requests, wanted, strict=True)):
                reason = _wait(reader, request, nbytes)
                if reason is not None:
                    failed = number, reason
                    break
        finally:
            del reader  # waits for its thread: nothing writes to the places after this
        if failed is not None:
            raise explain(file, descriptor, wanted, failed[0], f"fastsafetensors: {failed[1]}")


def _wait(reader: cpp.nogds_file_reader, request: int, nbytes: int) -> str | None:
    """Wait until a request is done; what failed, if it did."""
    try:
        reader.wait_read_prefix(request, nbytes)  # `wait_read` would hold the interpreter's lock meanwhile
    except RuntimeError as error:
        return str(error)
    return None


READER = Fastsafetensors()
