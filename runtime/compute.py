"""Computes run tile by tile: some rows of the inputs are brought in, the same rows of the outputs made of them.

An input that nothing else reads never is in memory whole, unless it lies in one stretch of a file, which is mapped and
costs no memory of its own. So a compute takes its outputs and `STAGING_NBYTES`, however large its inputs are; one row is
the least. A kernel gives the same bits for any tile (`loadplan.runtime.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from loadplan.runtime.dtype import DType
from loadplan.runtime.kernels import Rows, find_kernel, parse_options
from loadplan.runtime.memory import STAGING_NBYTES, allocate
from loadplan.runtime.plan import Compute, Copy
from loadplan.runtime.tensor_type import TensorType

Fill = Callable[[Sequence[Copy], dict[int, torch.Tensor]], None]
"""Runs copies into buffers, by number: of the tile for what they write, whole for what they read."""


def run_compute(
    compute: Compute,
    kinds: Sequence[TensorType],
    buffers: Mapping[int, torch.Tensor],
    sources: Mapping[int, Sequence[Copy]],
    chains: Sequence[tuple[DType, ...]],
    fill: Fill,
    names: Sequence[str],
) -> None:
    """Make the outputs of `compute`, which are in `buffers`.

    Args:
        compute: of a proved section.
        kinds: types of all buffers of the section.
        buffers: what is there whole: the outputs, all inputs but the staged ones, and what the copies of those read.
        sources: for each input that is not in `buffers`, the copies that make it.
        chains: the dtype chains of the plan.
        fill: runs copies.
        names: of the outputs, for messages.

    Raises:
        CastOverflow: a value is too large for an output's dtype.
        And what `fill` raises.
    """
    kernel, options = find_kernel(compute.kernel), parse_options(compute.options)
    types = [kinds[number] for number in compute.inputs]
    rows = next(iter(kinds[compute.outputs[0]].shape), 1)  # of all outputs alike
    inputs_nbytes = sum(kinds[number].nbytes for number in sources)
    row_nbytes = -(-inputs_nbytes // max(rows, 1)) + kernel.row_nbytes(types, options)
    step = max(STAGING_NBYTES // 2 // max(row_nbytes, 1), 1)  # the allocator may hold on to the tile before
    for low in range(0, rows, step):
        high = min(low + step, rows)
        tiles = [
            _rows_of(buffers[number], pulled)
            if number in buffers
            else _stage(number, kinds[number], pulled, sources[number], chains, buffers, fill)
            for number, pulled in zip(compute.inputs, kernel.pull(low, high, types, options), strict=True)
        ]
        outputs = [_rows_of(buffers[number], (low, high)) for number in compute.outputs]
        kernel.run(tiles, outputs, options, names)
        del tiles  # before the next ones come


def _rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor[rows[0] : rows[1]] if tensor.dim() else tensor


def _stage(
    number: int,
    kind: TensorType,
    rows: Rows,
    copies: Sequence[Copy],
    chains: Sequence[tuple[DType, ...]],
    buffers: Mapping[int, torch.Tensor],
    fill: Fill,
) -> torch.Tensor:
    """Some rows of a temporary, and nothing else of it."""
    first, last = rows if kind.shape else (0, 1)
    row_nbytes = TensorType(kind.shape[1:], kind.dtype).nbytes
    low, high = first * row_nbytes, last * row_nbytes
    tile = allocate(TensorType((last - first, *kind.shape[1:]) if kind.shape else (), kind.dtype))
    parts = [part for copy in copies for part in clip(copy, chains[copy.chain], low, high)]
    fill(parts, {**buffers, number: tile})
    return tile


def clip(copy: Copy, chain: tuple[DType, ...], low: int, high: int) -> Iterator[Copy]:
    """The parts of `copy` that write bytes `low` to `high` of its buffer, into a buffer that begins at `low`."""
    loops = tuple(sorted(copy.loops, key=lambda loop: -loop.dst))
    yield from _clip(copy._replace(loops=loops), chain, low, high)


def _clip(copy: Copy, chain: tuple[DType, ...], low: int, high: int) -> Iterator[Copy]:
    stored, final = chain[0].itemsize, chain[-1].itemsize
    if not copy.loops:
        start, stop = max(copy.dst, low), min(copy.dst + copy.run * final, high)
        if start < stop:
            src = copy.src + (start - copy.dst) // final * stored
            yield copy._replace(src=src, dst=start - low, run=(stop - start) // final)
        return
    outer, *others = copy.loops
    inner = tuple(others)
    reach = sum((loop.extent - 1) * loop.dst for loop in inner) + copy.run * final  # of one turn of the outermost loop
    begin = max((low - reach - copy.dst) // outer.dst + 1, 0)  # turns begin to end meet the bytes,
    end = min(-(-(high - copy.dst) // outer.dst), outer.extent)
    first = min(max(-(-(low - copy.dst) // outer.dst), begin), end)  # first to last lie inside, and stay one copy
    last = min(max((high - reach - copy.dst) // outer.dst + 1, first), end)
    for turn in (*range(begin, first), *range(last, end)):
        start = copy.dst + turn * outer.dst
        yield from _clip(copy._replace(src=copy.src + turn * outer.src, dst=start, loops=inner), chain, low, high)
    if last > first:
        kept = (outer._replace(extent=last - first),) if last - first > 1 else ()
        moved = copy._replace(src=copy.src + first * outer.src, dst=copy.dst + first * outer.dst - low)
        yield moved._replace(loops=(*kept, *inner))
