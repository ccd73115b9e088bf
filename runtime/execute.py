"""The execution of a section: bytes of files into buffers, nothing in between where nothing is needed.

For each buffer the cheapest way that is right:

    map     the buffer is one stretch of a file, of its own dtype and aligned: a view of the mapped file
    read    the copy is one stretch: read straight into the buffer, with its neighbours in the file in one `preadv`
    copy    the copy is strided or casts: from the mapped file, element by element, in torch

Reads and copies are split over a bounded number of threads. All copies from files run first; copies from temporaries
follow, in the order of the temporaries (`loadplan.runtime.plan`). A cast that would make a finite value infinite is refused. An error or an interrupt stops the rest, waits for
what is running, and leaves no thread and no open file.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import torch

from loadplan.cache.error import LoadplanError
from loadplan.runtime.cast import refuse_overflow
from loadplan.runtime.dtype import DType
from loadplan.runtime.memory import allocate
from loadplan.runtime.plan import Copy, Head, Section
from loadplan.runtime.source_files import SourceFile
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype

Mode = Literal["auto", "map", "read", "copy"]
Progress = Callable[[int, int], None]

_READ_NBYTES = 16 << 20  # per task: enough to keep a disk busy, small enough to share out among threads
_MAX_VIEWS = 1000  # per preadv; Linux takes 1,024 (IOV_MAX)
_MAX_THREADS = 8  # more only queue: memory bandwidth is the limit for cached files, depth 8 suffices for NVMe


class ModeError(LoadplanError, ValueError):
    """The mode asked for is not known, or cannot load every tensor."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One section and the files it reads."""

    head: Head
    section: Section
    rank: int
    files: Sequence[SourceFile]
    mode: Mode = "auto"
    threads: int | None = None

    def run(self, wanted: Collection[int] | None = None, progress: Progress | None = None) -> dict[int, torch.Tensor]:
        """The wanted tensors by number, all of the section's if None.

        Raises:
            FileMismatch: a file is not, or no longer, what the plan expects.
            CastOverflow: a value is too large for the dtype that it is cast to.
            ModeError: the mode cannot load all of them.
        """
        count = len(self.head.tensors)
        chosen = set(range(count)) if wanted is None else set(wanted)
        kinds = [*(tensor.local_type(self.rank) for tensor in self.head.tensors), *self.section.temporaries]
        copies = _needed(list(self.section.copies), chosen, count)
        by_buffer: dict[int, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_buffer[copy.buffer].append(copy)
        mapped = {buffer: found[0] for buffer in chosen if self._maps(found := by_buffer[buffer], kinds[buffer])}
        self._check_mode(chosen - mapped.keys(), kinds)

        buffers = {n: self._view(copy, kinds[n]) for n, copy in mapped.items()}
        buffers |= {n: allocate(kinds[n]) for n in (*sorted(chosen), *sorted(by_buffer)) if n not in buffers}
        work = [copy for copy in copies if copy.buffer not in mapped]
        self._read([copy for copy in work if copy.source >= 0], buffers, progress)
        for copy in work:
            if copy.source < 0:
                addressed, chain = _addressable(copy, self.head.chains)
                source = buffers[-1 - copy.source].reshape(-1).view(torch_dtype(chain[0]))
                _copy_strided(source, copy.src, addressed, chain, buffers, self._name(copy.buffer))
        return {number: buffers[number] for number in chosen}

    def _name(self, buffer: int) -> str:
        count = len(self.head.tensors)
        return self.head.tensors[buffer].name if buffer < count else f"temporary {buffer - count}"

    def _check_mode(self, unmapped: Collection[int], kinds: Sequence[TensorType]) -> None:
        if self.mode not in ("auto", "map", "read", "copy"):
            raise ModeError(f"mode={self.mode!r}: one of auto, map, read, copy")
        left = sorted(number for number in unmapped if kinds[number].numel)
        if self.mode == "map" and left:
            name = self.head.tensors[left[0]].name
            raise ModeError(
                f"mode='map': {len(left)} tensors are not one aligned stretch of a file, the first is {name}; "
                "use mode='auto', or convert the checkpoint"
            )

    def _maps(self, copies: Sequence[Copy], kind: TensorType) -> bool:
        if self.mode not in ("auto", "map") or len(copies) != 1 or kind.dtype.is_packed:
            return False
        (copy,) = copies
        chain = self.head.chains[copy.chain]
        return copy.source >= 0 and not copy.loops and len(chain) == 1 and copy.src % kind.dtype.itemsize == 0

    def _view(self, copy: Copy, kind: TensorType) -> torch.Tensor:
        memory = self.files[copy.source].map()
        flat = torch.frombuffer(memory, dtype=torch_dtype(kind.dtype), count=kind.numel, offset=copy.src)
        return flat.view(kind.shape)

    def _read(self, copies: Sequence[Copy], buffers: dict[int, torch.Tensor], progress: Progress | None) -> None:
        """All copies from files, in tasks for the threads."""
        tasks: list[tuple[int, Callable[[], None]]] = []
        stretches: list[tuple[int, int, int, int]] = []  # file, offset, nbytes, address
        for copy in copies:
            chain = self.head.chains[copy.chain]
            nbytes = copy.numel * chain[0].bits // 8
            if copy.loops or len(chain) > 1 or self.mode == "copy":
                tasks.append((nbytes, lambda copy=copy: self._copy(copy, buffers)))  # type: ignore[misc]
            else:
                stretches.append((copy.source, copy.src, nbytes, buffers[copy.buffer].data_ptr() + copy.dst))
        for batch in _batches(stretches):
            tasks.append((sum(part[2] for part in batch), lambda batch=batch: self._scatter(batch)))  # type: ignore[misc]
        _run_all(tasks, self.threads, progress)

    def _scatter(self, batch: Sequence[tuple[int, int, int, int]]) -> None:
        """One stretch of a file into the buffers that its parts belong to."""
        file = self.files[batch[0][0]]
        views = [
            memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") for _, _, nbytes, address in batch
        ]
        with file.open() as descriptor:
            file.read_into(descriptor, views, batch[0][1])

    def _copy(self, copy: Copy, buffers: dict[int, torch.Tensor]) -> None:
        """One strided or casting copy out of a file."""
        file = self.files[copy.source]
        copy, chain = _addressable(copy, self.head.chains)
        stored = chain[0]
        span = copy.run * stored.itemsize + sum((loop.extent - 1) * loop.src for loop in copy.loops)
        if copy.src % stored.itemsize == 0:
            source = torch.frombuffer(
                file.map(), dtype=torch_dtype(stored), count=span // stored.itemsize, offset=copy.src
            )
        else:  # a misaligned tensor: torch may only address it after a move
            source = torch.empty(span // stored.itemsize, dtype=torch_dtype(stored))
            with file.open() as descriptor:
                view = memoryview((ctypes.c_char * span).from_address(source.data_ptr())).cast("B")
                file.read_into(descriptor, [view], copy.src)
        _copy_strided(source, 0, copy, chain, buffers, self._name(copy.buffer))


def _needed(copies: Sequence[Copy], wanted: Collection[int], tensors: int) -> list[Copy]:
    """The copies that the wanted buffers depend on, in their order."""
    buffers = set(wanted)
    for copy in reversed(copies):  # whoever reads a temporary stands behind whoever writes it
        if copy.buffer in buffers and copy.source < 0:
            buffers.add(-1 - copy.source)
    return [copy for copy in copies if copy.buffer in buffers]


def _addressable(copy: Copy, chains: Sequence[tuple[DType, ...]]) -> tuple[Copy, tuple[DType, ...]]:
    """The copy and its chain in elements that torch can address, and moves as they are.

    Packed elements move as whole bytes; booleans too, of which torch would make 0 or 1.
    """
    chain = chains[copy.chain]
    if not chain[0].is_packed and chain[0] is not DType.BOOL:
        return copy, chain
    return copy._replace(run=copy.run * chain[0].bits // 8), (DType.U8,)


def _copy_strided(
    source: torch.Tensor,
    src: int,
    copy: Copy,
    chain: tuple[DType, ...],
    buffers: dict[int, torch.Tensor],
    name: str,
) -> None:
    """Copy from byte `src` of the flat `source`, casting as the chain says; `name` is the buffer's, for messages."""
    stored, final = chain[0], chain[-1]
    sizes = [*(loop.extent for loop in copy.loops), copy.run]
    taken = source.as_strided(sizes, [*(loop.src // stored.itemsize for loop in copy.loops), 1], src // stored.itemsize)
    for dtype in chain[1:-1]:
        before, taken = taken, taken.to(torch_dtype(dtype))
        refuse_overflow(before, taken, name)
    place = buffers[copy.buffer].reshape(-1).view(torch_dtype(final))
    steps = [*(loop.dst // final.itemsize for loop in copy.loops), 1]
    written = place.as_strided(sizes, steps, copy.dst // final.itemsize)
    written.copy_(taken)
    if len(chain) > 1:
        refuse_overflow(taken, written, name)


def _batches(
    stretches: Sequence[tuple[int, int, int, int]],
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Neighbours in a file together, in tasks of about `_READ_NBYTES`."""
    batch: list[tuple[int, int, int, int]] = []
    held = 0
    for file, offset, nbytes, address in stretches:
        while nbytes:
            last = batch[-1] if batch else None
            follows = last is not None and last[0] == file and last[1] + last[2] == offset
            if batch and (not follows or held >= _READ_NBYTES or len(batch) == _MAX_VIEWS):
                yield batch
                batch, held = [], 0
            part = min(nbytes, _READ_NBYTES - held)
            batch.append((file, offset, part, address))
            offset, nbytes, address, held = offset + part, nbytes - part, address + part, held + part
    if batch:
        yield batch


def _run_all(tasks: Sequence[tuple[int, Callable[[], None]]], threads: int | None, progress: Progress | None) -> None:
    """Run the tasks on a bounded number of threads; the first error stops what has not begun."""
    total = sum(nbytes for nbytes, _ in tasks)
    done = 0
    count = min(threads or min(os.cpu_count() or 1, _MAX_THREADS), len(tasks))
    if count <= 1:
        for nbytes, task in tasks:
            task()
            done += nbytes
            if progress is not None:
                progress(done, total)
        return
    pool = ThreadPoolExecutor(count, thread_name_prefix="loadplan")
    try:
        sizes = {pool.submit(task): nbytes for nbytes, task in tasks}
        pending = set(sizes)
        while pending:
            finished, pending = wait(pending, return_when=FIRST_EXCEPTION if progress is None else "FIRST_COMPLETED")
            for future in finished:
                future.result()
                done += sizes[future]
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
