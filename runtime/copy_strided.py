"""Copies that step or cast, element by element in torch: out of mapped files, through staging, or between buffers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from loadplan.runtime.cast import refuse_overflow
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Copy
from loadplan.runtime.readers import Preadv, Reader
from loadplan.runtime.schedule import span
from loadplan.runtime.source_files import SourceFile
from loadplan.runtime.torch_types import torch_dtype


def addressable(copy: Copy, chains: Sequence[tuple[DType, ...]]) -> tuple[Copy, tuple[DType, ...]]:
    """The copy and its chain in elements that torch can address, and moves as they are.

    Packed elements move as whole bytes; booleans too, of which torch would make 0 or 1.
    """
    chain = chains[copy.chain]
    if not chain[0].is_packed and chain[0] is not DType.BOOL:
        return copy, chain
    return copy._replace(run=copy.run * chain[0].bits // 8), (DType.U8,)


def copy_from_map(file: SourceFile, copy: Copy, chain: tuple[DType, ...], buffer: torch.Tensor, name: str) -> None:
    """An addressable copy out of the mapped file; `name` is the buffer's, for messages. Raises `CastOverflow`."""
    stored = chain[0]
    if copy.src % stored.itemsize:  # torch may only address it after a move
        copy_staged(Preadv(), file, copy, chain, buffer, name)
        return
    numel = span(copy, stored) // stored.itemsize
    source = torch.frombuffer(file.map(), dtype=torch_dtype(stored), count=numel, offset=copy.src)
    copy_strided(source, 0, copy, chain, buffer, name)


def copy_staged(
    reader: Reader, file: SourceFile, copy: Copy, chain: tuple[DType, ...], buffer: torch.Tensor, name: str
) -> None:
    """As `copy_from_map`, by one read of all the bytes from the first element to the last."""
    nbytes = span(copy, chain[0])
    staged = torch.empty(nbytes, dtype=torch.uint8)
    with file.open() as descriptor:
        reader.read(file, descriptor, [(copy.src, array("Q", [staged.data_ptr(), nbytes]))])
    copy_strided(staged.view(torch_dtype(chain[0])), 0, copy, chain, buffer, name)


def copy_strided(
    source: torch.Tensor, src: int, copy: Copy, chain: tuple[DType, ...], buffer: torch.Tensor, name: str
) -> None:
    """Copy from byte `src` of the flat `source` into `buffer`, casting as the chain says. Raises `CastOverflow`."""
    stored, final = chain[0], chain[-1]
    sizes = [*(loop.extent for loop in copy.loops), copy.run]
    steps = [*(loop.src // stored.itemsize for loop in copy.loops), 1]
    taken = source.as_strided(sizes, steps, source.storage_offset() + src // stored.itemsize)
    for dtype in chain[1:-1]:
        before, taken = taken, taken.to(torch_dtype(dtype))
        refuse_overflow(before, taken, name)
    place = buffer.reshape(-1).view(torch_dtype(final))
    steps = [*(loop.dst // final.itemsize for loop in copy.loops), 1]
    written = place.as_strided(sizes, steps, copy.dst // final.itemsize)
    written.copy_(taken)
    if len(chain) > 1:
        refuse_overflow(taken, written, name)
