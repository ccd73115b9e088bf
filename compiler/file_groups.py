"""Which tensors of a plan share a file when it is converted: few files to open, many files that other plans have too.

A file is a blob of the cache, so two conversions store it once if it holds the same tensors in the same form. So the
groups follow from names, shapes and dtypes of *whole* tensors, never from the plan's number or other files:

- A tensor of 1 MiB or more is alone in its file. The bound grows to a 4,096th of the model, so that no model makes
  more than 4,096 such files (a process may map 65,530, vm.max_map_count).
- Smaller ones lie together by layer (the name up to its first number), vectors apart from matrices: vectors have no
  strided slices, so that their files are the same under every tensor parallel size. A model of less than 1 MiB is not
  split at all.
- A tensor that every rank takes one stretch of (cut along its first dim: column-parallel weights, embeddings, experts) is
  stored whole, once, and each rank maps its own stretch. So tp1, tp2, tp4 and tp8 share it. That is at a finer grain
  than slices, of which a tp2 slice would be two tp4 slices in two files, hence no stretch of memory, or a third copy.
- Other slices (row-parallel weights, packed gates) are strided in the whole tensor and can be mapped only when stored
  as slices: one file a rank. Nothing of them is shared between sizes.
- Beyond 8 ranks all slices are stored apart: ranks then lie on several machines, which should not fetch each other's
  bytes.

Measured on a Llama-like model of 1,263 tensors, for tp1 + tp2 + tp4 + a fine-tune of tp1 with a tenth of the tensors
changed at random, with `python tests/bench/bench_dedup.py` (2 shared cores, warm page cache, best of 9 loads):

    granularity                             bytes stored / sizes of the models   files, load of tp1   rank 0 of tp4
    one file a rank                         1.02                                 1       69 ms        1       177 ms
    one for what all hold, one a rank       1.00                                 1       72 ms        2       102 ms
    one a layer and kind, whole if it can   0.72                                 282    121 ms        422     178 ms
    one a tensor, every slice apart         0.90                                 1,123   87 ms        1,123   151 ms
    one a tensor, whole if it can (chosen)  0.48                                 1,123   65 ms        1,123    81 ms

Times differ by less than the noise of that machine: a file costs 30 to 60 us, and no granularity needs 0.1 s more than
another. So bytes decide. Of them 0.05 are headers of 4,096 bytes beside the bench's small matrices; from 1 MiB on, it is
0.004 at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from loadplan.runtime.plan import Head, PlanTensor
from loadplan.runtime.tensor_type import TensorType

ALONE_NBYTES = 1 << 20
MOST_ALONE = 4096
RANKS_OF_A_MACHINE = 8


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Tensors, by number, that share a file, and in which form."""

    name: str  # of the file
    rank: int | None  # whose slices; None for whole tensors
    numbers: tuple[int, ...]


def group_files(head: Head, alone_nbytes: int = ALONE_NBYTES) -> list[FileGroup]:
    """The files that `head`'s tensors are converted into, whole tensors first, then by rank; each tensor is in one.

    Args:
        head: of a plan.
        alone_nbytes: size from which a tensor has a file of its own.
    """
    total = sum(tensor.type.nbytes for tensor in head.tensors)
    alone = max(alone_nbytes, total // MOST_ALONE)
    whole = [number for number, tensor in enumerate(head.tensors) if is_whole(tensor, head.world_size)]
    apart = sorted(set(range(len(head.tensors))).difference(whole))
    of_whole, of_slices = (
        _split(head, found, alone) if total >= alone_nbytes else [tuple(found)] for found in (whole, apart)
    )
    groups = _named("model", None, of_whole)
    digits = len(str(head.world_size - 1))
    for rank in range(head.world_size):
        groups += _named(f"rank-{rank:0{digits}}-of-{head.world_size}", rank, of_slices)
    return [group for group in groups if group.numbers or not head.tensors]


def is_whole(tensor: PlanTensor, world_size: int) -> bool:
    """Whether the file holds all of `tensor`, of which each rank takes one stretch or everything."""
    if tensor.shard_dim < 0:
        return True
    if world_size > RANKS_OF_A_MACHINE or prod(tensor.type.shape[: tensor.shard_dim]) != 1:
        return False
    bits = _row(tensor).numel * tensor.type.dtype.bits
    return all(before[1] == after[0] for spans in tensor.intervals for before, after in pairwise(spans)) and all(
        low * bits % 8 == 0 for spans in tensor.intervals for low, _ in spans
    )


def first_byte(tensor: PlanTensor, rank: int) -> int:
    """Where the stretch of `rank` begins in the whole tensor, in bytes."""
    if tensor.shard_dim < 0 or not tensor.intervals[rank]:
        return 0
    return tensor.intervals[rank][0][0] * _row(tensor).numel * tensor.type.dtype.bits // 8


def _row(tensor: PlanTensor) -> TensorType:
    """One step along the dim that is cut, when those before it have one element."""
    return TensorType(tensor.type.shape[tensor.shard_dim + 1 :], tensor.type.dtype)


def _split(head: Head, numbers: Iterable[int], alone: int) -> list[tuple[int, ...]]:
    """The numbers by group, in the order of their first names."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in numbers:
        tensor = head.tensors[number]
        key = (number,) if tensor.type.nbytes >= alone else (layer_of(tensor.name), len(tensor.type.shape) > 1)
        groups[key].append(number)
    return [tuple(found) for found in groups.values()]


def layer_of(name: str) -> str:
    """The name up to its first number: `model.layers.3` for all tensors of that layer; empty outside of layers."""
    parts = name.split(".")
    count = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:count])


def _named(stem: str, rank: int | None, groups: list[tuple[int, ...]]) -> list[FileGroup]:
    if len(groups) == 1:
        return [FileGroup(f"{stem}.safetensors", rank, groups[0])]
    return [
        FileGroup(f"{stem}-{i:05}-of-{len(groups):05}.safetensors", rank, numbers)
        for i, numbers in enumerate(groups, start=1)
    ]
