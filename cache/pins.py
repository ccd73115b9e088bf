"""Entries that gc keeps however old they are, each by a name that says who wants it."""

import os
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.digest import digest_bytes, is_digest
from loadplan.cache.error import LoadplanError
from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import FolderNotWritable, finished_files

FORMAT = 1


class NoSuchPin(LoadplanError, KeyError):
    """There is no pin of this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def __str__(self) -> str:  # KeyError's own would print a repr
        names = ", ".join(map(repr, self.known[:5])) + (", …" if self.known[5:] else "")
        return f"no pin is called {self.name!r}; the cache has {names or 'none'}"


@dataclass(frozen=True, slots=True)
class Pins:
    """One record a name at `folder/<digest of the name>`, so that a name may be any text."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / digest_bytes(name.encode("utf-8", "surrogatepass"))

    def put(self, name: str, key: str) -> None:
        """Keep the entry of `key` under `name`; an earlier pin of that name moves. Raises `FolderNotWritable`."""
        write_record(self.path(name), {"format": FORMAT, "name": name, "key": key})

    def remove(self, name: str) -> None:
        """Raises: NoSuchPin, FolderNotWritable."""
        try:
            self.path(name).unlink()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NoSuchPin(name, tuple(self.all())) from error
        except OSError as error:
            raise FolderNotWritable(error.errno, error.strerror, str(self.folder)) from error

    def all(self) -> dict[str, str]:
        """Name -> key, in name order; a damaged record is no pin, and `Cache.check` reports it."""
        pins = (self._read(path) for path in finished_files(self.folder))
        return dict(sorted(pin for pin in pins if pin is not None))

    def damaged(self) -> tuple[Path, ...]:
        """Records that say nothing, so that it is not known what they keep."""
        return tuple(path for path in finished_files(self.folder) if self._read(path) is None and os.path.lexists(path))

    def _read(self, path: Path) -> tuple[str, str] | None:
        pin = parse_pin(find_record(path))
        return pin if pin is not None and self.path(pin[0]) == path else None


def parse_pin(value: object) -> tuple[str, str] | None:
    """Name and key in the record of a pin, or None when the record says anything else."""
    match value:
        case {"format": 1, "name": str(name), "key": str(key)} if is_digest(key):
            return name, key
        case _:
            return None
