"""In which order the buffers of a section are made, and which of them need not be there whole.

Whatever is made of a temporary has a higher number or is a tensor (`check_plan` proves it), so temporaries are complete
in the order of their numbers: what a compute makes when its turn comes, what copies make when those of the lower
numbers have run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from loadplan.runtime.plan import Compute, Copy, CopyColumns, Section


def needed(section: Section, wanted: Collection[int]) -> set[int]:
    """The `wanted` buffers, and the temporaries that they are made of."""
    made_of: dict[int, set[int]] = defaultdict(set)
    for source, buffer in _from_temporaries(section.copies):
        made_of[buffer].add(source)
    for compute in section.computes:
        for output in compute.outputs:
            made_of[output].update(compute.inputs)
    found, left = set(wanted), list(wanted)
    while left:
        new = made_of.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return found


def staged(copies: CopyColumns, computes: Iterable[Compute]) -> frozenset[int]:
    """Temporaries that copies make and only computes read: a few of their rows are enough at a time."""
    inputs = {number for compute in computes for number in compute.inputs}
    inputs -= {number for compute in computes for number in compute.outputs}
    return frozenset(inputs - {source for source, _ in _from_temporaries(copies)}) if inputs else frozenset()


def _from_temporaries(copies: CopyColumns) -> Iterator[tuple[int, int]]:
    """The temporary and the buffer of each copy that reads a temporary; these copies stand last."""
    for row in range(len(copies) - 1, -1, -1):
        if copies.source[row] >= 0:
            return
        yield -1 - copies.source[row], copies.buffer[row]


def steps(copies: Sequence[Copy], computes: Iterable[Compute], first_temporary: int) -> Iterator[Copy | Compute]:
    """Computes, and the copies that read temporaries, in an order in which everything is complete when it is read."""
    makers = {output: compute for compute in computes for output in compute.outputs if output >= first_temporary}
    readers: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.source < 0:
            readers[-1 - copy.source].append(copy)
    for number in sorted({*makers, *readers}):
        compute = makers.get(number)
        if compute is not None and number == min(o for o in compute.outputs if o >= first_temporary):
            yield compute
        yield from readers.get(number, ())
    yield from (compute for compute in computes if max(compute.outputs) < first_temporary)
