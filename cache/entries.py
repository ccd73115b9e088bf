"""What a cache holds, for people and for gc."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of a cache."""

    key: str
    blobs: Mapping[str, str]  # name -> digest
    info: Mapping[str, str]
    nbytes: int  # of its blobs, each counted once; others may share them
    created_s: float  # seconds since 1970
    last_used_s: float  # seconds since 1970
    pins: tuple[str, ...]  # names that keep it
    is_complete: bool  # every blob is there; their bytes are not looked at

    @property
    def is_pinned(self) -> bool:
        return bool(self.pins)

    def to_json(self) -> dict[str, object]:
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How much a cache holds."""

    root: Path
    entries: int
    pins: int
    blobs: int
    nbytes: int  # of all blobs
    entry_nbytes: int  # of all entries' blobs, shared ones counted for each
    unused_nbytes: int  # of blobs that no entry names: what gc may remove without evicting
    temporary_nbytes: int  # of files being written, or left by killed writers

    @property
    def sharing(self) -> float:
        """Bytes of used blobs over the bytes of all entries; 1.0 when nothing is shared."""
        return (self.nbytes - self.unused_nbytes) / self.entry_nbytes if self.entry_nbytes else 1.0

    def to_json(self) -> dict[str, object]:
        return {**{name: _plain(getattr(self, name)) for name in self.__slots__}, "sharing": self.sharing}


@dataclass(frozen=True, slots=True)
class GcReport:
    """What gc removed, or would remove."""

    is_dry_run: bool
    evicted: tuple[Entry, ...]  # least recently used first
    kept: int  # entries
    blobs: int  # removed
    nbytes: int  # of removed blobs and temporary files
    kept_nbytes: int  # of blobs that are left
    temporaries: int  # files removed that killed writers had left
    over_nbytes: int  # above the limit all the same: pinned, young, or in use

    def to_json(self) -> dict[str, object]:
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


def _plain(value: object) -> object:
    match value:
        case Path():
            return str(value)
        case Mapping():
            return dict(value)
        case tuple():
            return [item.to_json() if isinstance(item, Entry) else item for item in value]
        case _:
            return value
