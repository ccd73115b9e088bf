"""The memory of CPU tensors as bytes, without numpy."""

from __future__ import annotations

import ctypes

import torch


def memory_of(tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> memoryview:
    """A writable view of `nbytes` bytes (all if None) from byte `offset` of a dense CPU tensor.

    The view does not keep the tensor alive: hold on to it while the view is in use.
    """
    size = tensor.numel() * tensor.element_size()
    count = size - offset if nbytes is None else nbytes
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "dense, on the CPU"
    assert 0 <= offset <= offset + count <= size, "inside the tensor"
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr() + offset)).cast("B")
