"""Memory by the page, from the kernel: fresh, or of a file. No torch here: the build checks files too.

A fresh page costs a fault: with small ones, faulting the memory in takes longer than reading cached bytes into it (a
plan of 2.6 GB on 2 cores: 1.2 s, with large pages 0.36 s, medians). What the kernel refuses stays in small pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

PAGE_NBYTES = mmap.PAGESIZE
_LARGE_PAGE = 2 << 20  # bytes; x86-64, and arm64 with 4 KiB pages

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


def populate(address: int, nbytes: int) -> None:
    """Have mapped bytes read and their pages at hand, so that no use of them waits.

    Raises:
        OSError: they cannot be read.
    """
    start = address // PAGE_NBYTES * PAGE_NBYTES
    if not _LIBC.madvise(start, address + nbytes - start, _MADV_POPULATE_READ):
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"cannot read mapped bytes: {os.strerror(number)}")
    bytes_at(address, nbytes)[::PAGE_NBYTES].tobytes()  # kernels before 5.14: touch each page


def lock(address: int, nbytes: int) -> None:
    """Keep mapped bytes in memory, reading them now. Raises `MemoryError` where the limit does not allow it."""
    if nbytes and _LIBC.mlock(address, nbytes):
        reason = os.strerror(ctypes.get_errno())
        raise MemoryError(f"cannot lock {nbytes:,} bytes ({reason}): raise the limit (ulimit -l), or do not lock")


def bytes_at(address: int, nbytes: int) -> memoryview:
    """A writable view of the bytes at `address`, which it does not keep alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(bytearray())
