"""Checkpoints in memory, and pieces and copies carried out by hand, in numpy and torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from loadplan.compiler.checkpoint import Checkpoint, CheckpointFile, Entry
from loadplan.compiler.pieces import Layout
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Copy, Head, Section
from loadplan.runtime.tensor_type import TensorType, row_major
from loadplan.runtime.torch_types import torch_dtype

Numbers = NDArray[np.int64]


def tensor_type(text: str) -> TensorType:
    """`F32[4,6]` as a value."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    assert found is not None, text
    return TensorType(tuple(int(size) for size in found[2].split(",") if size), DType(found[1]))


def checkpoint(tensors: Mapping[str, str], config: Mapping[str, object] | None = None) -> Checkpoint:
    """A checkpoint of one file, from name -> `F32[4,6]`; there are no bytes behind it."""
    entries: dict[str, Entry] = {}
    offset = 0
    for name, text in tensors.items():
        entries[name] = Entry(name, tensor_type(text), "model.safetensors", offset)
        offset += entries[name].type.nbytes
    file = CheckpointFile("model.safetensors", offset, "safetensors", (), "00" * 32)
    return Checkpoint((file,), entries, config)


def elements(layout: Layout, sources: Mapping[str | int, Numbers]) -> Numbers:
    """The values that `layout` takes from flat `sources`; fails if pieces overlap, leave gaps or reach outside."""
    made, written = np.zeros(prod(layout.shape), np.int64), np.zeros(prod(layout.shape), np.int64)
    for piece in layout.pieces:
        src, dst = np.array(piece.offset), np.array(0)
        for span, size, step in zip(piece.spans, layout.shape, row_major(layout.shape), strict=True):
            assert 0 <= span.start <= span.start + span.reach < size
            dst = dst + span.start * step
            for factor in span.factors:
                assert factor.extent > 1
                src = np.add.outer(src, np.arange(factor.extent) * factor.src)
                dst = np.add.outer(dst, np.arange(factor.extent) * factor.dst * step)
        assert src.size == piece.numel
        made[dst] = sources[piece.source.key][src]
        np.add.at(written, dst, 1)
    assert (written == 1).all()
    return made.reshape(layout.shape)


def run_section(head: Head, section: Section, rank: int, file: bytes) -> list[bytes]:
    """The tensors' bytes after all copies; fails when a byte is written twice or never, or a temporary is read too early."""
    kinds = [*(tensor.local_type(rank) for tensor in head.tensors), *section.temporaries]
    buffers = [np.full(kind.nbytes, 0xA5, np.uint8) for kind in kinds]
    writes = [np.zeros(kind.nbytes, np.int64) for kind in kinds]
    for copy in section.copies:
        if copy.source < 0:
            assert (writes[-1 - copy.source] == 1).all()
        source = np.frombuffer(file, np.uint8) if copy.source >= 0 else buffers[-1 - copy.source]
        run_copy(copy, head.chains[copy.chain], source, buffers[copy.buffer], writes[copy.buffer])
    assert all((written == 1).all() for written in writes)
    return [buffer.tobytes() for buffer in buffers[: len(head.tensors)]]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, in row-major order."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8).numpy().tobytes()


def run_copy(
    copy: Copy, chain: Sequence[DType], source: NDArray[np.uint8], buffer: NDArray[np.uint8], written: Numbers
) -> None:
    """One copy, element by element."""
    sizes = chain[0].itemsize, chain[-1].itemsize
    src, dst = np.array(copy.src), np.array(copy.dst)
    for extent, src_step, dst_step in (*copy.loops, (copy.run, *sizes)):
        src = np.add.outer(src, np.arange(extent) * src_step)
        dst = np.add.outer(dst, np.arange(extent) * dst_step)
    taken = source[src.reshape(-1, 1) + np.arange(sizes[0])]
    values = torch.from_numpy(taken).view(torch_dtype(chain[0]))
    for dtype in chain[1:]:
        values = values.to(torch_dtype(dtype))
    places = dst.reshape(-1, 1) + np.arange(sizes[1])
    buffer[places] = np.frombuffer(raw(values), np.uint8).reshape(places.shape)
    np.add.at(written, places, 1)
