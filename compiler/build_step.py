"""One output of a variant: the record of what it was built from, and why it must be built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.digest import is_digest
from loadplan.cache.file_digests import FileDigests
from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import make_folder

_SHOWN = 5  # reasons that are worth reading


@dataclass(frozen=True, slots=True)
class Record:
    """What a step was built from and what it made."""

    parts: Mapping[str, str]
    files: Mapping[str, str]  # name below the folder -> SHA-256 (hex)
    info: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """Where the files of an output lie, and where its record does."""

    folder: Path
    path: Path  # of the record

    def find_record(self) -> Record | None:
        """What was written last; None if nothing was, or it is damaged."""
        try:
            value = find_record(self.path)
        except OSError:  # whatever else lies there
            return None
        match value:
            case {"parts": dict(parts), "files": dict(files), "info": dict(info)}:
                return Record(parts, files, info)
        return None

    def write_record(
        self, parts: Mapping[str, str], names: Sequence[str], info: Mapping[str, str], known: FileDigests
    ) -> None:
        """Note that the files called `names` are built from `parts`."""
        files = {name: known.digest(self.folder / name) for name in names}
        make_folder(self.path.parent)
        write_record(self.path, {"parts": dict(parts), "files": files, "info": dict(info)})

    def reasons(self, parts: Mapping[str, str], known: FileDigests) -> list[str]:
        """Why it must be built; empty when it is up to date."""
        record = self.find_record()
        if record is None:
            return ["not done before"]
        return list(changes(record.parts, parts)) or self.damages(record, known)

    def damages(self, record: Record, known: FileDigests) -> list[str]:
        """The files that are not as they were written; each is read once and then known by its times."""
        found: list[str] = []
        for name, digest in record.files.items():
            try:
                if known.digest(self.folder / name) != digest:
                    found.append(f"{name} is damaged")
            except OSError:
                found.append(f"{name} is missing")
        return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The parts that differ, from what to what."""
    changed = sorted(part for part in {*before, *after} if before.get(part) != after.get(part))
    if any(part.startswith("config.") and part != "config.json" for part in changed):
        changed = [part for part in changed if part != "config.json"]  # the keys say it better
    said = [_change(part, before.get(part), after.get(part)) for part in changed]
    return said if len(said) <= _SHOWN else [*said[: _SHOWN - 1], f"and {len(said) - _SHOWN + 1} more"]


def _change(part: str, before: str | None, after: str | None) -> str:
    if before is None:
        return f"{part} is new"
    if after is None:
        return f"{part} is gone"
    return f"{part} changed: {_short(before)} -> {_short(after)}"


def _short(value: str) -> str:
    """Enough of a value to tell it from another; of a header the size too."""
    words = [word[:8] if is_digest(word) else word for word in value.split(" ")]
    return " ".join(words)[:60] or "nothing"
