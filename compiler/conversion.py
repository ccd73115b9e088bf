"""A plan's result as files: ordinary safetensors in runtime names and layout, which the runtime maps.

Which tensors share a file: `file_groups`. The bytes of a file depend on its tensors alone (names, types, data), so that
plans, ranks and variants that agree on them agree on the file. Beside the files lies a plan that maps them, so that
loading an artifact is executing a plan like any other, and for other tools an index where there is more than one file:
`model.safetensors.index.json`, or one a rank, whose metadata says under `slices` what to take of tensors stored whole
(name -> dim, first position, end).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from loadplan.cache.error import LoadplanError
from loadplan.cache.place_folder import new_folder
from loadplan.compiler.file_groups import ALONE_NBYTES, FileGroup, first_byte, group_files
from loadplan.runtime.artifact import INDEX_SUFFIX, ORIGINAL_NAME, PLAN_NAME, Artifact
from loadplan.runtime.execute import Execution
from loadplan.runtime.loading import Progress
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Copy, CopyColumns, Head, PlanFile, Section
from loadplan.runtime.source_files import SourceFile, find_files
from loadplan.runtime.write_safetensors import FileLayout, lay_out, write_tensors

_BATCH_NBYTES = 256 << 20  # loaded together, then written: what conversion needs above the mapped files
_METADATA = {"format": "pt"}  # what transformers asks of a file


class ArtifactExists(LoadplanError, FileExistsError):
    """The folder to write to holds something that is no artifact, and is left alone."""


def convert(
    plan: Plan | str | Path,
    checkpoint: str | Path,
    folder: str | Path,
    progress: Progress | None = None,
    *,
    alone_nbytes: int = ALONE_NBYTES,
) -> Artifact:
    """Write what `plan` loads from `checkpoint` into `folder`, and return the artifact.

    The folder appears when it is complete; an artifact that is there already is replaced.

    Args:
        plan: a plan, or the path of one.
        checkpoint: where the files that it was compiled for lie.
        folder: where the artifact goes.
        progress: called with (bytes written, bytes in all).
        alone_nbytes: size from which a tensor has a file of its own. Artifacts made with the same share files.

    Raises:
        FileMismatch: a checkpoint file is missing, not the one that the plan was compiled for, or was changed meanwhile.
        ArtifactExists: `folder` holds other files.
        FolderNotWritable: no space, or no permission.
    """
    opened = plan if isinstance(plan, Plan) else Plan.open(plan)
    place = Path(folder)
    check_place(place)
    files = find_files(checkpoint, opened.head.files)
    with new_folder(place, replace=True) as draft:
        _write_all(opened, files, draft, progress, alone_nbytes)
        for file in files:
            file.check_unchanged()
    return Artifact.open(place)


def check_place(place: Path) -> None:
    """Raise `ArtifactExists` unless an artifact may be put there."""
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / PLAN_NAME).is_file())):
        raise ArtifactExists(f"{place}: exists and is no artifact; give another folder, or remove it")


@dataclass(frozen=True, slots=True)
class Output:
    """One file to write."""

    group: FileGroup
    layout: FileLayout

    @classmethod
    def of(cls, head: Head, group: FileGroup) -> Output:
        tensors = [head.tensors[number] for number in group.numbers]
        kinds = {t.name: t.type if group.rank is None else t.local_type(group.rank) for t in tensors}
        return cls(group, lay_out(kinds, _METADATA))


def _write_all(
    plan: Plan, files: Sequence[SourceFile], folder: Path, progress: Progress | None, alone_nbytes: int
) -> None:
    outputs = outputs_of(plan, alone_nbytes)
    complete(plan, outputs, write_outputs(plan, files, outputs, folder, progress), folder)
    for path in folder.iterdir():  # last, so that the kernel writes many files at once
        with path.open("rb") as finished:
            os.fsync(finished.fileno())


def outputs_of(plan: Plan, alone_nbytes: int = ALONE_NBYTES) -> list[Output]:
    """The files that `plan` is converted into. Which, and their bytes, follows from the plan alone."""
    return [Output.of(plan.head, group) for group in group_files(plan.head, alone_nbytes)]


def write_outputs(
    plan: Plan,
    files: Sequence[SourceFile],
    outputs: Sequence[Output],
    folder: Path,
    progress: Progress | None = None,
) -> list[PlanFile]:
    """Write some or all of `outputs_of(plan)` into `folder`, each by itself; what was written, in their order."""
    numbers = {tensor.name: number for number, tensor in enumerate(plan.head.tensors)}
    order = [(output.group.rank, numbers[name]) for output in outputs for name in output.layout.offsets]
    loader = _Loader(plan, files, order)
    total, done = sum(output.layout.size for output in outputs), 0
    written: list[PlanFile] = []
    for output in outputs:

        def load(names: Iterable[str], rank: int | None = output.group.rank) -> Mapping[str, torch.Tensor]:
            return {name: loader.take(rank, numbers[name]) for name in names}

        layout, name = output.layout, output.group.name
        with (folder / name).open("xb") as file:
            digest = write_tensors(file, layout, ([tensor] for tensor in layout.offsets), load)
        guard, header_digest = (0, len(layout.header)), sha256(layout.header).hexdigest()
        written.append(PlanFile(name, layout.size, "safetensors", (guard,), header_digest, digest))
        done += layout.size
        if progress is not None:
            progress(done, total)
    return written


def complete(plan: Plan, outputs: Sequence[Output], written: Sequence[PlanFile], folder: Path) -> None:
    """Put beside all of `outputs_of(plan)` what makes an artifact of them."""
    _mapping_plan(plan, outputs, written).save(folder / PLAN_NAME)
    plan.save(folder / ORIGINAL_NAME)
    if len(outputs) > 1:
        _write_indices(plan.head, outputs, folder)


class _Loader:
    """Tensors in a known order, loaded in batches of bounded size, each forgotten when the next begins."""

    def __init__(self, plan: Plan, files: Sequence[SourceFile], order: Sequence[tuple[int | None, int]]) -> None:
        """`order`: rank, or None for the whole of a tensor that each rank has one stretch of; and the number."""
        self._plan, self._files = plan, files
        self._batches = self._cut(order)
        self._held: dict[tuple[int | None, int], torch.Tensor] = {}

    def take(self, rank: int | None, number: int) -> torch.Tensor:
        """The next tensor in the order; its bytes as they are written."""
        if (rank, number) not in self._held:
            self._held = {}  # before the next batch is in memory too
            self._held = self._load(next(self._batches))
        return self._held.pop((rank, number))

    def _cut(self, order: Sequence[tuple[int | None, int]]) -> Iterator[list[tuple[int | None, int]]]:
        batch: list[tuple[int | None, int]] = []
        held = 0
        for rank, number in order:
            tensor = self._plan.head.tensors[number]
            nbytes = (tensor.type if rank is None else tensor.local_type(rank)).nbytes
            if batch and held + nbytes > _BATCH_NBYTES:
                yield batch
                batch, held = [], 0
            batch.append((rank, number))
            held += nbytes
        if batch:
            yield batch

    def _load(self, batch: Sequence[tuple[int | None, int]]) -> dict[tuple[int | None, int], torch.Tensor]:
        wanted: dict[int, set[int]] = defaultdict(set)  # rank -> numbers
        for rank, number in batch:
            for owner in self._owners(number) if rank is None else (rank,):
                wanted[owner].add(number)
        loaded = {rank: self._run(rank, numbers) for rank, numbers in wanted.items()}
        return {
            (rank, number): loaded[rank][number]
            if rank is not None
            else _join([loaded[owner][number] for owner in self._owners(number)])
            for rank, number in batch
        }

    def _owners(self, number: int) -> list[int]:
        """The ranks whose stretches make up the whole tensor, in their order."""
        tensor = self._plan.head.tensors[number]
        if tensor.shard_dim < 0:
            return [0]
        return sorted(
            (rank for rank, spans in enumerate(tensor.intervals) if spans), key=lambda rank: tensor.intervals[rank][0]
        )

    def _run(self, rank: int, numbers: set[int]) -> Mapping[int, torch.Tensor]:
        return Execution(self._plan.head, self._plan.section(rank), rank, self._files).run(numbers)


def _join(stretches: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, as bytes."""
    if len(stretches) == 1:
        return stretches[0]
    return torch.cat([stretch.reshape(-1).view(torch.uint8) for stretch in stretches])


def _write_indices(head: Head, outputs: Sequence[Output], folder: Path) -> None:
    digits = len(str(head.world_size - 1))
    for rank in range(head.world_size):
        own = [output for output in outputs if output.group.rank in (None, rank)]
        places = {name: output.group.name for output in own for name in output.layout.offsets}
        metadata: dict[str, object] = {
            "total_size": sum(output.layout.size - len(output.layout.header) for output in own)
        }
        slices = {
            tensor.name: [tensor.shard_dim, tensor.intervals[rank][0][0], tensor.intervals[rank][-1][1]]
            for output in own
            if output.group.rank is None
            for tensor in (head.tensors[number] for number in output.group.numbers)
            if tensor.shard_dim >= 0 and tensor.intervals[rank]
        }
        if head.world_size > 1:
            metadata["slices"] = slices
        stem = "model" if head.world_size == 1 else f"rank-{rank:0{digits}}-of-{head.world_size}"
        text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / f"{stem}{INDEX_SUFFIX}").write_text(text + "\n", encoding="utf-8")


def _mapping_plan(plan: Plan, outputs: Sequence[Output], written: Sequence[PlanFile]) -> Plan:
    """The plan whose every copy is one stretch of a written file."""
    head = plan.head
    kinds = sorted({tensor.type.dtype for tensor in head.tensors})
    sections: list[Section] = []
    for rank in range(head.world_size):
        copies: list[Copy] = []
        for source, output in enumerate(outputs):
            if output.group.rank not in (None, rank):
                continue
            for number in output.group.numbers:
                tensor = head.tensors[number]
                kind = tensor.local_type(rank)
                if kind.numel:
                    offset = output.layout.offsets[tensor.name]
                    if output.group.rank is None:
                        offset += first_byte(tensor, rank)
                    copies.append(Copy(source, number, offset, 0, kind.numel, kinds.index(kind.dtype), ()))
        copies.sort(key=lambda copy: (copy.source, copy.src))
        sections.append(Section((), CopyColumns.of(copies)))
    return Plan.of(
        replace(
            head,
            files=tuple(written),
            chains=tuple((dtype,) for dtype in kinds),
            provenance=(*head.provenance, ("plan", plan.digest)),
        ),
        tuple(sections),
    )
