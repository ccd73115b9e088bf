"""The proof of a plan: inside its files, every element of every buffer written exactly once, ranks tile each tensor.

Run on each compiled plan as the last stage of the compiler, and again on each section that is read from a plan file.
It looks at nothing but the plan itself, so a fault of the compiler does not hide in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from math import prod
from typing import NamedTuple

from loadplan.runtime.kernels import KernelError, find_kernel, parse_options
from loadplan.runtime.plan import Compute, Copy, Head, Origin, PlanTensor, Section
from loadplan.runtime.tensor_type import TensorType

_MAX_RUNS = 2_000_000  # that the buffers of a section may be taken apart into before they are refused as unprovable
_RUNS_PER_COPY = 256  # and so many more for each copy, so that time stays in proportion to the size of the plan
_MAX_LOOPS = 62  # of a copy: each has two turns at least, and no buffer has 2**63 elements


class Area(NamedTuple):
    """A set of elements of a buffer: `run` neighbours at `start`, once per turn of loops `(extent, step)`."""

    start: int
    run: int
    loops: tuple[tuple[int, int], ...]  # largest step first


def check_head(head: Head) -> Iterator[str]:
    """What is wrong with the head: names, ties, chains, and whether the ranks tile every tensor."""
    names = [tensor.name for tensor in head.tensors]
    known = set(names)
    if names != sorted(known):
        yield "tensor names are not in order, or not unique"
    for other, name in head.aliases:
        if name not in known or other in known:
            yield f"alias {other!r} of {name!r} does not name a tensor, or hides one"
    if len({other for other, _ in head.aliases}) != len(head.aliases):
        yield "an alias is given twice"
    for group in head.equal_ties:
        if len(group) < 2 or not known.issuperset(group):
            yield f"tie {group} does not name tensors"
    if len({constant.name for constant in head.constants} - known) != len(head.constants):
        yield "a constant is given twice, or hides a tensor"
    for constant in head.constants:
        if len(constant.data) != constant.type.nbytes:
            yield f"constant {constant.name!r} has {len(constant.data)} bytes, {constant.type} has {constant.type.nbytes}"
    for chain in head.chains:
        if not chain or (len(chain) > 1 and not all(dtype.is_float for dtype in chain)):
            yield f"dtype chain {chain} casts what cannot be cast by value"
    if len({file.name for file in head.files}) != len(head.files):
        yield "a file is named twice"
    for file in head.files:  # which are read at each load: no byte of them twice
        ends = [0, *(offset + nbytes for offset, nbytes in file.guards)]
        if any(offset < end for (offset, _), end in zip(file.guards, ends, strict=False)):
            yield f"guards of file {file.name!r} are not in order, or overlap"
    paths = [fused.path for fused in head.fusions]
    if paths != sorted(set(paths)):
        yield "paths of fused modules are not in order, or not unique"
    for tensor in head.tensors:
        if tensor.shard_dim >= 0 or tensor.intervals:
            yield from _tiling(tensor, head.world_size)


def _tiling(tensor: PlanTensor, world_size: int) -> Iterator[str]:
    if tensor.shard_dim < 0:
        if tensor.intervals:
            yield f"{tensor.name}: intervals without a dim"
        return
    if len(tensor.intervals) != world_size:
        yield f"{tensor.name}: intervals for {len(tensor.intervals)} of {world_size} ranks"
        return
    at = 0
    for low, high in sorted(span for spans in tensor.intervals for span in spans if span[0] != span[1]):
        if low != at or high < low:
            yield f"{tensor.name}: ranks leave a gap or overlap at {min(low, at)} on dim {tensor.shard_dim}"
            return
        at = high
    if at != tensor.type.shape[tensor.shard_dim]:
        yield f"{tensor.name}: ranks hold {at} of {tensor.type.shape[tensor.shard_dim]} on dim {tensor.shard_dim}"
    if any(low > high for spans in tensor.intervals for low, high in spans):
        yield f"{tensor.name}: an interval ends before it begins"


def check_origin(head: Head, origin: Origin) -> Iterator[str]:
    """What is wrong with the origin: places outside of files, headers that are not those of the files."""
    if len(origin.headers) != len(head.files):
        yield f"{len(origin.headers)} headers for {len(head.files)} files"
        return
    for file, header in zip(head.files, origin.headers, strict=True):
        if header and sha256(header).hexdigest() != file.header_digest:
            yield f"the header of {file.name!r} is not the one that the plan was compiled for"
    names = [source.name for source in origin.sources]
    if names != sorted(set(names)):
        yield "source names are not in order, or not unique"
    for source in origin.sources:
        if source.file >= len(head.files) or source.offset + source.type.nbytes > head.files[source.file].size:
            yield f"source {source.name!r} does not lie in a file"
            return
    if origin.traces and len(origin.traces) != len(head.tensors):
        yield f"{len(origin.traces)} traces for {len(head.tensors)} tensors"
        return
    for tensor, trace in zip(head.tensors, origin.traces, strict=False):
        for number, areas in trace.sources:
            if number >= len(origin.sources):
                yield f"the trace of {tensor.name!r} has source {number} of {len(origin.sources)}"
                return
            size = head.files[origin.sources[number].file].size
            ends = (a.start + a.nbytes + sum((extent - 1) * step for extent, step in a.loops) for a in areas)
            if max(ends, default=0) > size or any(extent < 1 for a in areas for extent, _ in a.loops):
                yield f"the trace of {tensor.name!r} leads out of its file"


def check_section(head: Head, section: Section, rank: int) -> Iterator[str]:
    """What is wrong with the section of `rank`; nothing when it is proved. `check_head` must have passed.

    Most copies move one stretch of a file as it is. These are told by a few comparisons of columns, and the
    rest by the general rules; the tests simulate both.
    """
    kinds = [*(tensor.local_type(rank) for tensor in head.tensors), *section.temporaries]
    first_temporary = len(head.tensors)
    areas: dict[int, list[Area]] = defaultdict(list)
    plain, spans = _plain_copies(head, section, kinds)
    budget = RunBudget(len(section.copies))
    latest = -1  # the last temporary that was read: it must be complete by then
    for row in range(len(section.copies)):
        if latest < 0 and plain[row]:
            continue
        copy = section.copies[row]
        fault = _copy_fault(copy, head, kinds, first_temporary)
        if fault is None and copy.source < 0:
            number = -1 - copy.source
            if number < latest or first_temporary <= copy.buffer <= number:
                fault = "reads a temporary before it is complete"
            latest = max(latest, number)
        elif fault is None and latest >= 0:
            fault = "reads a file after temporaries"
        if fault is not None:
            yield f"copy {row}: {fault}"
            return
        bits = head.chains[copy.chain][-1].bits
        loops = sorted(((loop.extent, loop.dst * 8 // bits) for loop in copy.loops), key=lambda loop: -loop[1])
        areas[copy.buffer].append(Area(copy.dst * 8 // bits, copy.run, tuple(loops)))
    made: set[int] = set()
    for row, compute in enumerate(section.computes):
        fault = _compute_fault(compute, kinds, first_temporary)
        if fault is None and (len({*compute.outputs} - made - areas.keys() - spans.keys()) < len(compute.outputs)):
            fault = "makes a buffer that something else makes"
        if fault is not None:
            yield f"compute {row}: {fault}"
            return
        made.update(compute.outputs)
    for buffer, kind in enumerate(kinds):
        found = spans.get(buffer, [])
        if buffer in made or (buffer not in areas and _lie_end_to_end(found, kind.nbytes)):
            continue
        name = head.tensors[buffer].name if buffer < first_temporary else f"temporary {buffer - first_temporary}"
        bits = kind.dtype.bits
        plain_areas = [Area(dst * 8 // bits, nbytes * 8 // bits, ()) for dst, nbytes in found]
        fault = covers(kind.numel, [*areas.get(buffer, []), *plain_areas], budget)
        if fault is not None:
            yield f"{name}: {fault}"


def _plain_copies(
    head: Head, section: Section, kinds: Sequence[TensorType]
) -> tuple[bytearray, dict[int, list[tuple[int, int]]]]:
    """Which copies move one stretch of a file as it is, and are right by themselves; the general rules tell of others.

    Returns 1 or 0 per copy, and per buffer (first byte, nbytes) of what those with 1 write.
    """
    copies = section.copies
    sizes: dict[int, tuple[int, int, object]] = {}  # id of a type -> nbytes, bits and dtype, computed once
    for kind in kinds:
        if id(kind) not in sizes:
            sizes[id(kind)] = kind.nbytes, kind.dtype.bits, kind.dtype
    buffers = [sizes[id(kind)] for kind in kinds]
    chains = [chain[0] if len(chain) == 1 else None for chain in head.chains]
    files = [file.size for file in head.files]
    firsts = copies.first_loop
    plain = bytearray(len(copies))
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, (source, buffer, src, dst, run, chain) in enumerate(
        zip(copies.source, copies.buffer, copies.src, copies.dst, copies.run, copies.chain, strict=True)
    ):
        if not (
            0 <= source < len(files)
            and 0 <= buffer < len(buffers)
            and 0 <= chain < len(chains)
            and firsts[row] == firsts[row + 1]
        ):
            continue
        size, bits, dtype = buffers[buffer]
        moved = run * bits
        nbytes = moved >> 3
        if (
            run > 0
            and chains[chain] is dtype
            and not (moved % 8 or dst * 8 % bits)
            and 0 <= src <= files[source] - nbytes
            and 0 <= dst <= size - nbytes
        ):
            plain[row] = 1
            spans[buffer].append((dst, nbytes))
    return plain, spans


def _lie_end_to_end(spans: list[tuple[int, int]], nbytes: int) -> bool:
    """Whether the spans (first byte, nbytes) fill `nbytes` bytes, each once. Sorts them."""
    spans.sort()
    at = 0
    for first, length in spans:
        if first != at:
            return False
        at += length
    return at == nbytes


def _copy_fault(copy: Copy, head: Head, kinds: Sequence[TensorType], first_temporary: int) -> str | None:
    """What is wrong with one copy by itself."""
    if not 0 <= copy.buffer < len(kinds) or not 0 <= copy.chain < len(head.chains):
        return f"has no buffer {copy.buffer}, or no dtype chain {copy.chain}"
    stored, final = head.chains[copy.chain][0], head.chains[copy.chain][-1]
    buffer = kinds[copy.buffer]
    if buffer.dtype != final:
        return f"writes {final} into a buffer of {buffer}"
    if copy.src < 0 or copy.dst < 0 or copy.run < 1:
        return "has a negative offset, or nothing to copy"
    if len(copy.loops) > _MAX_LOOPS:
        return f"has {len(copy.loops)} loops, more than any buffer has room for"
    if any(loop.extent < 2 or loop.src < 0 or loop.dst <= 0 for loop in copy.loops):
        return "has a loop that goes nowhere or backwards"
    number = -1 - copy.source
    for dtype, places in (
        (stored, [*([copy.src] if number >= 0 else []), *(loop.src for loop in copy.loops)]),
        (final, [copy.dst, *(loop.dst for loop in copy.loops)]),
    ):
        # Packed elements have no address, so only whole bytes of them move; the others step by whole elements. Where
        # a file begins them is free: safetensors files may hold misaligned data.
        if copy.run * dtype.bits % 8 or any(place * 8 % dtype.bits for place in places):
            return f"does not step by whole elements of {dtype}"
    if copy.source >= len(head.files) or (number >= 0 and not first_temporary <= number < len(kinds)):
        return f"has no source {copy.source}"
    if number >= 0 and kinds[number].dtype != stored:
        return f"reads {stored} from a temporary of {kinds[number]}"
    size = kinds[number].nbytes if number >= 0 else head.files[copy.source].size
    read = copy.src + sum((loop.extent - 1) * loop.src for loop in copy.loops) + copy.run * stored.bits // 8
    if read > size:
        return f"reads up to byte {read} of {size}"
    written = copy.dst + sum((loop.extent - 1) * loop.dst for loop in copy.loops) + copy.run * final.bits // 8
    if written > buffer.nbytes:
        return f"writes up to byte {written} of {buffer.nbytes}"
    return None


def _compute_fault(compute: Compute, kinds: Sequence[TensorType], first_temporary: int) -> str | None:
    """What is wrong with one compute by itself."""
    places = (*compute.inputs, *compute.outputs)
    if not compute.outputs or max(places) >= len(kinds) or any(n < first_temporary for n in compute.inputs):
        return "makes nothing, or reads or makes a buffer that there is not"
    latest = max(compute.inputs, default=-1)
    if any(first_temporary <= number <= latest for number in compute.outputs):
        return "reads a temporary before it is complete"
    if any(kinds[number].dtype.is_packed for number in places):
        return "takes packed elements, which have no rows"
    try:
        made = find_kernel(compute.kernel).infer([kinds[n] for n in compute.inputs], parse_options(compute.options))
    except KernelError as error:
        return str(error)
    wanted = tuple(kinds[number] for number in compute.outputs)
    if made != wanted:
        return f"makes {', '.join(map(str, made))} in place of {', '.join(map(str, wanted))}"
    return None


class RunBudget:
    """How many runs areas may be taken apart into, over all buffers of a section: small files must not take hours."""

    def __init__(self, copies: int = 0) -> None:
        self._left = _MAX_RUNS + _RUNS_PER_COPY * copies

    def takes(self, count: int) -> bool:
        """Whether so many are left; they are spent then."""
        if count > self._left:
            return False
        self._left -= count
        return True


def covers(numel: int, areas: Sequence[Area], budget: RunBudget | None = None) -> str | None:
    """Why `areas` do not write each of `numel` elements exactly once; None if they do.

    The volumes must add up; then one overlap would mean one gap. Areas are told apart where one ends before the next
    begins (experts behind each other); then a loop that all of them share is taken off the outside (columns of a matrix
    put side by side); and so on with what is left. Each step looks at each area once, whatever its size. Only what
    neither step divides is taken apart into runs, which are sorted and laid end to end.
    """
    spent = budget or RunBudget()
    total = sum(_volume(area) for area in areas)
    if total != numel:
        return f"{total} elements are written, it has {numel}"
    todo = [(0, numel, [_fuse(area) for area in areas])]
    while todo:
        low, high, group = todo.pop()
        clusters = _clusters(group)
        ends = [low, *(end for _, end, _ in clusters)]
        if ends[-1] != high or any(
            start != before or sum(map(_volume, members)) != end - start
            for (start, end, members), before in zip(clusters, ends, strict=False)
        ):
            return _overlap(low, group, spent)
        if len(clusters) > 1:
            todo += [cluster for cluster in clusters if len(cluster[2]) > 1 or cluster[2][0].loops]
            continue
        if not group or (len(group) == 1 and not group[0].loops):
            continue
        shared = group[0].loops[0] if group[0].loops else (1, 0)
        if shared[0] * shared[1] == high - low and all(
            area.loops and area.loops[0] == shared and _end(area) <= low + shared[1] for area in group
        ):
            todo.append((low, low + shared[1], [Area(area.start, area.run, area.loops[1:]) for area in group]))
            continue
        fault = _overlap(low, group, spent)
        if fault is not None:
            return fault
    return None


def _clusters(areas: Sequence[Area]) -> list[tuple[int, int, list[Area]]]:
    """The areas in order, those that reach into each other together: (first element, one past the last, areas)."""
    clusters: list[tuple[int, int, list[Area]]] = []
    for area in sorted(areas, key=lambda area: area.start):
        end = _end(area, area.loops)
        if clusters and area.start < clusters[-1][1]:
            start, before, members = clusters[-1]
            members.append(area)
            clusters[-1] = (start, max(before, end), members)
        else:
            clusters.append((area.start, end, [area]))
    return clusters


def _overlap(low: int, areas: Sequence[Area], budget: RunBudget) -> str | None:
    """The first element from `low` on that is not written once, found run by run; None if all are."""
    if not budget.takes(sum(_volume(area) // area.run for area in areas)):
        return f"its copies fall apart into more than {_MAX_RUNS} runs and cannot be proved"
    runs: list[tuple[int, int]] = []
    for area in areas:
        runs.extend((start, area.run) for start in _starts(area.start, area.loops))
    at = low
    for start, run in sorted(runs):
        if start != at:
            return f"element {min(at, start)} is written {'twice' if start < at else 'never'}"
        at = start + run
    return None


def _volume(area: Area) -> int:
    return area.run * prod(extent for extent, _ in area.loops)


def _end(area: Area, loops: tuple[tuple[int, int], ...] | None = None) -> int:
    """One past the last element, of all turns of `loops`; of one turn of the outermost loop if they are not given."""
    turns = area.loops[1:] if loops is None else loops
    return area.start + area.run + sum((extent - 1) * step for extent, step in turns)


def _fuse(area: Area) -> Area:
    """The same elements with loops that lie end to end joined: which ones are written matters, not in which order."""
    loops: list[tuple[int, int]] = []
    run = area.run
    for extent, step in reversed(area.loops):
        if not loops and step == run:
            run *= extent
        elif loops and step == loops[-1][0] * loops[-1][1]:
            loops[-1] = (extent * loops[-1][0], loops[-1][1])
        else:
            loops.append((extent, step))
    return Area(area.start, run, tuple(reversed(loops)))


def _starts(start: int, loops: tuple[tuple[int, int], ...]) -> Iterator[int]:
    if not loops:
        yield start
        return
    extent, step = loops[0]
    for turn in range(extent):
        yield from _starts(start + turn * step, loops[1:])
