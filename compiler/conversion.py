"""A plan's result as files: ordinary safetensors in runtime names and layout, which the runtime maps.

One file a rank, and one for what all ranks hold whole; a single rank has one file. Beside them lies a plan that maps
them, so that loading an artifact is executing a plan like any other. A file of the same tensors from the same plan has
the same bytes everywhere.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import make_folder
from loadplan.runtime.artifact import ORIGINAL_NAME, PLAN_NAME, Artifact
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
    plan: Plan | str | Path, checkpoint: str | Path, folder: str | Path, progress: Progress | None = None
) -> Artifact:
    """Write what `plan` loads from `checkpoint` into `folder`, and return the artifact.

    The folder appears when it is complete; an artifact that is there already is replaced.

    Args:
        plan: a plan, or the path of one.
        checkpoint: where the files that it was compiled for lie.
        folder: where the artifact goes.
        progress: called with (bytes written, bytes in all).

    Raises:
        FileMismatch: a checkpoint file is missing, or not the one that the plan was compiled for.
        ArtifactExists: `folder` holds other files.
    """
    opened = plan if isinstance(plan, Plan) else Plan.open(plan)
    place = Path(folder)
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / PLAN_NAME).is_file())):
        raise ArtifactExists(f"{place}: exists and is no artifact; give another folder, or remove it")
    files = find_files(checkpoint, opened.head.files)
    make_folder(place.parent)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as temporary:
        draft = Path(temporary, "artifact")
        draft.mkdir()
        _write_all(opened, files, draft, progress)
        _swap(draft, place, Path(temporary, "replaced"))
    return Artifact.open(place)


def _swap(draft: Path, place: Path, aside: Path) -> None:
    """Put the finished folder in its place; what was there goes aside, to be removed."""
    if place.exists():
        place.rename(aside)
    try:
        draft.rename(place)
    except OSError:
        if aside.exists():
            aside.rename(place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write_all(plan: Plan, files: list[SourceFile], folder: Path, progress: Progress | None) -> None:
    groups = list(_groups(plan.head))
    layouts = {
        name: lay_out({plan.head.tensors[n].name: plan.head.tensors[n].local_type(rank) for n in numbers}, _METADATA)
        for name, rank, numbers in groups
    }
    total, done = sum(layout.size for layout in layouts.values()), 0
    written: dict[str, PlanFile] = {}
    for name, rank, _ in groups:
        digest = _write(plan, files, rank, layouts[name], folder / name)
        header = layouts[name].header
        written[name] = PlanFile(
            name, layouts[name].size, "safetensors", ((0, len(header)),), sha256(header).hexdigest(), digest
        )
        done += layouts[name].size
        if progress is not None:
            progress(done, total)
    mapping = _mapping_plan(plan, groups, layouts, written)
    mapping.save(folder / PLAN_NAME)
    plan.save(folder / ORIGINAL_NAME)


def _groups(head: Head) -> Iterator[tuple[str, int, list[int]]]:
    """Files to write: name, the rank whose section makes their tensors, and the tensors' numbers."""
    everything = range(len(head.tensors))
    if head.world_size == 1:
        yield "model.safetensors", 0, list(everything)
        return
    shared = [number for number in everything if head.tensors[number].shard_dim < 0]
    if shared:
        yield "shared.safetensors", 0, shared
    own = [number for number in everything if head.tensors[number].shard_dim >= 0]
    if own:
        digits = len(str(head.world_size - 1))
        for rank in range(head.world_size):
            yield f"rank-{rank:0{digits}}-of-{head.world_size}.safetensors", rank, own


def _write(plan: Plan, files: list[SourceFile], rank: int, layout: FileLayout, path: Path) -> str:
    numbers = {tensor.name: number for number, tensor in enumerate(plan.head.tensors)}
    execution = Execution(plan.head, plan.section(rank), rank, files)

    def load(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        loaded = execution.run({numbers[name] for name in names})
        return {name: loaded[numbers[name]] for name in names}

    with path.open("xb") as file:
        digest = write_tensors(file, layout, _batches(plan, rank, layout), load)
        file.flush()
        os.fsync(file.fileno())
    return digest


def _batches(plan: Plan, rank: int, layout: FileLayout) -> Iterator[list[str]]:
    sizes = {tensor.name: tensor.local_type(rank).nbytes for tensor in plan.head.tensors}
    batch: list[str] = []
    held = 0
    for name in layout.offsets:
        if batch and held + sizes[name] > _BATCH_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += sizes[name]
    if batch:
        yield batch


def _mapping_plan(
    plan: Plan,
    groups: list[tuple[str, int, list[int]]],
    layouts: Mapping[str, FileLayout],
    written: Mapping[str, PlanFile],
) -> Plan:
    """The plan whose every copy is one stretch of a written file."""
    head = plan.head
    names = sorted(written)
    kinds = sorted({tensor.type.dtype for tensor in head.tensors})
    chains = tuple((dtype,) for dtype in kinds)
    sections: list[Section] = []
    for rank in range(head.world_size):
        copies: list[Copy] = []
        for name, owner, numbers in groups:
            if owner != rank and any(head.tensors[number].shard_dim >= 0 for number in numbers):
                continue  # another rank's own file
            for number in numbers:
                kind = head.tensors[number].local_type(rank)
                if kind.numel:
                    offset = layouts[name].offsets[head.tensors[number].name]
                    chain = kinds.index(kind.dtype)
                    copies.append(Copy(names.index(name), number, offset, 0, kind.numel, chain, ()))
        copies.sort(key=lambda copy: (copy.source, copy.src))
        sections.append(Section((), CopyColumns.of(copies)))
    return Plan.of(
        replace(
            head,
            files=tuple(written[name] for name in names),
            chains=chains,
            provenance=(*head.provenance, ("plan", plan.digest)),
        ),
        tuple(sections),
    )
