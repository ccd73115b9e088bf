"""The values that reading a checkpoint gives: what lies where, never the data itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from loadplan.runtime.tensor_type import TensorType

FileFormat = Literal["safetensors", "torch"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor: its name, type and place in a file."""

    name: str
    type: TensorType
    file: str  # name of the file, relative to the checkpoint folder, with forward slashes
    offset: int  # bytes from the start of the file to the first element
    strides: tuple[int, ...] | None = None  # elements per dim; None is dense row-major


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file that holds tensors, and what tells it from any other file."""

    name: str  # relative to the checkpoint folder, with forward slashes
    size: int  # bytes
    format: FileFormat
    guards: tuple[tuple[int, int], ...]  # byte ranges (offset, nbytes) that hold no tensor data: header, zip records
    header_digest: str  # SHA-256 (hex) of the bytes of `guards`, in their order
    header: bytes = field(default=b"", repr=False)  # those bytes, for safetensors: what saving restores


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All files and entries of one model version; equal for equal headers, wherever they lie."""

    files: tuple[CheckpointFile, ...]  # in name order
    entries: Mapping[str, Entry]  # by source name
    config: Mapping[str, object] | None = None  # config.json, when the checkpoint has one
    others: Mapping[str, bytes] = field(
        default_factory=dict, compare=False, repr=False
    )  # index and config as they are, by name
    generation_config: bytes = b""  # generation_config.json as it is; empty when there is none
    notes: tuple[str, ...] = field(default=())  # what was seen and left alone, for the report
