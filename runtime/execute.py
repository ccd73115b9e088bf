"""The execution of a section: bytes of files into buffers, nothing in between where nothing is needed.

For each buffer the cheapest way that is right, on the file system its files lie on:

    map      the buffer is one aligned stretch of a file: a view of the mapped file
    compose  it is several large ones that lie alike on their pages: these pages, mapped side by side
    read     stretches are read straight into the buffer, neighbours in a file with many destinations in one `preadv`
    copy     what steps or casts: from the mapped file or through staging, element by element, in torch

Files on a server are read in large pieces and not mapped: each fault would wait for it, and a mapped file that goes away
ends the process. Mapped files that are not in the page cache are read into it on the way.

Another back end than `preadv` (`loadplan.runtime.readers`) takes over all reading; then nothing is mapped.

Reads and copies are tasks for a bounded number of threads, cut small enough to keep within the staging budget. Copies
from temporaries and computes follow, in the order in which temporaries are complete (`loadplan.runtime.order`). A cast
that would make a finite value infinite is refused. An error or an interrupt stops the rest, waits for what is running,
and leaves no thread and no open file.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from errno import ENOMEM
from functools import partial
from typing import Literal, get_args

import torch

from loadplan.cache.error import LoadplanError
from loadplan.runtime.compose import MAX_MAPPINGS, MIN_NBYTES, compose, joined, shift_of
from loadplan.runtime.compute import run_compute
from loadplan.runtime.copy_strided import addressable, copy_from_map, copy_staged, copy_strided
from loadplan.runtime.dtype import DType
from loadplan.runtime.loading import Loading, Progress, Task
from loadplan.runtime.memory import STAGING_NBYTES, allocate_all, views
from loadplan.runtime.order import needed, staged, steps
from loadplan.runtime.pages import lock, populate
from loadplan.runtime.plan import Compute, Copy, Head, Section
from loadplan.runtime.readers import Backend, Batch, Reader, find_reader
from loadplan.runtime.schedule import Schedule, Stretch, schedule, tiles
from loadplan.runtime.source_files import ReadError, SourceFile
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.to_device import Stager
from loadplan.runtime.torch_types import torch_dtype

logger = logging.getLogger(__name__)

Mode = Literal["auto", "map", "read", "copy"]
Residency = Literal["lazy", "read", "lock"]

_READ_NBYTES = 16 << 20  # per task: enough to keep a disk busy, small enough to share out among threads
_MAX_VIEWS = 1000  # per preadv; Linux takes 1,024 (IOV_MAX)
_MAX_GROUP = 256  # reads in one task
_MAX_THREADS = 8  # more only queue: memory bandwidth is the limit for cached files, depth 8 suffices for NVMe
_ORDER_NBYTES = 64 << 20  # tensors that are needed together are read in file order, up to so many bytes


class ModeError(LoadplanError, ValueError):
    """The mode or back end asked for is not known, or cannot load every tensor."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One section and the files it reads."""

    head: Head
    section: Section
    rank: int
    files: Sequence[SourceFile]
    mode: Mode = "auto"
    threads: int | None = None
    residency: Residency = "lazy"
    device: torch.device | None = None  # None: memory of this host, without a detour; else through pinned staging
    backend: Backend = "preadv"

    def run(self, wanted: Collection[int] | None = None, progress: Progress | None = None) -> dict[int, torch.Tensor]:
        """The wanted tensors by number, all of the section's if None.

        Raises:
            FileMismatch: a file is not, or no longer, what the plan expects.
            CastOverflow: a value is too large for the dtype that it is cast to.
            ModeError: the mode cannot load all of them.
            BackendError: the library of the back end is not installed.
            MemoryError: they do not fit, or may not be locked.
        """
        tensors = self._start(wanted, None, in_background=False).result(progress)
        if self.residency == "lock":
            for tensor in tensors.values():
                lock(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return tensors

    def start(self, order: Sequence[int] | None = None) -> Loading:
        """Begin to load the tensors, all if None, in this order as far as reading allows. Raises as `run` does."""
        return self._start(order, order, in_background=True)

    def _start(self, wanted: Collection[int] | None, order: Sequence[int] | None, *, in_background: bool) -> Loading:
        self._check_mode()
        reader = find_reader(self.backend)
        section = self.section
        buffers_needed = None if wanted is None else needed(section, wanted)
        computes = [c for c in section.computes if buffers_needed is None or buffers_needed.intersection(c.outputs)]
        found = schedule(section.copies, self.head.chains, buffers_needed, expand=self.mode != "copy")
        kinds = [*(tensor.local_type(self.rank) for tensor in self.head.tensors), *section.temporaries]
        chosen = range(len(self.head.tensors)) if wanted is None else sorted(set(wanted))
        ranks = {number: at for at, number in enumerate(order or ())}
        used = found.files
        threads = self.threads or self._choose_threads(used)
        stager = None if self.device is None else Stager(self.device, threads, reader)
        made = {output for compute in computes for output in compute.outputs}
        if stager is None:
            tiled = staged(section.copies, computes)
            buffers, tasks = self._host_tasks(found, kinds, [*chosen, *sorted(made - {*chosen})], ranks, tiled, reader)
        else:  # what computes read is on the device whole
            buffers, tasks = self._device_tasks(found, kinds, [*chosen, *sorted(made - {*chosen})], stager)
        if ranks:
            tasks.sort(key=lambda task: min(ranks.get(number, len(ranks)) for number in task.buffers))
        last = partial(self._finish, found.later, computes, kinds, buffers, stager, used, reader)
        late = {*made, *(copy.buffer for copy in found.later)}
        if not in_background and (threads == 1 or len(tasks) <= 1):
            threads = 0
        tensors = {number: buffers[number] for number in chosen}
        return Loading(tensors, tasks, threads, last, late, None if stager is None else stager.join)

    def _host_tasks(
        self,
        found: Schedule,
        kinds: Sequence[TensorType],
        chosen: Sequence[int],
        ranks: Mapping[int, int],
        tiled: Collection[int],
        reader: Reader,
    ) -> tuple[dict[int, torch.Tensor], list[Task]]:
        """Buffers in this host's memory, and what fills them; those `tiled` are mapped, or left to who reads them."""
        buffers: dict[int, torch.Tensor] = {}
        mapped = self._map(found, kinds, buffers, tiled)
        composed, seams = self._compose(found, kinds, buffers)
        found.drop({number for number in tiled if number not in mapped})
        self._check_mapped((number for number in chosen if number not in buffers), kinds)
        fresh = {number: kinds[number] for number in self._written(found, chosen) if number not in buffers}
        buffers |= allocate_all(fresh)
        apart = [s for number, s in found.whole.items() if number not in mapped]
        apart += [s for number, parts in found.parts.items() if number not in composed for s in parts]
        logger.info(
            "rank %d: %d tensors mapped, %d composed of mapped pages, %d read (%d bytes) by %s, %d strided copies",
            *(self.rank, len(mapped), len(composed), len(fresh), sum(s.nbytes for s in apart), self.backend),
            len(found.strided) + len(found.later),
        )
        places = [*((s, buffers[s.buffer].data_ptr() + s.dst) for s in apart), *seams]
        tasks = [*self._read_tasks(places, kinds, ranks, reader), *self._copy_tasks(found.strided, buffers, reader)]
        return buffers, [*tasks, *self._page_tasks(mapped | composed, buffers)]

    def _device_tasks(
        self, found: Schedule, kinds: Sequence[TensorType], chosen: Sequence[int], stager: Stager
    ) -> tuple[dict[int, torch.Tensor], list[Task]]:
        """Buffers on a device, and what fills them."""
        self._check_mapped(iter(chosen), kinds)
        buffers = {number: stager.allocate(kinds[number]) for number in self._written(found, chosen)}
        tasks: list[Task] = []
        stretches = [*found.whole.values(), *(s for parts in found.parts.values() for s in parts)]
        moved = [(Copy(s.file, s.buffer, s.src, s.dst, s.nbytes, -1, ()), (DType.U8,)) for s in sorted(stretches)]
        for copy, chain in [*moved, *(addressable(copy, self.head.chains) for copy in found.strided)]:
            file, buffer, name = self.files[copy.source], buffers[copy.buffer], self._name(copy.buffer)
            for tile in tiles(copy, chain, stager.stage_nbytes):
                nbytes = tile.numel * chain[0].itemsize
                tasks.append(Task(nbytes, (copy.buffer,), partial(stager.copy, file, tile, chain, buffer, name)))
        logger.info(
            "rank %d: %d tensors (%d bytes) read by %s and sent to %s in %d copies",
            *(self.rank, len(chosen), sum(task.nbytes for task in tasks), self.backend, stager.device, len(tasks)),
        )
        return buffers, tasks

    def _choose_threads(self, used: Collection[int]) -> int:
        """As many as there are cores, for bytes in memory; as many as help a disk or server to answer, for others."""
        if all(not self.files[number].is_remote and self.files[number].is_resident for number in used):
            return min(os.cpu_count() or 1, _MAX_THREADS)
        return _MAX_THREADS

    def _written(self, found: Schedule, chosen: Sequence[int]) -> list[int]:
        """The numbers of the wanted tensors, and of the temporaries that they are made of."""
        written = sorted({*found.whole, *found.parts, *found.mixed})
        return [*chosen, *(number for number in written if number >= len(self.head.tensors))]

    # -- buffers without a copy ------------------------------------------------------------------------------------

    def _map(
        self, found: Schedule, kinds: Sequence[TensorType], buffers: dict[int, torch.Tensor], tiled: Collection[int]
    ) -> dict[int, list[Stretch]]:
        """Add views for the tensors, and those `tiled`, that are one stretch of a file; returns the stretch of each."""
        places: dict[int, list[tuple[int, TensorType, int]]] = {number: [] for number in found.files}
        maps = {number: self._may_map(self.files[number]) for number in places}
        first_temporary = len(self.head.tensors)
        mapped: dict[int, list[Stretch]] = {}
        bits = {id(kind): kind.dtype.bits for kind in kinds}
        for number, stretch in found.whole.items():
            kind = kinds[number]
            step = bits[id(kind)]
            if (
                (number < first_temporary or number in tiled)
                and maps[stretch.file]
                and not step % 8
                and not stretch.src * 8 % step
            ):
                places[stretch.file].append((number, kind, stretch.src))
                mapped[number] = [stretch]
        for number, wanted in places.items():
            if wanted:
                buffers.update(views(self.files[number].map(), wanted))
        return mapped

    def _compose(
        self, found: Schedule, kinds: Sequence[TensorType], buffers: dict[int, torch.Tensor]
    ) -> tuple[dict[int, list[Stretch]], list[tuple[Stretch, int]]]:
        """Add the buffers that can be mapped in parts; returns the stretches of each, and what to read where."""
        composed: dict[int, list[Stretch]] = {}
        seams: list[tuple[Stretch, int]] = []
        mixed, mappings = found.mixed, 0
        for number, parts in found.parts.items():
            kind = kinds[number]
            if number >= len(self.head.tensors) or number in mixed or kind.dtype.is_packed:
                continue
            if kind.nbytes < MIN_NBYTES * len(parts):
                continue
            stretches = joined(parts)
            files = tuple({stretch.file for stretch in stretches})
            shift = (
                shift_of(stretches, kind.dtype.itemsize) if all(self._may_map(self.files[f]) for f in files) else None
            )
            if shift is None or mappings + 2 * len(stretches) > MAX_MAPPINGS:
                continue
            mappings += 2 * len(stretches)
            try:
                memory, left = compose(stretches, shift, lambda file: self.files[file].open())
            except OSError as error:
                if error.errno != ENOMEM or isinstance(error, LoadplanError):
                    raise
                logger.warning("the process may have no more mappings (vm.max_map_count): other stacks are read")
                break
            buffers.update(views(memory, [(number, kind, 0)]))
            composed[number] = stretches
            seams += left
        return composed, seams

    def _may_map(self, file: SourceFile) -> bool:
        return self.mode == "map" or (self.mode == "auto" and self.backend == "preadv" and not file.is_remote)

    def _check_mode(self) -> None:
        if self.mode not in ("auto", "map", "read", "copy"):
            raise ModeError(f"mode={self.mode!r}: one of auto, map, read, copy")
        if self.residency not in ("lazy", "read", "lock"):
            raise ModeError(f"residency={self.residency!r}: one of lazy, read, lock")
        if self.backend not in get_args(Backend):
            raise ModeError(f"backend={self.backend!r}: one of {', '.join(get_args(Backend))}")
        if self.backend != "preadv" and self.mode in ("map", "copy"):
            raise ModeError(
                f"mode={self.mode!r}, backend={self.backend!r}: this mode maps files, a back end reads them; use mode='read'"
            )
        if self.device is not None and (self.mode == "map" or self.residency != "lazy"):
            raise ModeError(
                f"mode={self.mode!r}, residency={self.residency!r}: files are mapped in the memory of this host, not on "
                f"{self.device}; leave them as they are by default, or load to the CPU"
            )

    def _check_mapped(self, unmapped: Iterator[int], kinds: Sequence[TensorType]) -> None:
        left = sorted(number for number in unmapped if kinds[number].numel) if self.mode == "map" else []
        if left:
            name = self._name(left[0])
            raise ModeError(
                f"mode='map': {len(left)} tensors are not made of aligned stretches of files, the first is {name}; "
                "use mode='auto', or convert the checkpoint"
            )

    # -- tasks -----------------------------------------------------------------------------------------------------

    def _read_tasks(
        self, places: list[tuple[Stretch, int]], kinds: Sequence[TensorType], ranks: Mapping[int, int], reader: Reader
    ) -> Iterator[Task]:
        """Reads in file order; with `ranks`, in file order among tensors that are needed together."""
        bucket: dict[int, int] = {}
        held = 0
        for number in ranks:
            bucket[number] = held // _ORDER_NBYTES
            held += kinds[number].nbytes
        end = held // _ORDER_NBYTES + 1
        places.sort(key=lambda item: (bucket.get(item[0].buffer, end), item[0].file, item[0].src))
        for group in _groups(_batches(places), _READ_NBYTES * reader.pieces):
            parts = [part for batch in group for part, _ in batch]
            buffers = tuple({part.buffer for part in parts})
            yield Task(sum(part.nbytes for part in parts), buffers, partial(self._scatter, group, reader))

    def _scatter(self, group: Sequence[Sequence[tuple[Stretch, int]]], reader: Reader) -> None:
        """Stretches of one file, each into the buffers that its parts belong to."""
        file = self.files[group[0][0][0].file]
        with file.open() as descriptor:
            reader.read(file, descriptor, (_placed(batch) for batch in group))

    def _copy_tasks(self, copies: Sequence[Copy], buffers: dict[int, torch.Tensor], reader: Reader) -> Iterator[Task]:
        """Copies out of files, in tiles."""
        share = STAGING_NBYTES // _MAX_THREADS - reader.staging_nbytes
        limit = min(_READ_NBYTES, share // 2)  # what is read, and what a cast makes of it
        by_reading = partial(copy_staged, reader)
        for whole in copies:
            file, buffer, name = self.files[whole.source], buffers[whole.buffer], self._name(whole.buffer)
            copy, chain = addressable(whole, self.head.chains)
            is_read = self.backend != "preadv" or (file.is_remote and self.mode in ("auto", "read"))
            way = by_reading if is_read else copy_from_map
            for tile in tiles(copy, chain, limit):
                nbytes = tile.numel * chain[0].itemsize
                yield Task(nbytes, (whole.buffer,), partial(way, file, tile, chain, buffer, name))

    def _page_tasks(self, mapped: Mapping[int, Sequence[Stretch]], buffers: dict[int, torch.Tensor]) -> Iterator[Task]:
        """Reads of mapped pages: of files that are not in the page cache, and of all if so asked."""
        used = {stretch.file for stretches in mapped.values() for stretch in stretches}
        wanted = {number: self.residency != "lazy" or not self.files[number].is_resident for number in used}
        for number, stretches in sorted(mapped.items()):
            for stretch in stretches:
                address = buffers[number].data_ptr() + stretch.dst
                for low in range(0, stretch.nbytes if wanted[stretch.file] else 0, _READ_NBYTES):
                    part = min(_READ_NBYTES, stretch.nbytes - low)
                    yield Task(part, (number,), partial(self._read_pages, stretch, low, address + low, part))

    def _read_pages(self, stretch: Stretch, low: int, address: int, nbytes: int) -> None:
        try:
            populate(address, nbytes)
        except OSError as error:
            raise ReadError(self.files[stretch.file].name, stretch.src + low, str(error.strerror)) from error

    def _finish(
        self,
        copies: Sequence[Copy],
        computes: Sequence[Compute],
        kinds: Sequence[TensorType],
        buffers: dict[int, torch.Tensor],
        stager: Stager | None,
        used: Sequence[int],
        reader: Reader,
    ) -> None:
        """What reads temporaries, when all else is done; and a last look at the files: none has changed meanwhile."""
        with nullcontext() if stager is None else stager.queued():
            for step in steps(copies, computes, len(self.head.tensors)):
                if isinstance(step, Copy):
                    self._copy_again(step, buffers)
                    continue
                absent = {number for number in step.inputs if number not in buffers}
                sources: dict[int, list[Copy]] = {number: [] for number in absent}
                for row, buffer in enumerate(self.section.copies.buffer if absent else ()):
                    if buffer in absent:
                        sources[buffer].append(self.section.copies[row])
                names = [self._name(output) for output in step.outputs]
                run_compute(step, kinds, buffers, sources, self.head.chains, partial(self._fill, reader), names)
        for number in used:
            self.files[number].check_unchanged()

    def _fill(self, reader: Reader, copies: Sequence[Copy], into: dict[int, torch.Tensor]) -> None:
        """The copies, in this thread."""
        for copy in copies:
            if copy.source < 0:
                self._copy_again(copy, into)
            else:
                for task in self._copy_tasks([copy], into, reader):
                    task.run()

    def _copy_again(self, copy: Copy, buffers: dict[int, torch.Tensor]) -> None:
        """One copy out of a temporary."""
        addressed, chain = addressable(copy, self.head.chains)
        source = buffers[-1 - copy.source].reshape(-1).view(torch_dtype(chain[0]))
        for tile in tiles(addressed, chain, STAGING_NBYTES // 2):
            copy_strided(source, tile.src, tile, chain, buffers[copy.buffer], self._name(copy.buffer))

    def _name(self, buffer: int) -> str:
        count = len(self.head.tensors)
        return self.head.tensors[buffer].name if buffer < count else f"temporary {buffer - count}"


def _batches(places: Sequence[tuple[Stretch, int]]) -> Iterator[list[tuple[Stretch, int]]]:
    """Neighbours in a file together, in tasks of about `_READ_NBYTES`."""
    batch: list[tuple[Stretch, int]] = []
    held, end = 0, (-1, -1)
    for stretch, address in places:
        while True:
            follows = end == (stretch.file, stretch.src)
            if batch and (not follows or held >= _READ_NBYTES or len(batch) == _MAX_VIEWS):
                yield batch
                batch, held = [], 0
            nbytes = min(stretch.nbytes, _READ_NBYTES - held)
            batch.append((stretch if nbytes == stretch.nbytes else stretch._replace(nbytes=nbytes), address))
            held, end = held + nbytes, (stretch.file, stretch.src + nbytes)
            if nbytes == stretch.nbytes:
                break
            stretch = stretch._replace(src=stretch.src + nbytes, nbytes=stretch.nbytes - nbytes)
            address += nbytes
    if batch:
        yield batch


def _placed(batch: Sequence[tuple[Stretch, int]]) -> Batch:
    """Where in the file the batch begins; address and nbytes of each of its parts."""
    places = array("Q")
    for part, address in batch:
        places.append(address)
        places.append(part.nbytes)
    return batch[0][0].src, places


def _groups(batches: Iterator[list[tuple[Stretch, int]]], limit: int) -> Iterator[list[list[tuple[Stretch, int]]]]:
    """Batches of one file together, up to `limit` bytes, so that a task is worth its way through the queue."""
    group: list[list[tuple[Stretch, int]]] = []
    held = 0
    for batch in batches:
        nbytes = sum(part.nbytes for part, _ in batch)
        if group and (group[0][0][0].file != batch[0][0].file or held + nbytes > limit or len(group) == _MAX_GROUP):
            yield group
            group, held = [], 0
        group.append(batch)
        held += nbytes
    if group:
        yield group
