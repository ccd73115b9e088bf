"""Memory for tensors: apart, aligned, in large pages, given back; and what the kernel says of files."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadplan.runtime.dtype import DType
from loadplan.runtime.file_system import is_network, is_resident
from loadplan.runtime.memory import allocate, allocate_all, memory_of
from loadplan.runtime.pages import PAGE_NBYTES, anonymous, map_file, own, populate
from loadplan.runtime.tensor_type import TensorType


def smaps(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds `address`."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            if inside:
                break
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside:
            found[first[:-1]] = rest.strip()
    return found


@given(sizes=st.lists(st.sampled_from([0, 1, 3, 64, 1000, 1 << 20, 3 << 20]), max_size=30))
def test_tensors_lie_apart(sizes: list[int]) -> None:
    kinds = {number * 3: TensorType((size,), DType.U8) for number, size in enumerate(sizes)}
    tensors = allocate_all(kinds)
    assert list(tensors) == list(kinds)
    for number, tensor in tensors.items():
        assert (tuple(tensor.shape), tensor.dtype) == (kinds[number].shape, torch.uint8)
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == kinds[number].nbytes  # its own: saving one saves no other
        memory_of(tensor)[:] = bytes([number % 251]) * tensor.numel()
    for number, tensor in tensors.items():
        assert bool((tensor == number % 251).all())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64, DType.BOOL, DType.C64, DType.F4])
def test_types(dtype: DType) -> None:
    kind = TensorType((3, 4), dtype)
    tensor = allocate(kind)
    assert tensor.numel() * tensor.element_size() == kind.nbytes
    assert allocate(TensorType((0, 4), dtype)).numel() == 0


def test_large_pages_are_asked_for() -> None:
    memory = anonymous(5 << 20)
    address = ctypes.addressof(memory)
    assert address % (2 << 20) == 0
    flags = smaps(address).get("VmFlags")
    if flags is None:
        pytest.skip("this kernel does not show the flags of mappings")
    assert "hg" in flags.split()
    assert "hg" not in smaps(address + (4 << 20) + 4096)["VmFlags"].split()  # the rest would cost a whole large page


def test_memory_is_given_back_with_its_last_tensor() -> None:
    tensors = allocate_all({number: TensorType((1 << 20,), DType.U8) for number in range(3)})
    address = tensors[0].data_ptr()
    kept = tensors[2][5:]
    tensors.clear()
    gc.collect()
    assert smaps(address)
    del kept
    gc.collect()
    assert "Size" not in smaps(address)


def test_no_room() -> None:
    with pytest.raises(MemoryError, match="no room for"):
        anonymous(1 << 60)


def test_files_in_and_out_of_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(1 << 20)
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert not is_network(descriptor)
        address = map_file(descriptor, len(data))
        memory = own(address, len(data), address, len(data))
        assert is_resident(address, len(data))
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_resident(address, len(data)):
            pytest.skip("this file system keeps its files in memory")
        populate(address + 5, len(data) - 9)
        assert is_resident(address, len(data))
        assert bytes(memory) == data
    finally:
        os.close(descriptor)


def test_reads_of_mapped_bytes_that_fail_are_errors(tmp_path: Path) -> None:
    """Not a SIGBUS: the pages behind the end of a file that was cut."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE_NBYTES))
    with path.open("rb") as file:
        address = map_file(file.fileno(), 4 * PAGE_NBYTES)
    memory = own(address, 4 * PAGE_NBYTES, address, 4 * PAGE_NBYTES)
    os.truncate(path, PAGE_NBYTES)
    populate(address, PAGE_NBYTES)
    with pytest.raises(OSError, match="cannot read mapped bytes"):
        populate(address, 4 * PAGE_NBYTES)
    del memory
