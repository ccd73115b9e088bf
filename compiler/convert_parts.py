"""Conversion in parts: each part makes some of the files, in any process that sees checkpoint and store; then they are one.

A part is an action of the cache: its key follows from that of the whole, its files are filed whole or not at all, and
whoever finds them made does not make them again. So parts may run twice, in any order, on any machine that shares the
store, and after a death only what is missing is made. The result has the bytes of `convert` in one go.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadplan.cache import Artifact, Cache
from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import make_folder
from loadplan.compiler.build_code import converter_digest
from loadplan.compiler.conversion import Output, complete, outputs_of, write_outputs
from loadplan.compiler.part_of import PartOf
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import PlanFile
from loadplan.runtime.source_files import find_files, source_paths

_FILES = "files"  # the note of a part's artifact: what was written, as JSON


class NotInStore(LoadplanError, LookupError):
    """Something that a conversion in parts rests on is not in the store, or was damaged since."""

    def __init__(self, what: str, store: str) -> None:
        super().__init__(what, store)
        self.what, self.store = what, store

    def __str__(self) -> str:
        return (
            f"{self.store}: has not got {self.what}; run again (what is made is kept), on machines that share the store"
        )


class OtherContents(LoadplanError, ValueError):
    """A worker sees a file of the checkpoint with other bytes than those that are to be converted."""

    def __init__(self, name: str, wanted: str, found: str) -> None:
        super().__init__(name, wanted, found)
        self.name, self.wanted, self.found = name, wanted, found

    def __str__(self) -> str:
        return (
            f"{self.name}: holds {self.found[:12]} here, {self.wanted[:12]} where the build was started; "
            "make the same checkpoint visible on all machines"
        )


class OtherVersion(LoadplanError, RuntimeError):
    """A worker runs another loadplan than the one that sent the work."""

    def __str__(self) -> str:
        return "this worker has another version of loadplan than the build; install the same one on all machines"


def convert_part(task: PartOf) -> str:
    """Make the files of one part, unless the store has them; returns the part's key.

    Raises:
        OtherContents: the checkpoint is not the one that is meant.
        FileMismatch: nor are its headers.
        OtherVersion: the code is not the same here.
        NotInStore: the store is not the one that has the plan.
    """
    cache = Cache(Path(task.store))
    if cache.find(task.key) is not None:
        return task.key
    if task.code != converter_digest():
        raise OtherVersion
    plan = get_plan(cache, task.plan_key)
    files = find_files(task.source, plan.head.files)
    _check_contents(cache, task, plan)
    outputs = divide(outputs_of(plan), plan.world_size, task.parts)[task.part]
    make_folder(cache.root)
    with tempfile.TemporaryDirectory(prefix=f"{_draft_prefix(task)}-", dir=cache.root) as temporary:
        written = write_outputs(plan, files, outputs, Path(temporary))
        _check_contents(cache, task, plan)
        made = {file.name: Path(temporary, file.name) for file in written}
        notes = {"kind": "part", _FILES: json.dumps(files_to_json(written))}
        cache.put_files(task.key, made, notes)
    return task.key


def _draft_prefix(task: PartOf) -> str:
    return f".part-{task.whole_key[:16]}"


def _check_contents(cache: Cache, task: PartOf, plan: Plan) -> None:
    """That the files here hold what is meant; one that did not change since it was read is not read again."""
    for name, path in source_paths(task.source, plan.head.files).items():
        found, wanted = cache.files.digest(path), task.contents.get(name, "nothing")
        if found != wanted:
            raise OtherContents(name, wanted, found)


def join_parts(cache: Cache, plan: Plan, tasks: Sequence[PartOf]) -> dict[str, str]:
    """The blobs of the artifact by file name, once every part is made; those beside the parts are filed here.

    Raises:
        NotInStore: a part is not made.
    """
    outputs = outputs_of(plan)
    written: dict[str, PlanFile] = {}
    blobs: dict[str, str] = {}
    for task in tasks:
        made = cache.actions.find(task.key)
        if made is None:
            raise NotInStore(f"part {task.part} of {task.parts}", task.store)
        written |= {file.name: file for file in _written(made)}
        blobs |= made.blobs
    with tempfile.TemporaryDirectory(prefix=".join-", dir=cache.root) as temporary:
        complete(plan, outputs, [written[output.group.name] for output in outputs], Path(temporary))
        blobs |= {path.name: cache.blobs.put_file(path) for path in sorted(Path(temporary).iterdir())}
    for draft in {draft for task in tasks for draft in cache.root.glob(f"{_draft_prefix(task)}-*")}:
        shutil.rmtree(draft, ignore_errors=True)  # of workers that died: all is made
    return blobs


def _written(part: Artifact) -> list[PlanFile]:
    return files_from_json(json.loads(part.info[_FILES]))


def files_to_json(files: Sequence[PlanFile]) -> list[dict[str, object]]:
    """What a record says of the files that a part has made."""
    return [asdict(file) for file in files]


def files_from_json(found: Sequence[Mapping[str, Any]]) -> list[PlanFile]:
    """The inverse of `files_to_json`, for records that were verified."""
    return [PlanFile(**{**file, "guards": tuple(map(tuple, file["guards"]))}) for file in found]


def divide(outputs: Sequence[Output], world_size: int, parts: int) -> list[list[Output]]:
    """The outputs by part, of about equal bytes: a rank's own files in the parts of that rank, if there are so many."""
    found: list[list[Output]] = [[] for _ in range(parts)]
    nbytes = [0] * parts
    for output in sorted(outputs, key=lambda output: -output.layout.size):
        rank = output.group.rank
        own = [part for part in range(parts) if rank is None or parts < world_size or part % world_size == rank]
        least = min(own, key=lambda part: (nbytes[part], part))
        found[least].append(output)
        nbytes[least] += output.layout.size
    place = {output.group.name: number for number, output in enumerate(outputs)}
    return [sorted(part, key=lambda output: place[output.group.name]) for part in found]


def get_plan(cache: Cache, key: str) -> Plan:
    """The plan that is filed under `key`. Raises `NotInStore`."""
    found = cache.fetch(key)
    if found is None:
        raise NotInStore("the plan", str(cache.root))
    return Plan(found["plan"])
