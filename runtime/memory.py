"""The memory of CPU tensors: taken in large pages, seen as bytes, without numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch

from loadplan.runtime.pages import Memory, anonymous, bytes_at
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_layout

STAGING_NBYTES = 64 << 20  # what loading may hold above the final tensors and the temporaries of the plan
_POOL_NBYTES = 32 << 20  # tensors below this share one mapping, which lives as long as the last of them
_ALIGNMENT = 64  # bytes: a cache line, and what vector loads of any CPU want


def allocate(kind: TensorType) -> torch.Tensor:
    """A tensor of type `kind` on the CPU, not filled, in large pages where the kernel gives them."""
    return allocate_all({0: kind})[0]


def allocate_all(kinds: Mapping[int, TensorType]) -> dict[int, torch.Tensor]:
    """A tensor for each number, not filled; small ones lie together, in the order of `kinds`.

    Each has a storage of its own: none looks shared to who saves it. The memory of a pool is given back when the last
    of its tensors is gone, at most 32 MiB later than that of the others.
    """
    tensors: dict[int, torch.Tensor] = {}
    pool: list[tuple[int, TensorType, int]] = []
    sizes: dict[int, int] = {}  # id of a type -> bytes, computed once: tensors of a plan share their types
    end = 0
    for number, kind in kinds.items():
        nbytes = sizes.get(id(kind))
        if nbytes is None:
            nbytes = sizes[id(kind)] = kind.nbytes
        if pool and end + nbytes > _POOL_NBYTES:
            tensors.update(views(anonymous(end), pool))
            pool, end = [], 0
        pool.append((number, kind, end))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    if pool:
        tensors.update(views(anonymous(max(end, 1)), pool))
    return tensors


def views(memory: Memory, places: Iterable[tuple[int, TensorType, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """For each (number, type, offset in bytes) the tensor that lies there in `memory`, and keeps it alive."""
    layouts: dict[int, tuple[tuple[int, ...], torch.dtype, int]] = {}  # by id of the type, as above
    for number, kind, offset in places:
        layout = layouts.get(id(kind))
        if layout is None:
            shape, dtype = torch_layout(kind)
            layout = layouts[id(kind)] = shape, dtype, prod(shape)
        shape, dtype, numel = layout
        if numel:
            flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
            yield number, flat if len(shape) == 1 else flat.view(shape)
        else:
            yield number, torch.empty(shape, dtype=dtype)


def memory_of(tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> memoryview:
    """A writable view of `nbytes` bytes (all if None) from byte `offset` of a dense CPU tensor.

    The view does not keep the tensor alive: hold on to it while the view is in use.
    """
    size = tensor.numel() * tensor.element_size()
    count = size - offset if nbytes is None else nbytes
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "dense, on the CPU"
    assert 0 <= offset <= offset + count <= size, "inside the tensor"
    return bytes_at(tensor.data_ptr() + offset, count)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors are equal bit for bit: NaN equals itself, -0.0 differs from 0.0."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # as_strided, for a single element may have any stride, and only stride 1 can be viewed as bytes
    return torch.equal(*(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (one, other)))
