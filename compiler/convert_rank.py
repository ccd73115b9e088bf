"""Conversion by the processes of one job, as torchrun starts them: each makes its own part, and the last puts them together.

    torchrun --nproc-per-node 8 -m loadplan.compiler convert PLAN CHECKPOINT FOLDER --rank-from-env

The processes share the file system of the target folder and talk about nothing: nobody waits, so a process that fails
holds up no other. Parts lie in a folder beside the target until all are there; after a failure, the same command makes
what is missing. A lock file beside the target remembers what it was made of: processes that come late find all done.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loadplan.cache.digest import digest_file
from loadplan.cache.error import LoadplanError
from loadplan.cache.place_folder import new_folder
from loadplan.cache.record import find_record, format_record, parse_record, write_record
from loadplan.cache.write_file import make_folder
from loadplan.compiler.conversion import check_place, complete, outputs_of, write_outputs
from loadplan.compiler.convert_parts import divide, files_from_json, files_to_json
from loadplan.runtime.artifact import PLAN_NAME, Artifact
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import PlanFile
from loadplan.runtime.source_files import SourceFile, find_files, source_paths


class RankError(LoadplanError, ValueError):
    """The environment does not say which rank this is, or not one of this plan."""


@dataclass(frozen=True, slots=True)
class Job:
    """Which process of how many this is."""

    rank: int
    world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Job:
        """What torchrun sets. Raises `RankError`."""
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
        if missing:
            raise RankError(f"--rank-from-env: {' and '.join(missing)} not set; start the processes with torchrun")
        try:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        except ValueError as error:
            raise RankError(f"--rank-from-env: RANK and WORLD_SIZE are no numbers ({error})") from error
        if not 0 <= rank < world_size:
            raise RankError(f"--rank-from-env: RANK={rank} is not from 0 to {world_size - 1} (WORLD_SIZE={world_size})")
        return cls(rank, world_size)


def convert_rank(plan: Plan, checkpoint: str | Path, folder: str | Path, job: Job) -> Artifact | None:
    """Make this rank's part; the artifact, if this process was the last, else None.

    Raises:
        RankError: the plan is for another number of ranks, or the ranks saw different checkpoints.
        FileMismatch: a checkpoint file is missing, or not the one that the plan was compiled for.
        ArtifactExists: `folder` holds other files.
    """
    if job.world_size != plan.world_size:
        raise RankError(
            f"the plan is for {plan.world_size} ranks, WORLD_SIZE is {job.world_size}; "
            f"start {plan.world_size} processes, or compile with --tp-size {job.world_size}"
        )
    place = Path(folder)
    check_place(place)
    files = find_files(checkpoint, plan.head.files)
    paths = source_paths(checkpoint, plan.head.files)
    make_folder(place.parent)
    parts = place.parent / f".{place.name}-{plan.digest[:16]}.parts"
    with parts.with_suffix(".lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # held by all that are at work; a dead process loses it
        if _is_joined(lock, place, paths):
            return None
        make_folder(parts)
        if not _is_made(parts, job.rank, _states(paths)):
            _make(plan, files, paths, parts, job)
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # others are at work: one of them is the last
            return None
        return None if _is_joined(lock, place, paths) else _join(plan, parts, place, lock)


def _is_joined(lock: BinaryIO, place: Path, paths: Mapping[str, Path]) -> bool:
    """Whether another process has put the parts together already, from the files as they are now."""
    lock.seek(0)
    return (place / PLAN_NAME).is_file() and parse_record(lock.read()) == _states(paths)


def _make(plan: Plan, files: Sequence[SourceFile], paths: Mapping[str, Path], parts: Path, job: Job) -> None:
    before = _states(paths)
    outputs = divide(outputs_of(plan), plan.world_size, job.world_size)[job.rank]
    with tempfile.TemporaryDirectory(prefix=f".part-{job.rank}-", dir=parts) as temporary:
        written = write_outputs(plan, files, outputs, Path(temporary))
        if _states(paths) != before:
            raise RankError(f"rank {job.rank}: the checkpoint changed while it was converted; run again")
        for file in written:
            path = Path(temporary, file.name)
            with path.open("rb") as finished:
                os.fsync(finished.fileno())
            path.replace(parts / file.name)
    held = _states({file.name: parts / file.name for file in written})
    write_record(_record(parts, job.rank), {"states": before, "files": files_to_json(written), "held": held})


def _record(parts: Path, rank: int) -> Path:
    return parts / f"part-{rank}"


def _is_made(parts: Path, rank: int, states: dict[str, list[int]]) -> bool:
    """Whether an earlier try has left this part whole, from the same files."""
    record = _read(parts, rank)
    if record is None or record[0] != states:
        return False
    return all(digest_file(parts / file.name)[0] == file.content_digest for file in record[1])


def _read(parts: Path, rank: int) -> tuple[dict[str, list[int]], list[PlanFile]] | None:
    """What a rank's part was made of, and its files; None if it is not there, or not as it was written."""
    match find_record(_record(parts, rank)):
        case {"states": dict(states), "files": list(files), "held": dict(held)}:
            found = files_from_json(files)
        case _:
            return None
    try:
        now = _states({file.name: parts / file.name for file in found})
    except FileNotFoundError:
        return None
    return (states, found) if now == held else None


def _states(paths: Mapping[str, Path]) -> dict[str, list[int]]:
    """What is the same on all machines that see one file, and changes with it."""
    found = {name: path.stat() for name, path in paths.items()}
    return {name: [state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in found.items()}


def _join(plan: Plan, parts: Path, place: Path, lock: BinaryIO) -> Artifact | None:
    made = [_read(parts, rank) for rank in range(plan.world_size)]
    found = [record for record in made if record is not None]
    if len(found) < plan.world_size:
        return None
    for rank, (states, _) in enumerate(found):
        changed = sorted(name for name, state in states.items() if found[0][0].get(name) != state)
        if changed:
            raise RankError(
                f"{changed[0]}: ranks 0 and {rank} saw files of different times or sizes; "
                "give all of them one checkpoint on a shared file system, and run again"
            )
    written = {file.name: file for _, files in found for file in files}
    outputs = outputs_of(plan)
    with new_folder(place, replace=True) as draft:
        for name in written:
            (draft / name).hardlink_to(parts / name)  # the parts stay whole until the artifact is in its place
        complete(plan, outputs, [written[output.group.name] for output in outputs], draft)
    lock.truncate(0)
    lock.write(format_record(found[0][0]))
    lock.flush()
    shutil.rmtree(parts, ignore_errors=True)
    return Artifact.open(place)
