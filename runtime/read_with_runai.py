"""Reading with Run:ai Model Streamer (extra `runai`): any stretches of a file, each to an address of its own.

`FileStreamer`, the library's public class, reads into a ring of its own, from which every byte would be copied once more.
This uses what it is made of, `runai_request`, which fills the memory that it is given: hence the narrow version in
`pyproject.toml`.

The library opens a file by name. It is given `/proc/self/fd/N`, so that what it opens is what was checked, whatever
happens to the name meanwhile, and names that are not UTF-8 do; without /proc this back end cannot read.

How it reads (io_uring, libaio or threads, how many, in which pieces) is its own choice, taken from RUNAI_STREAMER_*
variables of the environment, which are left as they are; RUNAI_STREAMER_MEMORY_LIMIT bounds the ring, which is not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runai_model_streamer.libstreamer.libstreamer import (
    SUCCESS_ERROR_CODE,
    runai_end,
    runai_request,
    runai_response,
    runai_response_str,
    runai_start,
)

from loadplan.runtime.readers import Batch, explain, places_of
from loadplan.runtime.source_files import SourceFile

_WAIT_MS = 500  # how long Ctrl-C may go unnoticed


@dataclass(frozen=True, slots=True)
class Runai:
    """A streamer for each call. See `loadplan.runtime.readers.Reader`."""

    pieces: int = 4  # a streamer's start and end take about a millisecond together
    staging_nbytes: int = 0

    def read(self, file: SourceFile, descriptor: int, batches: Iterable[Batch]) -> None:
        """See `Reader`."""
        wanted = places_of(batches)
        if not wanted:
            return
        failed: tuple[int, str] | None = None  # which of them, what the library says
        streamer = None
        try:
            streamer = runai_start()
            runai_request(
                streamer,
                [f"/proc/self/fd/{descriptor}"],
                [len(wanted)],
                [offset for offset, _, _ in wanted],
                [nbytes for _, _, nbytes in wanted],
                [address for _, address, _ in wanted],
            )
            left = set(range(len(wanted)))
            while left and failed is None:
                failed = _take_response(streamer, left)
        except ValueError as error:  # so says the library that it could not start, or not take the request
            failed = 0, str(error)
        finally:
            if streamer is not None:
                runai_end(streamer)  # waits for its threads: nothing writes to the places after this
        if failed is not None:
            raise explain(file, descriptor, wanted, failed[0], f"runai-model-streamer: {failed[1]}")


def _take_response(streamer: object, left: set[int]) -> tuple[int, str] | None:
    """Wait for one place, and take it out of those `left`; or which one failed, and why."""
    try:
        response = runai_response(streamer, _WAIT_MS)
    except TimeoutError:
        return None
    if response is None:
        return min(left), "ended before all was read"
    code, _, _, index, _ = response
    if code != SUCCESS_ERROR_CODE:
        return index, runai_response_str(code).decode(errors="replace")
    left.remove(index)
    return None


READER = Runai()
