"""What lies where in a file written by `torch.save`: a zip of raw storages beside a pickle that says how to view them.

torch's own weights-only unpickler runs, under `FakeTensorMode`: it allows nothing but tensors and plain containers, and
with fake tensors it reads the pickle only, noting for each storage where in the file it lies.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loadplan.compiler.checkpoint import CheckpointFile, Entry
from loadplan.compiler.problem import CheckpointError, Problem
from loadplan.runtime.tensor_type import TensorType, row_major
from loadplan.runtime.torch_types import dtype_of

_LENGTHS_AT = 26  # of name and extra field, in a record's local header (APPNOTE.TXT 4.3.7)


class _Unplanned(ValueError):
    """A sound zip file whose bytes are not the tensors' own."""


def read_torch(path: Path, *, name: str) -> tuple[CheckpointFile, tuple[Entry, ...], tuple[str, ...]]:
    """The file, its entries by name, and notes on what it holds besides tensors. Tensor data is not read.

    Nested dicts are flattened: their keys are joined by dots, as module paths are.

    Args:
        path: the file.
        name: what to call it in entries and messages.

    Raises:
        CheckpointError: the file is no zip of `torch.save`, holds more than tensors and plain values, or a tensor that
            this version cannot place.
    """

    def refuse(why: str, *tensor: str) -> CheckpointError:
        return CheckpointError([Problem("header", f"{name}: {why}", (name, *tensor))])

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_zip = zipfile.is_zipfile(file)
            records = _records(file) if is_zip else {}
    except _Unplanned as fault:
        raise refuse(str(fault)) from fault
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise refuse(f"cannot be read as a zip file: {_first_line(error)}") from error
    if not is_zip:
        raise refuse(
            "is not a zip file as torch.save has written since 1.6; "
            "it is damaged, or older: load it with torch and save it again, best as safetensors"
        )
    try:
        with FakeTensorMode():
            content = torch.load(path, weights_only=True)
        items = list(_flatten(content, "")) if isinstance(content, dict) else []
    except pickle.UnpicklingError as error:
        raise refuse(f"holds what torch does not load with weights_only: {_first_line(error)}") from error
    except Exception as error:  # torch tells no closed set of what it raises for damaged bytes
        raise refuse(f"cannot be read as a torch file: {_first_line(error)}") from error
    if not isinstance(content, dict):
        kind = "Tensor" if isinstance(content, torch.Tensor) else type(content).__name__
        raise refuse(f"holds a {kind}, a dict of tensors belongs there")

    entries: dict[str, Entry] = {}
    spans: set[tuple[int, int]] = set()
    others: list[str] = []
    for key, value in items:
        if not isinstance(value, torch.Tensor):
            others.append(key)
            continue
        dtype = dtype_of(value.dtype)
        if dtype is None or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise refuse(f"tensor {key!r} is {value.dtype} with layout {value.layout}, which cannot be planned", key)
        storage = value.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)
        if offset is None:
            raise refuse(f"tensor {key!r} has no place in the file", key)
        if key in entries:
            raise refuse(f"two tensors are called {key!r} once nested names are joined by dots", key)
        if any("\ud800" <= mark <= "\udfff" for mark in key):
            raise refuse(f"the name {key!r} has a lone surrogate, which is not Unicode")
        type_ = TensorType(tuple(value.shape), dtype)
        strides = None if value.stride() == row_major(type_.shape) or 0 in type_.shape else tuple(value.stride())
        begin = offset + value.storage_offset() * dtype.itemsize
        last = begin + sum((n - 1) * s for n, s in zip(type_.shape, value.stride(), strict=True)) * dtype.itemsize
        if records.get(offset, -1) < storage.nbytes() or (
            type_.numel and last + dtype.itemsize > offset + storage.nbytes()
        ):
            raise refuse(f"tensor {key!r} reaches past its storage, or past its record in the file: it is cut off", key)
        spans.add((offset, offset + storage.nbytes()))
        entries[key] = Entry(key, type_, name, begin, strides)
    notes = (f"{name}: {len(others)} values besides tensors are left out: {', '.join(others[:5])}",) if others else ()
    guards = tuple(_outside(sorted(spans), size))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for begin, nbytes in guards:
            file.seek(begin)
            digest.update(file.read(nbytes))
    return CheckpointFile(name, size, "torch", guards, digest.hexdigest()), tuple(entries.values()), notes


def _records(file: BinaryIO) -> dict[int, int]:
    """Where in the file the data of each record begins, and its nbytes.

    torch notes where the data of a storage begins, not how it is packed there, and with fake tensors it crashes on
    swapped bytes: both are looked at here, before torch is asked.
    """
    found: dict[int, int] = {}
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            name = record.filename
            if record.compress_type != zipfile.ZIP_STORED:
                raise _Unplanned(f"its record {name!r} is compressed, torch.save writes none so: save it again")
            # torch looks records up in any case
            if name.lower().endswith("byteorder") and (record.file_size > 16 or archive.read(record) != b"little"):
                raise _Unplanned("holds big-endian tensors: load it with torch and save it again, best as safetensors")
            file.seek(record.header_offset + _LENGTHS_AT)
            lengths = struct.unpack("<HH", file.read(4))
            found[record.header_offset + _LENGTHS_AT + 4 + sum(lengths)] = record.file_size
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or repr(error)


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _flatten(item, f"{path}.{key}" if path else str(key))


def _outside(spans: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The byte ranges, as offset and nbytes, that no storage covers."""
    at = 0
    for low, high in spans:
        if low > at:
            yield at, low - at
        at = max(at, high)
    if at < size:
        yield at, size - at
