"""The plan: for each rank, which bytes of which file land where, through which casts.

    plan    ::= head section{world_size} origin?
    head    ::= files tensors aliases equal_ties chains constants model? fused* report provenance
    section ::= buffer* copy* compute*         -- the rank's tensors first, then its temporaries
    copy    ::= source buffer src dst run chain loop*
    compute ::= kernel input* output* options

A copy moves `run` neighbouring elements, once per turn of its loops (outermost first). Offsets and strides are in
bytes. Copies that read files come first, by file and offset; then those that read temporaries, in the order in which
temporaries are complete. A compute makes all of its outputs, tensors or temporaries, of whole temporaries. Whatever is
made of a temporary is a tensor or a temporary of a higher number, so buffers are complete in the order of their
numbers (`steps`). A plan is made of plain values; `plan_format.py` turns it into bytes and back, and
`check_plan.py` proves that every buffer is written exactly once and nothing reaches out of its file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One file that the plan reads, and what it must look like."""

    name: str  # relative to the checkpoint folder, forward slashes
    size: int  # bytes
    format: str  # "safetensors" or "torch"
    guards: tuple[tuple[int, int], ...]  # byte ranges (offset, nbytes) outside tensor data
    header_digest: str  # SHA-256 (hex) of the bytes of `guards`
    content_digest: str = ""  # SHA-256 (hex) of the whole file; empty when it was not known


class PlanTensor(NamedTuple):
    """One target: its whole type, and what each rank holds of it."""

    name: str
    type: TensorType
    shard_dim: int = -1  # the dim that is cut, from the front; -1 when every rank holds all of it
    intervals: tuple[Intervals, ...] = ()  # per rank, positions (low, high) on `shard_dim`, in local order

    def local_type(self, rank: int) -> TensorType:
        """Type of what `rank` holds."""
        if self.shard_dim < 0:
            return self.type
        size = sum(high - low for low, high in self.intervals[rank])
        shape = (*self.type.shape[: self.shard_dim], size, *self.type.shape[self.shard_dim + 1 :])
        return TensorType(shape, self.type.dtype)


class Loop(NamedTuple):
    """One loop of a copy: steps, and bytes per step in the source and in the buffer."""

    extent: int
    src: int
    dst: int


class Copy(NamedTuple):
    """One strided copy."""

    source: int  # number of the file, or -1 - number of the buffer that is read
    buffer: int  # number of the buffer that is written
    src: int  # bytes from the start of the source
    dst: int  # bytes from the start of the buffer
    run: int  # elements that lie together in the source and in the buffer
    chain: int  # number of the dtype chain
    loops: tuple[Loop, ...]

    @property
    def numel(self) -> int:
        """Elements that the copy moves."""
        count = self.run
        for loop in self.loops:
            count *= loop.extent
        return count


@dataclass(frozen=True, slots=True)
class CopyColumns:
    """Copies as columns of 64-bit integers; the loops of copy `i` are rows `first_loop[i]` to `first_loop[i + 1]`."""

    source: array[int]
    buffer: array[int]
    src: array[int]
    dst: array[int]
    run: array[int]
    chain: array[int]
    first_loop: array[int]
    extent: array[int]
    src_step: array[int]
    dst_step: array[int]

    COLUMNS = ("source", "buffer", "src", "dst", "run", "chain", "first_loop", "extent", "src_step", "dst_step")

    @classmethod
    def of(cls, copies: list[Copy]) -> CopyColumns:
        """The columns of `copies`, in their order."""
        columns = {name: array("q") for name in cls.COLUMNS}
        columns["first_loop"].append(0)
        for copy in copies:
            for name, value in zip(cls.COLUMNS, copy[:6], strict=False):
                columns[name].append(value)
            for loop in copy.loops:
                columns["extent"].append(loop.extent)
                columns["src_step"].append(loop.src)
                columns["dst_step"].append(loop.dst)
            columns["first_loop"].append(len(columns["extent"]))
        return cls(**columns)

    @property
    def files(self) -> list[int]:
        """The numbers of the files that are read, in order."""
        return sorted(source for source in set(self.source) if source >= 0)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Copy]:
        for row in range(len(self)):
            yield self[row]

    def __getitem__(self, row: int) -> Copy:
        steps = range(self.first_loop[row], self.first_loop[row + 1])
        return Copy(
            self.source[row],
            self.buffer[row],
            self.src[row],
            self.dst[row],
            self.run[row],
            self.chain[row],
            tuple(Loop(self.extent[i], self.src_step[i], self.dst_step[i]) for i in steps),
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """A buffer that no checkpoint holds, because the model computes it: its value, computed when the plan was compiled."""

    name: str
    type: TensorType
    data: bytes  # dense, little-endian


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that the tensors are for: what builds it again, without the checkpoint.

    A plan is data: the class is looked up among those of `library`, nothing else is imported for its name.
    """

    library: str  # "transformers"
    class_name: str
    dtype: str  # what the model is built in, in torch's words ("bfloat16")
    config: bytes  # config.json
    generation_config: bytes = b""  # generation_config.json; empty when there is none


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A module that is built as the fused class which `family` makes of its own class."""

    path: str  # in `named_modules` of the model
    family: str  # name of a registered fusion family
    options: str = "{}"  # canonical JSON


@dataclass(frozen=True, slots=True)
class Compute:
    """New values made of whole temporaries by a kernel (`loadplan.runtime.kernels`)."""

    kernel: str  # name of a registered kernel
    inputs: tuple[int, ...]  # numbers of temporaries, in the kernel's order
    outputs: tuple[int, ...]  # numbers of the buffers that it makes
    options: str = "{}"  # canonical JSON


@dataclass(frozen=True, slots=True)
class Section:
    """What one rank does."""

    temporaries: tuple[TensorType, ...]  # buffers that are read again; their numbers follow those of the tensors
    copies: CopyColumns
    computes: tuple[Compute, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a person should know about a compilation; all in a fixed order."""

    sources: int = 0  # tensors in the checkpoint
    source_nbytes: int = 0
    targets: int = 0  # tensors of the plan, aliases not counted
    target_nbytes: int = 0  # of whole tensors, before they are cut over ranks
    unused: tuple[str, ...] = ()  # source names that are not loaded, waived
    missing: tuple[str, ...] = ()  # target names that nothing writes, waived
    casts: tuple[str, ...] = ()  # "name: F32 -> BF16"
    rules: tuple[tuple[str, int], ...] = ()  # rule, names it changed or claimed
    kept: tuple[str, ...] = ()  # "name: rule would have given other"
    notes: tuple[str, ...] = ()  # what reading the checkpoint saw and left alone


@dataclass(frozen=True, slots=True)
class Head:
    """What all ranks share."""

    files: tuple[PlanFile, ...]
    tensors: tuple[PlanTensor, ...]  # in name order
    aliases: tuple[tuple[str, str], ...]  # other name, name of the tensor it is
    equal_ties: tuple[tuple[str, ...], ...]  # tensors that become one if their values are equal
    chains: tuple[tuple[DType, ...], ...]  # stored dtype, then the casts in turn; the last is the buffer's
    world_size: int
    constants: tuple[Constant, ...] = ()  # non-persistent buffers, for models built on the meta device
    model: ModelRecord | None = None  # None when no known class was compiled for
    fusions: tuple[FusedModule, ...] = ()  # in the order of their paths
    provenance: tuple[tuple[str, str], ...] = ()  # what was compiled: part, digest
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One stored tensor of the checkpoint that the plan was compiled for."""

    name: str
    type: TensorType
    file: int  # number of the file
    offset: int  # bytes from the start of the file to the first element


class ByteArea(NamedTuple):
    """Bytes of a file: `nbytes` of them at `start`, once per turn of loops `(extent, step)`, largest step first."""

    start: int
    nbytes: int
    loops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Where one tensor comes from, whole, before it is cut over ranks; derived from the op graph that made the plan."""

    rules: tuple[str, ...]  # of the recipe, in the order in which they took hold of its sources
    program: str  # its ops in order, lines `%3 = OP(FIELDS) %1 s0..s2`; empty when it is its source as it is
    sources: tuple[
        tuple[int, tuple[ByteArea, ...]], ...
    ]  # number of the source s0, s1, ..., and its bytes that are used


@dataclass(frozen=True, slots=True)
class Origin:
    """What the checkpoint looked like: what saving in its layout restores. Loading does not read it."""

    sources: tuple[PlanSource, ...]  # in name order
    headers: tuple[bytes, ...]  # per file, the bytes before its data; empty for files that are not safetensors
    others: tuple[tuple[str, bytes], ...]  # name and content of index and config.json
    traces: tuple[Trace, ...] = ()  # one for each tensor of the plan, in their order; or none at all


@dataclass(frozen=True, slots=True)
class Cost:
    """What loading one rank takes, known before it is done."""

    rank: int
    target_nbytes: int  # bytes of the rank's tensors
    read_nbytes: int  # bytes read from files
    reads: int  # stretches of files, neighbouring ones joined
    copies: int  # strided copies
    temporary_nbytes: int  # bytes of temporaries that are there whole
    peak_nbytes: int  # final tensors and these temporaries together; what is staged comes on top, and is bounded

    @property
    def amplification(self) -> float:
        """Bytes read per byte of the rank's tensors; 0.0 when there are none."""
        return self.read_nbytes / self.target_nbytes if self.target_nbytes else 0.0
