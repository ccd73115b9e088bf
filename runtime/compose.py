"""One tensor mapped from several stretches of files: stacked and joined without a copy.

Pages of a file can be mapped anywhere, in any order. Where the stretches of a tensor lie alike on their pages (equal
offsets modulo the page size, as large tensors of one file mostly do), the whole pages of each are mapped side by side
over fresh memory; only the pages that two stretches share, at their ends, are filled by reading. An expert stack of
2.4 GB is ready in milliseconds, costs one page of memory for each seam, and shares all others with every process that
maps the same file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from loadplan.runtime.pages import PAGE_NBYTES, Memory, map_anonymous, map_file, own
from loadplan.runtime.schedule import Stretch

MAX_MAPPINGS = 16_384  # of one load; Linux allows a process 65,530 (vm.max_map_count)
MIN_NBYTES = 128 << 10  # of a stretch, on average: a mapping with its two ends takes as long as reading so many bytes
_MIN_SHARE = 0.9  # of the tensor's bytes that must be mapped, for the rest is read into small pages


def joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches of one buffer in its order, neighbours in buffer and file as one."""
    result: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.dst):
        if result:
            last = result[-1]
            if (last.file, last.src + last.nbytes, last.dst + last.nbytes) == (stretch.file, stretch.src, stretch.dst):
                result[-1] = last._replace(nbytes=last.nbytes + stretch.nbytes)
                continue
        result.append(stretch)
    return result


def shift_of(stretches: Sequence[Stretch], itemsize: int) -> int | None:
    """How many bytes behind a page the buffer must begin for most of `stretches` to be mapped; None if few could be."""
    total = sum(stretch.nbytes for stretch in stretches)
    if total < MIN_NBYTES * len(stretches):
        return None
    alike: dict[int, int] = defaultdict(int)
    for stretch in stretches:
        alike[(stretch.src - stretch.dst) % PAGE_NBYTES] += max(stretch.nbytes - 2 * PAGE_NBYTES, 0)
    shift, nbytes = max(alike.items(), key=lambda item: item[1])
    return shift if nbytes >= _MIN_SHARE * total and shift % itemsize == 0 else None


def compose(
    stretches: Sequence[Stretch], shift: int, open_file: Callable[[int], AbstractContextManager[int]]
) -> tuple[Memory, list[tuple[Stretch, int]]]:
    """The memory of a buffer made of `stretches`, and what is still to be read into it: (stretch, address).

    Raises:
        OSError: a file cannot be mapped.
        MemoryError: there is no room.
    """
    nbytes = max(stretch.dst + stretch.nbytes for stretch in stretches)
    address, mapped = map_anonymous(shift + nbytes)
    memory = own(address + shift, nbytes, address, mapped)
    rest: list[tuple[Stretch, int]] = []
    by_file: dict[int, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        by_file[stretch.file].append(stretch)
    for file, group in by_file.items():
        with open_file(file) as descriptor:
            for stretch in group:
                rest.extend(_place(descriptor, stretch, address + shift + stretch.dst))
    return memory, rest


def _place(descriptor: int, stretch: Stretch, address: int) -> Iterator[tuple[Stretch, int]]:
    """Map the whole pages of `stretch` at `address`; what is left of it, with its addresses."""
    end = address + stretch.nbytes
    low, high = -(-address // PAGE_NBYTES) * PAGE_NBYTES, end // PAGE_NBYTES * PAGE_NBYTES
    if (address - stretch.src) % PAGE_NBYTES or low >= high:
        yield stretch, address
        return
    map_file(descriptor, high - low, stretch.src + low - address, low)
    if low > address:
        yield stretch._replace(nbytes=low - address), address
    if end > high:
        yield (
            stretch._replace(src=stretch.src + high - address, nbytes=end - high, dst=stretch.dst + high - address),
            high,
        )
