"""The memory of CPU tensors: taken in large pages, seen as bytes, without numpy.

A fresh page costs a fault: with small ones, faulting the memory in takes longer than reading cached bytes into it (a
plan of 2.6 GB on 2 cores: 1.2 s, with large pages 0.36 s, medians). What the kernel refuses stays in small pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch

from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_layout

STAGING_NBYTES = 64 << 20  # what loading may hold above the final tensors and the temporaries of the plan
PAGE_NBYTES = mmap.PAGESIZE
_LARGE_PAGE = 2 << 20  # bytes; x86-64, and arm64 with 4 KiB pages
_POOL_NBYTES = 32 << 20  # tensors below this share one mapping, which lives as long as the last of them
_ALIGNMENT = 64  # bytes: a cache line, and what vector loads of any CPU want

Memory = ctypes.Array[ctypes.c_char]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,  # address
    ctypes.c_size_t,  # nbytes
    ctypes.c_int,  # protection
    ctypes.c_int,  # flags
    ctypes.c_int,  # descriptor
    ctypes.c_int64,  # offset
)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # every Linux architecture that torch has wheels for
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22  # Linux 5.14; other than a plain touch, it reports a failed read instead of a SIGBUS


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


def anonymous(nbytes: int) -> Memory:
    """Private memory of `nbytes` bytes, zero until written, in large pages where whole ones fit.

    Raises:
        MemoryError: the kernel has no room for it.
    """
    address, mapped = map_anonymous(nbytes + _LARGE_PAGE if nbytes >= _LARGE_PAGE else nbytes)
    start = -(-address // _LARGE_PAGE) * _LARGE_PAGE if nbytes >= _LARGE_PAGE else address
    whole = nbytes // _LARGE_PAGE * _LARGE_PAGE  # not the last, partial one: it would cost up to 2 MiB
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        _LIBC.madvise(start, whole, mmap.MADV_HUGEPAGE)
    return own(start, nbytes, address, mapped)


def map_anonymous(nbytes: int) -> tuple[int, int]:
    """Address and size of fresh private memory. Raises `MemoryError`."""
    size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _MAP_FAILED:
        raise MemoryError(f"no room for {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")
    return address, size


def map_file(descriptor: int, nbytes: int, offset: int = 0, at: int | None = None) -> int:
    """The address of `nbytes` bytes of a file from `offset`, private and copy on write; over what lies at `at` if given.

    Raises:
        OSError: the kernel cannot map it.
    """
    flags = mmap.MAP_PRIVATE | (_MAP_FIXED if at is not None else 0)
    address = _LIBC.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes: {os.strerror(number)}")
    return int(address)


def own(start: int, nbytes: int, address: int, mapped: int) -> Memory:
    """`nbytes` bytes from `start`, in the `mapped` bytes at `address`, which are unmapped when nothing uses them."""
    memory = (ctypes.c_char * nbytes).from_address(start)
    weakref.finalize(memory, _LIBC.munmap, address, mapped).atexit = False  # tensors may live on until the very end
    return memory


def populate(tensor: torch.Tensor, low: int, high: int) -> None:
    """Have bytes `low` to `high` of a mapped tensor read and their pages at hand, so that no use of them waits.

    Raises:
        OSError: they cannot be read.
    """
    start = (tensor.data_ptr() + low) // PAGE_NBYTES * PAGE_NBYTES
    if not _LIBC.madvise(start, tensor.data_ptr() + high - start, _MADV_POPULATE_READ):
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"cannot read mapped bytes: {os.strerror(number)}")
    memory_of(tensor, low, high - low)[::PAGE_NBYTES].tobytes()  # kernels before 5.14: touch each page


def lock(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the tensors' pages in memory, reading them now. Raises `MemoryError` where the limit does not allow it."""
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes and _LIBC.mlock(tensor.data_ptr(), nbytes):
            reason = os.strerror(ctypes.get_errno())
            raise MemoryError(f"cannot lock {nbytes:,} bytes ({reason}): raise the limit (ulimit -l), or do not lock")


def memory_of(tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> memoryview:
    """A writable view of `nbytes` bytes (all if None) from byte `offset` of a dense CPU tensor.

    The view does not keep the tensor alive: hold on to it while the view is in use.
    """
    size = tensor.numel() * tensor.element_size()
    count = size - offset if nbytes is None else nbytes
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "dense, on the CPU"
    assert 0 <= offset <= offset + count <= size, "inside the tensor"
    return bytes_at(tensor.data_ptr() + offset, count)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """A writable view of the bytes at `address`, which it does not keep alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors are equal bit for bit: NaN equals itself, -0.0 differs from 0.0."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # as_strided, for a single element may have any stride, and only stride 1 can be viewed as bytes
    return torch.equal(*(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (one, other)))
