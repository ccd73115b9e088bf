"""Safetensors files, written as a stream: the header is known from the types, so the data need not be held.

Data starts at a multiple of 4096 bytes, and tensors whose sizes are multiples of 64 bytes lie before those of 32, 16 and so
on, so that each is aligned at least for its elements, and can be used where the file is mapped. The format allows both:
the header may be padded with spaces (safetensors README, "Format"). One scalar before all others would shift them, and
kernels take other paths for memory that is not aligned as torch allocates it: results then differ in the last bit (seen
with MKL and a CLIP model).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from loadplan.runtime.memory import memory_of
from loadplan.runtime.tensor_type import TensorType

ALIGNMENT = 4096  # a page: what mmap and O_DIRECT work in
_TENSOR_ALIGNMENT = 64  # what torch allocates CPU memory at (c10/core/alignment.h, gAlignment)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where each tensor of a file to be written goes."""

    header: bytes  # the length field, the JSON, the padding
    offsets: Mapping[str, int]  # bytes from the start of the file, in the order in which tensors are written
    size: int  # bytes of the whole file


def lay_out(types: Mapping[str, TensorType], metadata: Mapping[str, str]) -> FileLayout:
    """The layout of a file that holds tensors of `types`; the same types give the same bytes."""
    order = sorted(types, key=lambda name: (-_alignment(types[name].nbytes), name))
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    places: dict[str, int] = {}
    end = 0
    for name in order:
        kind = types[name]
        places[name] = end
        entries[name] = header_entry(kind, end)
        end += kind.nbytes
    header = header_bytes(entries, align=ALIGNMENT)
    return FileLayout(header, {name: len(header) + place for name, place in places.items()}, len(header) + end)


def _alignment(nbytes: int) -> int:
    """The largest power of two that divides `nbytes`, at most that of torch's own memory."""
    return min(nbytes & -nbytes, _TENSOR_ALIGNMENT) or _TENSOR_ALIGNMENT


def header_entry(kind: TensorType, begin: int) -> dict[str, object]:
    """What a header says of a tensor whose first byte is number `begin` of the data."""
    return {"dtype": str(kind.dtype), "shape": list(kind.shape), "data_offsets": [begin, begin + kind.nbytes]}


def header_bytes(entries: Mapping[str, object], align: int = 8) -> bytes:
    """All bytes before the data of a file whose header holds `entries`; the data begins at a multiple of `align`."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


class HashingWriter:
    """Writes to a file and hashes what it wrote."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)
        self._hash.update(data)
        self.nbytes += len(data) if isinstance(data, bytes) else data.nbytes

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all that was written."""
        return self._hash.hexdigest()


def write_tensors(
    file: BinaryIO,
    layout: FileLayout,
    batches: Iterable[Iterable[str]],
    load: Callable[[Iterable[str]], Mapping[str, torch.Tensor]],
) -> str:
    """Write the file that `layout` describes, a batch of tensors at a time, and return its SHA-256 (hex).

    Args:
        file: open for writing, at its start.
        layout: what `lay_out` gave.
        batches: the names of `layout.offsets`, in their order, in groups that are loaded together.
        load: the tensors of a batch; they may be forgotten when the next one is asked for.
    """
    writer = HashingWriter(file)
    writer.write(layout.header)
    for batch in batches:
        tensors = load(batch)
        for name in batch:
            assert writer.nbytes == layout.offsets[name], f"{name} is due at another place"
            tensor = tensors[name].contiguous()
            writer.write(memory_of(tensor))
    assert writer.nbytes == layout.size, "a tensor was left out"
    return writer.digest
