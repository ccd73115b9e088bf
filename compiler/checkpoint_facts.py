"""What an action key needs to know of a checkpoint, remembered by the state of its files, so that headers are read once.

Reading headers takes time, and those of torch files take torch; a build that has nothing to do needs neither. Facts are
small: digests instead of headers, and no entries. They are equal for equal files, wherever these lie.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from loadplan.cache.digest import digest_bytes, digest_json
from loadplan.cache.file_digests import SETTLED_NS, FileState
from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import FolderNotWritable
from loadplan.compiler.build_code import compiler_digest
from loadplan.compiler.checkpoint import Checkpoint, Entry
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.recipe import plain
from loadplan.runtime.dtype import DType
from loadplan.runtime.location import folder_of, locate
from loadplan.runtime.tensor_type import TensorType

logger = logging.getLogger(__name__)

_READ = (".safetensors", ".bin", ".pt", ".pth", ".json")  # what `read_checkpoint` looks at


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file that holds tensors."""

    name: str
    size: int  # bytes
    format: str
    header_digest: str


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint, as far as what is made of its headers can tell it from another."""

    files: tuple[FileFacts, ...]
    others: tuple[tuple[str, str], ...]  # index, config, and what else a checkpoint has: name, digest
    config: str | None  # as JSON text, so that equal facts are equal
    first_float: str | None  # dtype of the first floating point tensor in name order
    notes: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointFacts:
        """The facts of what was read."""
        floats = (entry.type.dtype for _, entry in sorted(checkpoint.entries.items()) if entry.type.dtype.is_float)
        first = next(floats, None)
        return cls(
            tuple(FileFacts(f.name, f.size, f.format, f.header_digest) for f in checkpoint.files),
            (*((name, digest_bytes(raw)) for name, raw in sorted(checkpoint.others.items())), *_more(checkpoint)),
            None if checkpoint.config is None else json.dumps(checkpoint.config),
            None if first is None else str(first),
            checkpoint.notes,
        )

    def to_json(self) -> dict[str, object]:
        """The value as JSON."""
        return {
            "files": [[f.name, f.size, f.format, f.header_digest] for f in self.files],
            "others": [list(pair) for pair in self.others],
            "config": self.config,
            "first_float": self.first_float,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: object) -> CheckpointFacts | None:
        """The inverse of `to_json`; None of anything else."""
        match data:
            case {
                "files": list(files),
                "others": list(others),
                "config": str() | None as config,
                "first_float": str() | None as first,
                "notes": list(notes),
            }:
                try:
                    return cls(
                        tuple(FileFacts(str(n), int(s), str(f), str(d)) for n, s, f, d in files),
                        tuple((str(name), str(digest)) for name, digest in others),
                        config,
                        first,
                        tuple(map(str, notes)),
                    )
                except (TypeError, ValueError):
                    return None
        return None

    @property
    def parsed_config(self) -> Mapping[str, object] | None:
        """config.json, when the checkpoint has one."""
        if self.config is None:
            return None
        config: dict[str, object] = json.loads(self.config)
        return config

    def outline(self) -> Checkpoint:
        """A checkpoint that chooses recipe and signature as the real one does: its config, and one tensor's dtype."""
        entries = {}
        if self.first_float is not None:
            entries[""] = Entry("", TensorType((), DType(self.first_float)), "", 0)
        return Checkpoint((), entries, self.parsed_config)


_SAID = {"files", "entries", "config", "others", "notes"}  # fields of a checkpoint that the facts have; entries follow


def _more(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Any other field, so that one that is added to checkpoints counts from then on."""
    for field in fields(checkpoint):
        value = getattr(checkpoint, field.name)
        if field.name not in _SAID and value:
            yield field.name, digest_bytes(value) if isinstance(value, bytes) else digest_json(plain(value))


def read_facts(location: str | Path, folder: Path) -> CheckpointFacts:
    """The facts of the checkpoint at `location`; from `folder`, if none of its files changed since they were read.

    Raises:
        LocationError, CheckpointError: as `read_checkpoint`.
    """
    path = locate(location)
    start_ns = time.time_ns()
    states = _states(path)
    record = _record(path, folder)
    base = folder_of(path)
    known = _find(record, states, base)
    if known is not None:
        return known
    facts = CheckpointFacts.of(read_checkpoint(location))
    states |= {file.name: astuple(FileState.of(base / file.name)) for file in facts.files}
    is_settled = all(start_ns - state[3] >= SETTLED_NS for state in states.values())
    if is_settled and states.items() >= _states(path).items():
        body = {"loadplan": compiler_digest(), "states": {n: list(s) for n, s in states.items()}}
        try:
            write_record(record, {**body, "facts": facts.to_json()})
        except FolderNotWritable as error:  # the answer is right all the same, only slow the next time too
            logger.warning("headers not remembered: %s", error)
    return facts


_State = tuple[int, ...]  # the fields of a `FileState`


def _states(path: Path) -> dict[str, _State]:
    """What may be read for a checkpoint at `path`, by name."""
    if path.is_dir() or path.suffix == ".json":
        found = [item for item in folder_of(path).iterdir() if item.suffix in _READ]
    else:
        found = [path, path.parent / "config.json"]
    return {item.name: astuple(FileState.of(item)) for item in sorted(found) if item.is_file()}


def _record(path: Path, folder: Path) -> Path:
    """One a location: what it held before is forgotten."""
    state = folder_of(path).stat()
    name = digest_json([state.st_dev, state.st_ino, "" if path.is_dir() else path.name])
    return folder / name[:2] / name[2:]


def _find(record: Path, states: Mapping[str, _State], base: Path) -> CheckpointFacts | None:
    """The facts in `record`, if the files in `states`, and those further below `base`, are as they were."""
    match find_record(record):
        case {"loadplan": str(code), "states": dict(before), "facts": facts} if code == compiler_digest():
            below = {name: base / name for name in before if name not in states}
        case _:
            return None
    if not all(path.is_file() for path in below.values()):
        return None
    now = {**states} | {name: astuple(FileState.of(path)) for name, path in below.items()}
    return CheckpointFacts.from_json(facts) if before == {name: list(state) for name, state in now.items()} else None
