"""Copies out of files into buffers on an accelerator: read into pinned memory, sent on a stream of their own.

Each thread has two pinned stages in turn: while one is sent, the next is read into the other. What steps or casts is
sent as it lies in the file and taken apart on the device. Everything here also works with the CPU as the device, without
streams, which is how it is tested where there is no accelerator.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loadplan.runtime.copy_strided import copy_strided
from loadplan.runtime.dtype import DType
from loadplan.runtime.memory import STAGING_NBYTES
from loadplan.runtime.plan import Copy
from loadplan.runtime.readers import Reader
from loadplan.runtime.schedule import span
from loadplan.runtime.source_files import SourceFile
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype, torch_layout


class Stager:
    """The way from files to the buffers on one device."""

    def __init__(self, device: torch.device, threads: int, reader: Reader) -> None:
        """For at most `threads` threads, which share the staging budget."""
        self.device, self._reader = device, reader
        share = STAGING_NBYTES // threads
        self.stage_nbytes = max(share - reader.staging_nbytes, share // 2) // 2  # bytes that a copy may span
        self._local = threading.local()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:  # the buffers' memory may still be in use by what was queued before
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def allocate(self, kind: TensorType) -> torch.Tensor:
        """A tensor of type `kind` on the device, not filled."""
        shape, dtype = torch_layout(kind)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def copy(self, file: SourceFile, tile: Copy, chain: tuple[DType, ...], buffer: torch.Tensor, name: str) -> None:
        """An addressable copy that spans at most `stage_nbytes` bytes of the file; queued when this returns.

        Raises:
            CastOverflow: a value is too large for the dtype that it is cast to.
            FileMismatch, ReadError: the file cannot be read.
        """
        nbytes = span(tile, chain[0])
        stage, sent = self._next_stage()
        if sent is not None:
            sent.synchronize()
        with file.open() as descriptor:
            self._reader.read(file, descriptor, [(tile.src, array("Q", [stage.data_ptr(), nbytes]))])
        with self.queued():
            if tile.loops or len(chain) > 1:
                source = stage[:nbytes].to(self.device, non_blocking=True)
                copy_strided(source.view(torch_dtype(chain[0])), 0, tile, chain, buffer, name)
            else:
                place = buffer.reshape(-1).view(torch.uint8)[tile.dst : tile.dst + nbytes]
                place.copy_(stage[:nbytes], non_blocking=True)
            if sent is not None and self._stream is not None:
                sent.record(self._stream)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Work on the device inside goes to the stream of this stager."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def join(self) -> None:
        """Let what the caller queues from here on wait for all that was sent."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _next_stage(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The stage of this thread that was used longest ago, and what tells that it was sent."""
        stages: list[tuple[torch.Tensor, torch.cuda.Event | None]] | None = getattr(self._local, "stages", None)
        if stages is None:
            is_cuda = self._stream is not None
            stages = [
                (
                    torch.empty(self.stage_nbytes, dtype=torch.uint8, pin_memory=is_cuda),
                    torch.cuda.Event() if is_cuda else None,  # type: ignore[no-untyped-call]
                )
                for _ in range(2)
            ]
            self._local.stages = stages
        stages.reverse()
        return stages[0]
