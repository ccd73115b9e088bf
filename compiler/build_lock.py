"""`loadplan.lock`: what each checkpoint was where it was last seen, for machines that do not have it.

A key is made of headers and contents. A machine that only serves has neither, and pulls by the keys that this file
leads to; `doit lock` (and `doit push`) write it, and it is kept under version control beside loadplan.toml. Where the
checkpoint is on disk, the disk counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.digest import is_digest
from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import write_atomically
from loadplan.compiler.build_file import Variant
from loadplan.compiler.checkpoint_facts import CheckpointFacts

LOCK_NAME = "loadplan.lock"
_FORMAT = 1


class LockError(LoadplanError, ValueError):
    """loadplan.lock is there and cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}; restore it, or write it again with `doit lock` where the checkpoints are"


@dataclass(frozen=True, slots=True)
class Locked:
    """One checkpoint."""

    source: str  # as loadplan.toml has it: another source is another checkpoint
    facts: CheckpointFacts
    contents: Mapping[str, str]  # file -> SHA-256 (hex)


class Lock:
    """The file at `path`, read when it is first asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[str, Locked] | None = None

    def find(self, variant: Variant) -> Locked | None:
        """What is known of the variant's checkpoint; None if nothing, or of another source. Raises `LockError`."""
        if self._read is None:
            self._read = _read(self.path)
        locked = self._read.get(variant.checkpoint)
        return locked if locked is not None and locked.source == variant.written_source else None

    def write(self, checkpoints: Mapping[str, Locked]) -> bool:
        """Note these checkpoints, and forget all others; whether that changed the file."""
        body = {
            "format": _FORMAT,
            "checkpoints": {
                name: {"source": lock.source, "facts": lock.facts.to_json(), "contents": dict(lock.contents)}
                for name, lock in checkpoints.items()
            },
        }
        data = (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
        self._read = None
        if self.path.is_file() and self.path.read_bytes() == data:
            return False
        write_atomically(self.path, data)
        return True


def _read(path: Path) -> dict[str, Locked]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise LockError(path, f"is not JSON ({error})") from error
    match data:
        case {"format": 1, "checkpoints": dict(checkpoints)}:
            return {str(name): _parse(path, str(name), value) for name, value in checkpoints.items()}
        case _:
            raise LockError(path, "is not a lock file of this version")


def _parse(path: Path, name: str, value: object) -> Locked:
    match value:
        case {"source": str(source), "facts": dict(facts), "contents": dict(contents)}:
            found = CheckpointFacts.from_json(facts)
            if found is not None and all(map(is_digest, contents.values())):
                return Locked(source, found, contents)
    raise LockError(path, f"{name}: is not what this version writes")
